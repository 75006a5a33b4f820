"""`--wandb PROJECT`: what it becomes, and what can be refused of it before NeMo is imported. The key is never read."""

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
    str, typer.Option("--wandb", metavar="PROJECT", help="Log to Weights & Biases too; its key from the environment.")
]

FORBIDDEN = "/\\#?%:"
"""Characters that wandb 0.31 refuses in a project's name."""
LONGEST = 128
OFFLINE = ("offline", "dryrun", "disabled")
"""Values of WANDB_MODE that need no key."""
PATH = "log.wandb"


def with_wandb(
    overrides: Sequence[str] | None, project: str, environ: Mapping[str, str] = os.environ, *, elsewhere: bool = False
) -> list[str]:
    """The overrides with that of the project; unchanged where none is named.

    Args:
        overrides: of the recipe.
        project: of W&B; '' = no W&B.
        environ: of this shell.
        elsewhere: the run has another environment, behind SSH, so that a key cannot be looked for.

    Raises:
        UserError: no name of a project, an override that says another, or no key for wandb.
    """
    overrides = list(overrides or [])
    if not project:
        return overrides
    if project.strip() != project or len(project) > LONGEST or any(c in FORBIDDEN or c.isspace() for c in project):
        raise UserError(
            f"--wandb {project!r} is no project's name of W&B", f"leave out {' '.join(FORBIDDEN)} and spaces"
        )
    others = [text for text in overrides if text.partition("=")[0].strip() == PATH]
    if any(text != f"{PATH}={project}" for text in others):
        raise UserError(f"--wandb {project} and {others[0]} contradict each other", "leave one of the two out")
    if not elsewhere and not has_key(environ):
        raise UserError(
            "--wandb: wandb has no key here, and ranks cannot ask for one",
            "export WANDB_API_KEY=..., or `wandb login` once; WANDB_MODE=offline needs none",
        )
    return overrides if others else [*overrides, f"{PATH}={project}"]


def has_key(environ: Mapping[str, str]) -> bool:
    """Whether wandb needs no key, or will have one: in the environment, or in netrc for its server."""
    if environ.get("WANDB_MODE", "") in OFFLINE or environ.get("WANDB_API_KEY"):
        return True
    host = urlsplit(environ.get("WANDB_BASE_URL") or "https://api.wandb.ai").hostname or ""
    file = Path(environ.get("NETRC") or Path(environ.get("HOME") or Path.home()) / ".netrc")
    try:
        return netrc.netrc(str(file)).authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        return False
