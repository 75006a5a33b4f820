"""Renders the HTML of `recipes ui`: controls, a frame for the plan, and figures that a script fills."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from superpod.pages import figures
from superpod.pages.page import Page, render

CURVES = (("loss", "Loss", "nats/token"), ("rate", "Throughput", "tokens/s/GPU"))
"""(key, title, unit) of each live curve."""


def render_ui(
    *, models: Sequence[str], gpus: Sequence[str], precisions: Sequence[str], defaults: Mapping[str, str], folder: str
) -> str:
    """Return the HTML page of `recipes ui`.

    Args:
        models: model names to suggest; the user may enter others.
        gpus: GPU types to choose from.
        precisions: precisions to choose from.
        defaults: initial value of each control.
        folder: folder of the runs, which the page displays.
    """
    context = {"models": models, "gpus": gpus, "precisions": precisions, "folder": folder, "curves": CURVES}
    sections = (("planner", "Planner"), ("runs", "Runs"))
    data = {"defaults": dict(defaults), "curves": CURVES}
    page = Page("ui.html", "recipes", "Plans and live runs", "", sections, ("ui.js",), data, context)
    return render(page, figures.create_live_figures())
