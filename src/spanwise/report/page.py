"""Render a page: figures, charts and tables in a single HTML file that needs no network.

Whatever reaches the page as data is escaped by Jinja2, or lies as JSON in a script element that no browser runs. The page's own
scripts are named by their hashes in its Content-Security-Policy, so that no other script can run even if an escape were missing.
"""

from __future__ import annotations

import base64
import hashlib
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

import vl_convert
import yaml
from jinja2 import Environment, PackageLoader, StrictUndefined, Template
from jinja2.utils import htmlsafe_json_dumps
from markupsafe import Markup

from spanwise import __version__
from spanwise.report.charts import Drawn, Palette
from spanwise.report.words import Terms
from spanwise.rollouts.folder import hidden

#: The types of the cells in a report page's table. None and NaN are shown as "not measured".
Cell = str | float | int | None
Table = Sequence[Mapping[str, Cell]]

ABSENT = "not measured"
#: The citation of CITATION.cff without its URL, because report pages contain no URLs.
CITE = (
    "Pavlenko, Golubev, Karasik and Yangel: Blockwise Advantage Estimation for Multi-Objective RL with Verifiable Rewards, 2026, "
    "arXiv:2602.10231."
)


@dataclass(frozen=True)
class Headline:
    """A large number or word at the top of a report page, with a label and a note."""

    label: str
    value: Cell
    note: str = ""  # Lines of small print under the value, such as its interval.
    wrong: str = ""  # An alarm: why the value cannot be trusted.


@dataclass(frozen=True)
class Panel:
    """One or more charts of a report page, with a table of the numbers that they show."""

    title: str  # The heading of the panel, also for screen readers.
    charts: tuple[Drawn, ...]  # The charts of the panel, from top to bottom.
    rows: Table  # A table of the numbers that the charts show.
    note: str = ""  # A sentence under the charts.
    legend: Sequence[str] = ()  # The names of the panel's series, if they differ from the section's legend.


@dataclass(frozen=True)
class Section:
    """A section of a report page: charts, sentences or tables, under a title and a question."""

    title: str  # The heading of the section, also in the table of contents.
    text: str = ""  # A sentence or two on how to read the section.
    legend: Sequence[str] = ()  # The names of the charts' series, in the order of their colours.
    palette: Palette = "series"  # The list of colours to use for the series.
    panels: Sequence[Panel] = ()  # Panels with charts, side by side on a wide page.
    points: Sequence[str] = ()  # Sentences that the section shows as a list.
    tables: Sequence[Table] = ()  # Tables as lists of rows; the first cell names the row.
    body: Markup | None = None  # The HTML of the token view.
    warnings: Sequence[str] = ()  # Warning sentences, shown first in the section.
    asks: str = ""  # The question that the section answers.

    @property
    def anchor(self) -> str:
        """Return the HTML id of a section, for links within the page."""
        return "".join(c if c.isalnum() else "-" for c in self.title.lower())


def render(
    *,
    title: str,
    lead: str,
    finding: str = "",
    command: str = "",
    warnings: Sequence[str] = (),
    notes: Sequence[str] = (),
    headlines: Sequence[Headline] = (),
    sections: Sequence[Section] = (),
    recipe: Mapping[str, Any] | None = None,
) -> str:
    """Render a report, with its charts, tables and scripts, as one HTML file."""
    filled_sections = [s for s in sections if s.panels or s.points or any(s.tables) or s.warnings or s.body is not None]
    has_charts = any(section.panels for section in filled_sections)
    has_token_view = any(section.body is not None for section in filled_sections)
    asset_names = ("report", *(("courses", "why", "list", "steps", "tokens") if has_token_view else ()))
    scripts = [_static(f"{asset_name}.js") for asset_name in asset_names]
    vega_script, packed_vega = _vega() if has_charts else (None, None)
    hashed_scripts = [*scripts, vega_script] if vega_script else scripts
    return template("page.html.j2").render(
        title=title,
        lead=lead,
        finding=finding,
        command=command,
        version=__version__,
        cite=CITE,
        warnings=warnings,
        notes=notes,
        terms=Terms(),
        headlines=headlines,
        sections=filled_sections,
        recipe=yaml.safe_dump(hidden(dict(recipe)), sort_keys=False, allow_unicode=True) if recipe else "",
        styles=Markup("\n".join(_static(f"{asset_name}.css") for asset_name in asset_names)),
        scripts=[Markup(script) for script in scripts],
        vega=packed_vega,
        hashes=[base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in hashed_scripts],
    )


def deflated(text: str) -> str:
    """Compress text to base64, which is safe inside HTML."""
    return base64.b64encode(zlib.compress(text.encode(errors="backslashreplace"), 9)).decode()


def spec_data(chart: Drawn) -> Markup:
    """Return a chart as JSON that is safe inside HTML."""
    chart_spec = chart.to_dict(validate=False)
    page_spec = {key: value for key, value in chart_spec.items() if key not in ("$schema", "config")}
    return htmlsafe_json_dumps(page_spec, separators=(",", ":"), allow_nan=False)


def shown(value: Cell) -> str:
    """Format a table cell. Numbers have about three significant digits; None is "not measured"."""
    if value is None or (isinstance(value, float) and value != value):
        return ABSENT
    if isinstance(value, str):
        return value
    if float(value).is_integer() and abs(value) < 1e15:
        return f"{int(value):,}"
    return f"{value:.3f}" if 0.001 <= abs(value) < 1000 else f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.2g}"


@cache
def template(name: str) -> Template:
    """Load a Jinja template of the report page or of a part of the page."""
    jinja_environment = Environment(
        loader=PackageLoader("spanwise.report"), autoescape=True, undefined=StrictUndefined,
        trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    jinja_environment.filters |= {"shown": shown, "spec": spec_data}
    jinja_environment.globals["ABSENT"] = ABSENT
    return jinja_environment.get_template(name)


@cache
def _static(name: str) -> str:
    """Return the text of a style or script file from the folder `static`."""
    return files("spanwise.report").joinpath("static", name).read_text(encoding="utf-8").strip("\n")


@cache
def _vega() -> tuple[str, str]:
    """Join the chart libraries Vega, Vega-Lite and Vega-Embed into one script. Also return it compressed."""
    script = vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;")
    return script, deflated(script)
