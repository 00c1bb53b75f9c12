"""The report as a page."""

from __future__ import annotations

from pageloom.bench.attention import regressions
from pageloom.bench.attention.report import Report, absences, header, notes, tables
from pageloom.bench.page import Page, Section


def make_page(report: Report, changes: regressions.Changes | None) -> Page:
    sections = [Section(title, header(report), rows) for title, rows in tables(report)]
    if gone := list(absences(report)):
        sections.append(Section("Not timed", items=gone))
    if changes is not None:
        said = list(regressions.change_notes(changes))
        rows = list(regressions.rows(changes))
        sections.append(Section("Since the earlier run", regressions.HEADER, rows, said))
    return Page("Attention backends compared", list(notes(report)), sections)
