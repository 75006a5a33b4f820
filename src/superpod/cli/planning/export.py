"""`recipes export`: a recipe as one Python file."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from superpod.cli.options import size_options
from superpod.cli.options.request_options import Build, Data, Name, Overrides, request_of
from superpod.cli.options.size_options import SizeOptions, with_size
from superpod.cli.running.validated import require_built

if TYPE_CHECKING:
    from superpod.requests.request import Request
    from superpod.requests.resolve import ResolvedRun


@with_size
def export(
    name: Name,
    overrides: Overrides = None,
    to: Annotated[Path, typer.Option("--to", help="The Python file to write.")] = ...,  # type: ignore[assignment]
    data: Data = None,
    *,
    size: SizeOptions,
    build: Build = True,
    force: Annotated[bool, typer.Option("--force", help="Overwrite an existing file.")] = False,
) -> None:
    """Write a recipe as one Python file that runs with only NeMo and NeMo-Run installed."""
    from superpod.cli.running.progress import quiet_wait
    from superpod.nemo2.export import target_file

    target_file.check(to, force=force)
    request = request_of(name, overrides, data, size)
    with quiet_wait("building and writing the recipe with NeMo (10 to 20 s)"):
        resolved, text = _text(request, size)
    require_built([resolved], build=build)
    target_file.write(text, to, force=force)
    print(f"wrote {to}: {len(text.splitlines())} lines, an equal recipe")
    size_options.say(request.mock_data_notes)


def _text(request: Request, size: SizeOptions) -> tuple[ResolvedRun, str]:
    from superpod.collection.facts import environment
    from superpod.collection.registry import find
    from superpod.requests.resolve import resolve

    resolved = resolve(request)
    from superpod.nemo2.export import heading, recipe_source  # import NeMo, which `resolve` says how to install

    options = {**size.given(), "--data": request.data}
    words = [word for option, value in options.items() if value for word in (option, str(value))]
    command = shlex.join(["recipes", "export", request.recipe, *request.overrides, *words])
    top = heading.heading(find(request.recipe), resolved.partial, command, request.changes())
    return resolved, recipe_source.render(resolved.partial, top, environment.variables(resolved.job, request.overrides))
