"""The option `--wandb PROJECT`: converts it to an override, and checks that wandb will find an API key."""

from __future__ import annotations

import netrc
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated
from urllib.parse import urlsplit

import typer

from superpod.errors import UserError

Wandb = Annotated[
    str,
    typer.Option(
        "--wandb",
        metavar="PROJECT",
        help="Log to this Weights & Biases project. Requires WANDB_API_KEY or an earlier `wandb login`.",
    ),
]

FORBIDDEN_CHARACTERS = "/\\#?%:"
"""Characters that wandb 0.31 rejects in a project name."""
MAX_NAME_LENGTH = 128
OFFLINE_MODES = ("offline", "dryrun", "disabled")
"""Values of WANDB_MODE that need no API key."""
OVERRIDE_PATH = "log.wandb"


def with_wandb(
    overrides: Sequence[str] | None, project: str, environ: Mapping[str, str] = os.environ, *, is_remote: bool = False
) -> list[str]:
    """Return the overrides of a recipe with the W&B project added.

    Args:
        overrides: overrides of the recipe.
        project: name of the W&B project; "" adds nothing.
        environ: environment variables in which to look for an API key.
        is_remote: the run is on a cluster behind SSH, whose environment is unknown; skip the check of the API key.

    Raises:
        UserError: the name is invalid, an override sets another project, or wandb has no API key.
    """
    overrides = list(overrides or [])
    if not project:
        return overrides
    if (
        project.strip() != project
        or len(project) > MAX_NAME_LENGTH
        or any(c in FORBIDDEN_CHARACTERS or c.isspace() for c in project)
    ):
        raise UserError(
            f"--wandb {project!r} is not a valid W&B project name",
            f"use at most {MAX_NAME_LENGTH} characters, without spaces and {' '.join(FORBIDDEN_CHARACTERS)}",
        )
    project_overrides = [text for text in overrides if text.partition("=")[0].strip() == OVERRIDE_PATH]
    if any(text != f"{OVERRIDE_PATH}={project}" for text in project_overrides):
        raise UserError(f"--wandb {project} conflicts with {project_overrides[0]}", "leave one of them out")
    if not is_remote and not _has_api_key(environ):
        raise UserError(
            "--wandb needs an API key of wandb, for which the ranks cannot prompt",
            "export WANDB_API_KEY=..., or run `wandb login` once; WANDB_MODE=offline needs no key",
        )
    if project_overrides:
        return overrides
    return [*overrides, f"{OVERRIDE_PATH}={project}"]


def _has_api_key(environ: Mapping[str, str]) -> bool:
    """Return whether wandb finds an API key in the environment or in .netrc, or needs none because of WANDB_MODE."""
    if environ.get("WANDB_MODE", "") in OFFLINE_MODES or environ.get("WANDB_API_KEY"):
        return True
    host = urlsplit(environ.get("WANDB_BASE_URL") or "https://api.wandb.ai").hostname or ""
    file = Path(environ.get("NETRC") or Path(environ.get("HOME") or Path.home()) / ".netrc")
    try:
        return netrc.netrc(str(file)).authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        return False
