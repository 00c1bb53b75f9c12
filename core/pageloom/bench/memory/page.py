"""The report as a page."""

from __future__ import annotations

from itertools import groupby

from pageloom.bench.memory import paper
from pageloom.bench.memory.report import Report
from pageloom.bench.memory.text import HEADER, cells, notes, numbered
from pageloom.bench.page import Page, Section


def make_page(report: Report) -> Page:
    reasons = numbered(report)
    sections = [
        Section(title, HEADER, [cells(row, reasons) for row in rows])
        for title, rows in groupby(report.rows, key=lambda row: row.figure)
    ]
    return Page(
        "KV memory: the paper and here",
        [
            f"{paper.CITATION}. Measured again without a model, on Pageloom's own scheduler and "
            "block pool."
        ],
        [*sections, Section("Why they differ", numbered=list(reasons))],
        list(notes(report)),
    )
