"""A report as one HTML page with everything in it: it opens with no network."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from jinja2 import Environment

_PAGE = """\
<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{{ page.title }}</title>
<style>
  body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto }
  table { border-collapse: collapse; margin: 1rem 0; font-variant-numeric: tabular-nums }
  td, th { padding: .2rem .8rem; border-bottom: 1px solid #ddd; text-align: right }
  td { white-space: nowrap }
  td:first-child, th:first-child { text-align: left }
  img { max-width: 100% }
</style>
<h1>{{ page.title }}</h1>
{% for line in page.intro %}<p>{{ line }}</p>
{% endfor %}{% if page.notes %}<ul>{% for line in page.notes %}<li>{{ line }}</li>{% endfor %}</ul>
{% endif %}
{% for name, data in images.items() %}
<p><img alt="{{ name }}" src="data:image/png;base64,{{ data }}"></p>
{% endfor %}
{% for section in page.sections %}
<h2>{{ section.title }}</h2>
{% if section.rows %}
<table>
<tr>{% for name in section.header %}<th>{{ name }}</th>{% endfor %}</tr>
{% for row in section.rows %}<tr>{% for cell in row %}<td>{{ cell }}</td>{% endfor %}</tr>
{% endfor %}</table>
{% endif %}
{% if section.items %}
<ul>{% for item in section.items %}<li>{{ item }}</li>{% endfor %}</ul>
{% endif %}
{% if section.numbered %}
<ol>{% for item in section.numbered %}<li>{{ item }}</li>{% endfor %}</ol>
{% endif %}
{% endfor %}
</html>
"""


@dataclass(frozen=True)
class Section:
    """A heading over a table, and lists."""

    title: str
    header: Sequence[str] = ()
    rows: Sequence[Sequence[str]] = ()
    items: Sequence[str] = ()
    numbered: Sequence[str] = ()  # items that something refers to by number


@dataclass(frozen=True)
class Page:
    title: str
    intro: Sequence[str]  # paragraphs
    sections: Sequence[Section] = ()
    notes: Sequence[str] = ()  # a list behind the paragraphs

    def as_html(self, images: Mapping[str, bytes]) -> str:
        """``images`` are PNG files by name, and become part of the page."""
        inlined = {name: b64encode(data).decode() for name, data in images.items()}
        environment = Environment(autoescape=True)
        return environment.from_string(_PAGE).render(page=self, images=inlined)
