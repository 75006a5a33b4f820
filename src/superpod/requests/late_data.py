"""A run whose data folder does not exist yet: a job that it waits for makes it (`recipes submit --after JOB`).

All but the data is decided, and refused, where it is submitted, as for mock data. The script carries the request, as of
a machine without NeMo (`planned_run`), and the ranks build the recipe from the folder that they then find. The job
looks for that folder before it starts them (`runtime/attempts/late_data.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from superpod.collection import installed
from superpod.data import folder
from superpod.errors import UserError
from superpod.requests import planned_run
from superpod.requests.request import Request
from superpod.requests.resolve import ResolvedRun, resolve_cached


def is_late(data: Path | None) -> bool:
    """Whether a data folder is still to be made: `recipes data` writes its dataset.json last."""
    return data is not None and not (data / folder.FILE).exists() and not data.is_file()


def of(request: Request, data: Path) -> Request:
    """The request, which was checked without data, on a folder that is still to be made.

    Raises:
        UserError: its recipe is of a user's own folder, whose Python does not travel.
    """
    if planned_run.is_own(request.sized()):
        raise UserError(
            f"--data {data} does not exist yet, and {request.recipe} is of a folder of your own: such a recipe is "
            "built from its data where it is submitted",
            "let the submission itself wait: sbatch --dependency=afterok:JOB --wrap 'recipes submit ...'",
        )
    return replace(request, data=data.absolute(), late_data=True)


def note(request: Request, jobs: Sequence[str]) -> str:
    """What is taken on trust, in words."""
    return (
        f"{request.data} does not exist yet, and {', '.join(jobs)} is trusted to make it; the run looks for it when "
        "it starts, and stops where it is not there"
    )


def without_data(request: Request) -> Request:
    """The same on mock data: what can be decided now."""
    return replace(request, data=None, late_data=False)


def resolve(request: Request) -> ResolvedRun:
    """What a request on late data comes to, for ranks that build it. Raises UserError as `resolve_cached`."""
    if installed.missing():
        return planned_run.resolve(request)
    return planned_run.built_by_ranks(replace(resolve_cached(without_data(request)), request=request))
