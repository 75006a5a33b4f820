"""The page of `recipes ui` as HTML: controls, a frame for the plan, and figures that its script fills."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from superpod.pages import figures
from superpod.pages.page import Page, render

CURVES = (("loss", "Loss", "nats/token"), ("rate", "Throughput", "tokens/s/GPU"))


def text(
    *, models: Sequence[str], gpus: Sequence[str], precisions: Sequence[str], defaults: Mapping[str, str], folder: str
) -> str:
    """The page.

    Args:
        models: names that the control offers; others may be typed.
        gpus, precisions: choices of the controls.
        defaults: by control, what it holds at first.
        folder: of the runs, in words.
    """
    choices = {"models": models, "gpus": gpus, "precisions": precisions}
    words = {**choices, "folder": folder, "curves": CURVES}
    sections = (("planner", "Planner"), ("runs", "Runs"))
    data = {"defaults": dict(defaults), "curves": CURVES}
    page = Page("ui.html", "recipes", "Plans, and runs as they go", "", sections, ("ui.js",), data, words)
    return render(page, figures.live())
