"""The report as a page."""

from __future__ import annotations

from pageloom.bench.http.report import Report
from pageloom.bench.http.text import failures, notes, table
from pageloom.bench.page import Page, Section


def make_page(report: Report) -> Page:
    header, *rows = table(report)
    results = Section("Results", header, rows, items=list(failures(report)))
    return Page("Servers under load", [], [results], list(notes(report)))
