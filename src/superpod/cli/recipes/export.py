"""`recipes export`: write a recipe as one Python file."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from superpod.cli.options import size_options
from superpod.cli.options.request_options import Build, Data, Name, Overrides, make_request
from superpod.cli.options.size_options import SizeOptions, with_size
from superpod.common import output_file
from superpod.errors import UserError
from superpod.launch.model_check import require_built

if TYPE_CHECKING:
    from superpod.requests.request import Request
    from superpod.requests.resolve import ResolvedRun

RESERVED = {"nemo", "nemo_run", "megatron", "torch", "lightning", "fiddle", "recipe"} | set(sys.stdlib_module_names)
"""Modules that an exported file imports, directly or indirectly, and which a file of the same name would shadow."""


@with_size
def export(
    name: Name,
    overrides: Overrides = None,
    to: Annotated[Path, typer.Option("--to", help="Python file to write.")] = ...,  # type: ignore[assignment]
    data: Data = None,
    *,
    size: SizeOptions,
    build: Build = True,
    force: Annotated[bool, typer.Option("--force", help="Overwrite an existing file.")] = False,
) -> None:
    """Write a recipe as one Python file that needs only NeMo and NeMo-Run."""
    from superpod.launch.display.progress_bar import quiet_spinner

    check_file(to, force=force)
    request = make_request(name, overrides, data, size)
    with quiet_spinner("building and writing the recipe with NeMo (10 to 20 s)"):
        resolved, text = _render(request, size)
    require_built([resolved], build=build)
    check_file(to, force=force)  # another process may have written the file in the meantime
    output_file.write(to, text, "--to")
    print(f"wrote {to}: {len(text.splitlines())} lines that build the same configuration")
    size_options.print_notes(request.mock_data_notes)


def check_file(path: Path, *, force: bool = False) -> None:
    """Check that a recipe can be exported to `path`, overwriting an existing file only with `force`.

    Raises:
        UserError: `path` is not the name of a Python module, would shadow a module that the file imports, already
            exists, or is in a folder that is not writable.
    """
    if path.suffix != ".py" or not path.stem.isidentifier():
        raise UserError(f"{path} is not the name of a Python module", "use a name such as my_recipe.py")
    if path.stem in RESERVED:
        raise UserError(f"{path.name} would shadow a module that the file imports", "choose another name")
    output_file.check_new(path, "--to", force=force)


def _render(request: Request, size: SizeOptions) -> tuple[ResolvedRun, str]:
    """Return the resolved run and the text of its Python file."""
    from superpod.collection.facts import environment
    from superpod.collection.registry import find
    from superpod.requests.resolve import resolve

    run = resolve(request)
    from superpod.nemo2.export import heading, recipe_source  # imports NeMo; `resolve` has checked that it is installed

    command = ["recipes", "export", request.recipe, *request.overrides]
    for option, value in size.given_options().items():
        command += [option, str(value)]
    if request.data:
        command += ["--data", str(request.data)]
    top = heading.heading(find(request.recipe), run.partial, shlex.join(command), request.changes())
    return run, recipe_source.render(run.partial, top, environment.variables(run.job, request.overrides))
