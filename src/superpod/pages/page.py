"""Render a page as a single HTML file that contains its style, scripts and data, and Bokeh.

Text is inserted by Jinja2, which escapes it, or by scripts from the packed data, as text and never as HTML.
"""

from __future__ import annotations

import datetime
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from superpod.errors import UserError
from superpod.pages import GENERATOR, page_data

if TYPE_CHECKING:
    from bokeh.plotting import figure

INSTALL = "pip install -c constraints.txt -e '.[html]'"
ASSETS = Path(__file__).parent / "assets"


@dataclass(frozen=True)
class Page:
    """The content of a page."""

    template: str
    """Template in `assets/`."""
    title: str
    lead: str
    """Sentence below the title."""
    command: str
    """Command line that generated the page."""
    sections: Sequence[tuple[str, str]]
    """Id and name of each section, for the links at the top."""
    scripts: Sequence[str]
    """Files in `assets/` to include after core.js."""
    data: Mapping[str, Any]
    """Data for the scripts."""
    context: Mapping[str, Any]
    """Additional variables of the template."""


def require_bokeh() -> None:
    """Raise UserError if Bokeh, which draws the figures, is not installed."""
    from importlib.util import find_spec

    if find_spec("bokeh") is None:
        raise UserError("--html needs Bokeh, which is not installed", f"run `{INSTALL}`")


def render(page: Page, figures: Mapping[str, figure]) -> str:
    """Return the HTML of a page with these figures, which its template refers to by their keys."""
    import bokeh
    from bokeh.document import Document
    from bokeh.embed import components
    from bokeh.resources import Resources
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    document = Document()
    with document.models.freeze():  # otherwise, adding a figure would traverse all others
        for drawn in figures.values():
            document.add_root(drawn)
    script, divs = components(dict(figures), wrap_script=False)
    environment = Environment(
        loader=FileSystemLoader(ASSETS), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    scripts = "\n".join((ASSETS / name).read_text() for name in ("core.js", *page.scripts))
    return environment.get_template(page.template).render(
        title=page.title,
        lead=page.lead,
        command=page.command,
        sections=page.sections,
        data=page_data.pack({**page.data, "figures": [*figures]}),
        divs=divs,
        embedding=script,
        library=Resources(mode="inline", components=["bokeh"], log_level="warn").render(),
        css=(ASSETS / "page.css").read_text(),
        script=scripts,
        generator=GENERATOR,
        version=_version(),
        bokeh=bokeh.__version__,
        date=datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
        **page.context,
    )


def _version() -> str:
    """Return the installed version of this project, or "" if it is not installed as a package."""
    try:
        return version(GENERATOR)
    except PackageNotFoundError:
        return ""
