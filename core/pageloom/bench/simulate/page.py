"""The report as a page."""

from __future__ import annotations

from pageloom.bench.comparison import header
from pageloom.bench.page import Page, Section
from pageloom.bench.simulate.report import Report, notes


def make_page(report: Report) -> Page:
    return Page(
        "Simulated serving",
        ["Real plans and policies in virtual time; no model was run."],
        [Section("Results", header(report.names), [row.cells() for row in report.rows])],
        list(notes(report)),
    )
