"""Package versions in NVIDIA's NeMo images, for rejecting an incompatible image before submission.

Source: Megatron-Bridge, docs/releases/software-versions.md; for 24.05 to 24.09 docs.nvidia.com/nemo-framework,
user-guide/24.09/softwarecomponentversions.html. Only packages that `versions.py` checks are listed. The versions in
other images are checked when the first rank starts.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING

from superpod.runtime.runs.versions import IGNORE, VERIFIED, Range, find_violations

if TYPE_CHECKING:
    from superpod.requests.resolve import ResolvedRun

Versions = dict[str, str]


def _image(nemo: str, core: str, te: str, cuda: str = "") -> Versions:
    """Return the known versions by package."""
    rows = {"nemo_toolkit": nemo, "megatron-core": core, "transformer-engine": te, "cuda": cuda}
    return {package: version for package, version in rows.items() if version}


IMAGES = {
    "24.05": _image("2.0.0rc0", "0.7.0", "1.6.0"),
    "24.07": _image("2.0.0rc1", "0.8", "1.8.0"),
    "24.09": _image("2.0.0", "0.9.0", "1.10"),
    "25.09": _image("2.5.0", "0.14.0", "2.7.0", "12.9.1"),
    "25.11": _image("2.6.0", "0.15.0", "2.9", "13.0.1"),
    "26.02": _image("2.7.0", "0.16.0", "2.12", "13.0.2"),
    "26.04": _image("2.8.0", "0.17.0", "2.14", "13.1.1"),
}
"""Package versions by tag of nvcr.io/nvidia/nemo."""

NAME = re.compile(r"^(?:docker://)?nvcr\.io[#/]nvidia/nemo:(\d\d\.\d\d)(?:\.\d+)*$")
"""Name of an image in the registry, in the syntax of pyxis and enroot. The name of an image file has no version."""


def versions_in(image: str) -> Versions | None:
    """Return the versions by package in an image of NVIDIA's registry; None if they are unknown."""
    match = NAME.match(image)
    return IMAGES.get(match[1]) if match else None


def problems(image: str, run: ResolvedRun, env: Mapping[str, str]) -> list[str]:
    """Return a message for each package version in an image that a run does not support; [] for unknown images.

    A variable in `env`, that of the profile, disables the version requirements that are not specific to the recipe.
    """
    from superpod.collection.facts import needs
    from superpod.collection.registry import find

    image_versions = versions_in(image)
    if image_versions is None:
        return []
    recipe_ranges = [Range(*need) for need in needs.required_versions(find(run.request.recipe).model, run.job)]
    ranges = recipe_ranges if env.get(IGNORE) == "1" else [*VERIFIED, *recipe_ranges]
    return find_violations(image_versions, ranges, on_gpu=False)  # the tables name these packages only
