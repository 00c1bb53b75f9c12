"""One HTML page with everything in it: tables, reasons, figures."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Mapping
from itertools import groupby

from jinja2 import Environment

from pageloom.bench.memory import paper
from pageloom.bench.memory.report import Report
from pageloom.bench.memory.text import HEADER, cells, notes, numbered

_PAGE = """\
<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>KV memory: the paper and here</title>
<style>
  body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto }
  table { border-collapse: collapse; margin: 1rem 0 }
  td, th { padding: .2rem .8rem; border-bottom: 1px solid #ddd; text-align: right }
  td:first-child, th:first-child { text-align: left }
  img { max-width: 100% }
</style>
<h1>KV memory: the paper and here</h1>
<p>{{ citation }}. Measured again without a model, on Pageloom's own scheduler and block pool.</p>
<ul>{% for line in notes %}<li>{{ line }}</li>{% endfor %}</ul>
{% for name, data in images.items() %}
<p><img alt="{{ name }}" src="data:image/png;base64,{{ data }}"></p>
{% endfor %}
{% for title, rows in tables %}
<h2>{{ title }}</h2>
<table>
<tr>{% for name in header %}<th>{{ name }}</th>{% endfor %}</tr>
{% for row in rows %}<tr>{% for cell in row %}<td>{{ cell }}</td>{% endfor %}</tr>
{% endfor %}</table>
{% endfor %}
<h2>Why they differ</h2>
<ol>{% for reason in reasons %}<li>{{ reason }}</li>{% endfor %}</ol>
</html>
"""


def as_html(report: Report, images: Mapping[str, bytes]) -> str:
    reasons = numbered(report)
    tables = [
        (title, [cells(row, reasons) for row in rows])
        for title, rows in groupby(report.rows, key=lambda row: row.figure)
    ]
    return (
        Environment(autoescape=True)
        .from_string(_PAGE)
        .render(
            citation=paper.CITATION,
            notes=notes(report),
            header=HEADER,
            images={name: b64encode(data).decode() for name, data in images.items()},
            tables=tables,
            reasons=list(reasons),
        )
    )
