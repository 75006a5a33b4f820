"""`recipes show`: print the complete configuration of a recipe."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from superpod.cli import tables
from superpod.cli.options.request_options import AsJson, Name, Overrides, make_request
from superpod.cli.options.size_options import SizeOptions, with_size

if TYPE_CHECKING:
    from superpod.nemo2.export.flatten import Line
    from superpod.requests.request import Request

WHY_COLUMN = 58
"""Column at which `--why` prints its comments."""


@with_size
def show(
    name: Name,
    overrides: Overrides = None,
    why: Annotated[bool, typer.Option("--why", help="Append the file and line that set each value.")] = False,
    *,
    size: SizeOptions,
    as_json: AsJson = False,
) -> None:
    """Print the complete configuration of a recipe as lines `path = value`."""
    from superpod.collection.facts import proof_level
    from superpod.collection.registry import find

    request = make_request(name, overrides, None, size, to_run=False)
    lines = _configuration_lines(request)
    if as_json:
        tables.print_json({line.path: {"value": line.value, "where": line.where} for line in lines})
        return
    recipe = find(name)
    print(f"# proof: {proof_level.sentence(recipe, request.num_nodes or recipe.nodes[0], request.changes())}")
    for line in lines:
        print(f"{line!s:{WHY_COLUMN}}  # {line.where}" if why and line.where else line)


def _configuration_lines(request: Request) -> list[Line]:
    """Build a recipe and return its configuration. It is not checked, so that an illegal recipe can be inspected."""
    from superpod.collection import installed
    from superpod.launch.display.progress_bar import quiet_spinner
    from superpod.requests.resolve import build_configuration

    installed.require("building a recipe")
    with quiet_spinner("building the recipe with NeMo (10 to 20 s)"):
        partial, _ = build_configuration(request)
        from superpod.nemo2.export import flatten

        return flatten.flatten(partial)
