"""`recipes export`: write a recipe as one Python file."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from superpod.cli.options import size_options
from superpod.cli.options.request_options import Build, Data, Name, Overrides, make_request
from superpod.cli.options.size_options import SizeOptions, with_size
from superpod.common import output_file
from superpod.errors import UserError
from superpod.launch.model_check import require_built

if TYPE_CHECKING:
    from superpod.bridge.export import BridgeExport
    from superpod.requests.request import Request
    from superpod.requests.resolve import BuiltRun

Stack = Literal["nemo2", "bridge"]
"""Library that trains the exported recipe."""

BRIDGE: Literal["bridge"] = "bridge"

RESERVED = {
    "nemo",
    "transformer_engine",
    "nemo_run",
    "transformers",
    "datasets",
    "omegaconf",
    "hydra",
    "yaml",
    "megatron",
    "torch",
    "lightning",
    "fiddle",
    "recipe",
} | set(sys.stdlib_module_names)
"""Modules that the file imports, directly or indirectly. A file with one of these names would shadow the module."""


@with_size
def export(
    name: Name,
    overrides: Overrides = None,
    to: Annotated[
        Path,
        typer.Option("--to", help="Python file to write. `bridge` stands for --stack bridge --to NAME_bridge.py."),
    ] = ...,  # type: ignore[assignment]
    stack: Annotated[
        Stack, typer.Option("--stack", help="Library that trains: nemo2, or bridge for Megatron-Bridge.")
    ] = "nemo2",
    data: Data = None,
    *,
    size: SizeOptions,
    build: Build = True,
    force: Annotated[bool, typer.Option("--force", help="Overwrite an existing file.")] = False,
) -> None:
    """Write a recipe to a single Python file that needs only NeMo and NeMo-Run, or only Megatron-Bridge."""
    from superpod.launch.display.progress_bar import quiet_spinner

    if str(to) == BRIDGE:
        stack, to = BRIDGE, Path(f"{name}_bridge.py")
    script = to.with_suffix(".sbatch") if stack == BRIDGE else None
    check_file(to, force=force)
    if script:
        output_file.check_new(script, "--to", force=force)
    request = make_request(name, overrides, data, size)
    with quiet_spinner("building and writing the recipe with NeMo (10 to 20 s)"):
        resolved = _resolve(request)
        command = shlex.join(_command(request, size, stack))
        exported = _export_to_bridge(resolved, command, to) if script else None
        text = exported.file if exported else _render(resolved, command)
    require_built([resolved], build=build)
    check_file(to, force=force)  # another process may have written the file in the meantime
    output_file.write(to, text, "--to")
    lines = len(text.splitlines())
    print(f"wrote {to}: {lines} lines" if exported else f"wrote {to}: {lines} lines that build the same configuration")
    if exported and script:
        output_file.write(script, exported.script, "--to")
        print(f"wrote {script}: submit it with sbatch, with the account and partition of your cluster")
        print("\n".join(exported.notes))
        return
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


def _resolve(request: Request) -> BuiltRun:
    from superpod.requests.resolve import resolve

    return resolve(request)


def _command(request: Request, size: SizeOptions, stack: Stack) -> list[str]:
    """Return the command that exports the request, without the name of the file."""
    command = ["recipes", "export", request.recipe, *request.overrides]
    for option, value in size.given_options().items():
        command += [option, str(value)]
    if request.data:
        command += ["--data", str(request.data)]
    return [*command, "--stack", stack] if stack != "nemo2" else command


def _render(run: BuiltRun, command: str) -> str:
    """Return the text of the Python file for NeMo."""
    from superpod.collection.facts import environment
    from superpod.collection.registry import find
    from superpod.nemo2.export import heading, recipe_source

    request = run.request
    top = heading.heading(find(request.recipe), run.partial, command, request.changes())
    return recipe_source.render(run.partial, top, environment.variables(run.job, request.overrides))


def _export_to_bridge(run: BuiltRun, command: str, to: Path) -> BridgeExport:
    """Return the files for Megatron-Bridge."""
    from superpod.bridge import export as bridge_export
    from superpod.collection.facts import environment
    from superpod.collection.registry import find

    request = run.request
    return bridge_export.export(
        run.partial,
        find(request.recipe),
        environment={v.name: v.value for v in environment.variables(run.job, request.overrides)},
        command=command,
        file=to.name,
    )
