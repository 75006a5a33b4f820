"""`recipes export`: a recipe as one Python file that needs NeMo and NeMo-Run, and nothing of this project.

fiddle can write code too (`fiddle.experimental.codegen`), but as one expression with absolute names, without comments,
and formatted with black, which NeMo does not install. This writes what a person would keep: a function for each part,
comments that say why, and a way to run it.
"""

from __future__ import annotations

import sys
import textwrap
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import fiddle as fdl

from superpod import collection
from superpod.errors import UserError
from superpod.recipes import flatten
from superpod.recipes.export.source_comments import about, sources, table
from superpod.recipes.export.value_source import KINDS, WIDTH, Group, Imports, Writer, comment, lines

if TYPE_CHECKING:
    import nemo_run as run

    from superpod.recipes.registry import Recipe

PARTS = {
    "model": "The network.",
    "data": "What it trains on.",
    "trainer": "How long it trains, and on what.",
    "trainer.strategy": "How the model and its optimizer are spread over the GPUs.",
    "trainer.plugins": "Number formats.",
    "trainer.callbacks": "What happens beside the training.",
    "log": "Where logs go.",
    "log.ckpt": "What is saved, and when.",
    "optim": "The optimizer and its schedule.",
    "resume": "Where a run goes on, or starts from.",
    "peft": "What is trained beside the frozen weights.",
}
"""Path -> docstring of the parts that always become functions of their own. Other parts do if they are long."""

LONG = 16
"""Lines from which on any configuration becomes a function of its own."""

MAIN = '''

def main() -> None:
    """Train as one of a launcher's processes, or start one for each GPU of this machine."""
    whole = recipe()
    nodes, gpus = whole.trainer.num_nodes, whole.trainer.devices
    if "RANK" in os.environ:  # torchrun's process, or a task of srun that was given its rank
        run.run(whole, direct=True)
    elif nodes > 1:
        sys.exit(f"start this on {nodes} nodes, a process for each of {gpus} GPUs: see its top")
    else:
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        os.execv(sys.executable, [*torchrun, f"--nproc-per-node={gpus}", __file__])


if __name__ == "__main__":  # checkpoint writers import this file again
    main()
'''


HEADING = """{name}

{about}

{written}

    python FILE.py              on one node: starts a process for each of its GPUs
    torchrun ... FILE.py        on several: --nnodes {nodes} --nproc-per-node {gpus}, and where they meet
    srun ... python FILE.py     a task for each GPU, with RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR
                                and MASTER_PORT in its environment
"""


def heading(recipe: Recipe, partial: run.Partial, command: str) -> str:
    """The docstring at the top of a recipe's file; `command` is the one that wrote it.

    Raises:
        UserError: overrides have replaced a part that a recipe needs.
    """
    from superpod.planner import explain
    from superpod.recipes.layout import layout_of

    try:
        layout = layout_of(partial)
    except (AttributeError, TypeError) as error:
        raise UserError(f"the overrides left no whole recipe: {error}", "keep its parts configurations") from error
    nodes, gpus = partial.trainer.num_nodes, partial.trainer.devices
    about = (
        f"{recipe.model.title}. {recipe.task.capitalize()}, {recipe.precision}, {nodes} x {gpus} {recipe.gpu}: "
        f"{explain.title(layout)}, gbs {layout.gbs}, {partial.data.seq_length} tokens a sample. {table(recipe)}"
    )
    written = f"Written by `{command}` for {_versions()}. It needs nothing else: change it as you like."
    if own := _own_module(partial):
        written = f"Written by `{command}` for {_versions()}, and {own.name} beside it, from {own}."
    return HEADING.format(name=recipe.name, about=_filled(about), written=_filled(written), nodes=nodes, gpus=gpus)


def _own_module(partial: run.Partial) -> Path | None:
    """The file of a user's collection that defines the model's configuration, if one does."""
    top = fdl.get_callable(partial.model.config).__module__.partition(".")[0]
    return next((path for path in collection.modules() if path.stem == top), None)


def _filled(text: str) -> str:
    return textwrap.fill(text, WIDTH, break_long_words=False, break_on_hyphens=False)


def _versions() -> str:
    names = {"NeMo": "nemo_toolkit", "NeMo-Run": "nemo_run", "Megatron-Core": "megatron-core"}
    *others, last = [f"{title} {metadata.version(name)}" for title, name in names.items()]
    return f"{', '.join(others)} and {last}"


def render(partial: fdl.Buildable, heading: str) -> str:
    """The text of a file whose `recipe()` equals `partial`; `heading` becomes its docstring.

    Raises:
        UserError: a value has no source, or is from this project.
        RuntimeError: the text makes another configuration.
    """
    file = _File()
    file.function("recipe", "The whole recipe.", partial, file.writer.buildable("", partial))
    for name in ("os", "sys"):
        file.imports.module(f"import {name}", name)
    file.imports.module("import nemo_run as run", "run")
    text = "\n".join([*_docstring(heading), "", *_imports(file.imports), *file.functions]) + "\n" + MAIN
    _check_equal(text, partial)
    return text


@dataclass
class _File:
    """The functions of the file, in the order they are written: a part before the whole that calls it."""

    imports: Imports = field(default_factory=Imports)
    functions: list[str] = field(default_factory=list)

    @property
    def writer(self) -> Writer:
        return Writer(self.imports, self.part)

    def part(self, path: str, value: object, document: str | Group) -> str | Group:
        """The call of a new function if the value is to have one, else the document."""
        nodes = value if isinstance(value, list) else [value]
        if isinstance(document, str) or not nodes or not isinstance(nodes[0], fdl.Buildable):
            return document
        if path not in PARTS and "." in path and len(lines(document, 4, 4)) < LONG:
            return document
        name = path.rpartition(".")[2].partition("[")[0]  # trainer.callbacks[0] -> callbacks
        while name in self.imports.lines or name in ("recipe", "main"):
            name += "_"
        self.function(name, PARTS.get(path, f"`{path}` of the recipe."), value, document)
        return f"{name}()"

    def function(self, name: str, title: str, value: object, document: Group) -> None:
        """Add a function that returns the document."""
        self.imports.lines[name] = ""  # taken, by no import
        kind = KINDS[type(value)] if isinstance(value, fdl.Buildable) else "list"
        files = sources(value)
        body = _docstring(title + (f" Set in {', '.join(files)}." if files else ""), 4)
        body += comment(about(value), 4) if about(value) else []
        first, *rest = lines(document, 4, len("    return "))
        self.functions += ["", "", f"def {name}() -> {kind}:", *body, f"    return {first}", *rest]


def _docstring(text: str, indent: int = 0) -> list[str]:
    margin = " " * indent
    if "\n" not in text and len(text) + 6 + indent <= WIDTH:
        return [f'{margin}"""{text}"""']
    if "\n" in text:
        return [f'{margin}"""{text.rstrip()}', f'{margin}"""']
    title, _, rest = text.partition(". ")
    wrapped = textwrap.wrap(rest, WIDTH, initial_indent=margin, subsequent_indent=margin)
    return [f'{margin}"""{title}.', "", *wrapped, f'{margin}"""']


def _imports(imports: Imports) -> list[str]:
    """Import statements as ruff sorts them: the standard library's, then the others."""
    import_lines: list[str] = []
    for standard in (True, False):
        block = sorted({line for line in imports.lines.values() if line and _is_standard(line) == standard})
        plain = [line for line in block if line.startswith("import ")]
        named: dict[str, list[str]] = {}
        for line in block:
            if line.startswith("from "):
                module, _, name = line.removeprefix("from ").partition(" import ")
                # ruff keeps `from m import a as b` apart from other names of m: the space makes another key.
                named.setdefault(module if " as " not in name else f"{module} ", []).append(name)
        statements = plain + [_from(module.strip(), names) for module, names in sorted(named.items())]
        import_lines += ([""] if import_lines and statements else []) + statements
    return import_lines


def _is_standard(line: str) -> bool:
    return line.split()[1].partition(".")[0] in sys.stdlib_module_names


def _from(module: str, names: list[str]) -> str:
    # As isort orders names: CONSTANTS, Classes, functions.
    ordered = sorted(names, key=lambda name: (not name.isupper(), not name[0].isupper(), name))
    line = f"from {module} import {', '.join(ordered)}"
    return line if len(line) <= WIDTH else "\n".join([f"from {module} import (", *(f"    {n}," for n in ordered), ")"])


def _check_equal(text: str, partial: fdl.Buildable) -> None:
    """Execute the file's text, and check that it makes an equal configuration."""
    names: dict[str, Any] = {"__name__": "exported"}
    exec(compile(text, "exported", "exec"), names)
    copy = names["recipe"]()
    lines = {str(line) for line in flatten.flatten(copy)} ^ {str(line) for line in flatten.flatten(partial)}
    # fiddle's equality also sees whether two places share one configuration, which lines do not show.
    if lines or copy != partial:
        raise RuntimeError(f"the exported file makes another recipe: {sorted(lines)[:4] or 'its parts are shared'}")
