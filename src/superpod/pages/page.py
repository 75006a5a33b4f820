"""A page: one HTML file with its style, its scripts, its data and Bokeh's script in it. It asks no server for anything.

Text enters through Jinja2, which escapes it, or through the packed data, which scripts show as text and never as HTML.
"""

from __future__ import annotations

import datetime
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from superpod.errors import UserError
from superpod.pages import GENERATOR, packing

if TYPE_CHECKING:
    from bokeh.plotting import figure

INSTALL = "pip install -c constraints.txt -e '.[html]'"
ASSETS = Path(__file__).parent / "assets"


@dataclass(frozen=True)
class Page:
    """What a page holds."""

    template: str
    """Of `assets/`."""
    title: str
    lead: str
    """A sentence below the title."""
    command: str
    """The command line that made the page."""
    sections: Sequence[tuple[str, str]]
    """Where the links at the top go: (id, name)."""
    scripts: Sequence[str]
    """Of `assets/`, after core.js."""
    data: Mapping[str, Any]
    words: Mapping[str, Any]
    """What the template asks for beside this."""


def require_bokeh() -> None:
    """Check that pages can be drawn.

    Raises:
        UserError: Bokeh is not installed.
    """
    from importlib.util import find_spec

    if find_spec("bokeh") is None:
        raise UserError("--html draws with Bokeh, which is not installed", INSTALL)


def render(page: Page, figures: Mapping[str, figure]) -> str:
    """The whole page as text."""
    import bokeh
    from bokeh.document import Document
    from bokeh.embed import components
    from bokeh.resources import Resources
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    document = Document()
    with document.models.freeze():  # else every figure that is added walks through all of them
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
        data=packing.packed({**page.data, "figures": [*figures]}),
        divs=divs,
        embedding=script,
        library=Resources(mode="inline", components=["bokeh"], log_level="warn").render(),
        css=(ASSETS / "page.css").read_text(),
        script=scripts,
        generator=GENERATOR,
        version=_version(),
        bokeh=bokeh.__version__,
        date=datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
        **page.words,
    )


def _version() -> str:
    try:
        return version(GENERATOR)
    except PackageNotFoundError:
        return ""
