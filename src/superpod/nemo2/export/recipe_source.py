"""`recipes export`: a recipe as one Python file that needs NeMo and NeMo-Run, and nothing of this project.

fiddle can write code too (`fiddle.experimental.codegen`), but as one expression with absolute names, without comments,
and formatted with black, which NeMo does not install. This writes what a person would keep: the environment that the
run needs, the values that are changed first, a function for each part, comments that say why, and a way to run it.
"""

from __future__ import annotations

import os
import sys
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import fiddle as fdl

from superpod.collection.facts.environment import Variable
from superpod.nemo2.export import flatten
from superpod.nemo2.export.constants import Constant, constants, with_folder
from superpod.nemo2.export.source_comments import about
from superpod.nemo2.export.value_source import KINDS, WIDTH, Group, Imports, Item, Writer, comment, lines

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

MOCK = "Random tokens. {module} reads text."
TEXT = {"pretrain": "llm.PreTrainingDataModule(paths=...)", "finetune": "llm.FineTuningDataModule(dataset_root=...)"}
"""NeMo's function -> its data module for text, named where a recipe has random tokens."""

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


ENVIRONMENT = """
# What the run needs, set before CUDA, NCCL, PyTorch and Transformer Engine read it. A value that is
# set already stays.
ENVIRONMENT = {values}
os.environ.update(ENVIRONMENT | os.environ)
"""


def render(partial: fdl.Buildable, heading: str, environment: Sequence[Variable] = ()) -> str:
    """The text of a file whose `recipe()` equals `partial`.

    Args:
        partial: the recipe.
        heading: the file's docstring.
        environment: what its ranks need; the file sets it before it imports torch, where it is not set.

    Raises:
        UserError: a value has no source, or is from this project.
        RuntimeError: the text makes another configuration.
    """
    whole = with_folder(partial)
    file = _File(constants(whole), MOCK.format(module=TEXT.get(fdl.get_callable(partial).__name__, TEXT["pretrain"])))
    file.function("recipe", "The whole recipe.", whole, file.writer.buildable("", whole))
    for name in ("os", "sys"):
        file.imports.module(f"import {name}", name)
    file.imports.module("import nemo_run as run", "run")
    parts = [
        *_docstring(heading),
        *(["# ruff: noqa: E402", ""] if environment else [""]),
        *_imports(file.imports, standard=True),
        *(_environment(environment) if environment else []),
        "",
        *_imports(file.imports, standard=False),
        *([""] if file.constants else []),
        *file.constant_lines(),
        *file.functions,
    ]
    text = "\n".join(parts) + "\n" + MAIN
    _check_equal(text, whole, partial)
    return text


def _environment(variables: Sequence[Variable]) -> list[str]:
    items = [Item(f'"{v.name}": ', f'"{v.value}"', v.reason) for v in variables]
    values = "\n".join(lines(Group("{", items, "}"), 0, 0))
    return ENVIRONMENT.format(values=values).splitlines()


@dataclass
class _File:
    """The functions of the file, in the order they are written: a part before the whole that calls it."""

    constants: Mapping[str, Constant]
    """Path -> the constant that stands for its value."""
    mock_title: str = ""
    """Of the function that makes random data."""
    imports: Imports = field(default_factory=Imports)
    functions: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.imports.lines |= {constant.name: "" for constant in self.constants.values()}

    @property
    def writer(self) -> Writer:
        return Writer(self.imports, self.part)

    def part(self, path: str, value: object, document: str | Group) -> str | Group:
        """The constant of the path, or the call of a new function if the value is to have one, else the document."""
        constant = self.constants.get(path)
        if constant and value == constant.value:
            return constant.name
        nodes = value if isinstance(value, list) else [value]
        if isinstance(document, str) or not nodes or not isinstance(nodes[0], fdl.Buildable):
            return document
        if path not in PARTS and "." in path and len(lines(document, 4, 4)) < LONG:
            return document
        name = path.rpartition(".")[2].partition("[")[0]  # trainer.callbacks[0] -> callbacks
        while name in self.imports.lines or name in ("recipe", "main"):
            name += "_"
        self.function(name, self._title(path, value), value, document)
        return f"{name}()"

    def _title(self, path: str, value: object) -> str:
        if path == "data" and isinstance(value, fdl.Buildable) and fdl.get_callable(value).__name__ == "MockDataModule":
            return self.mock_title
        return PARTS.get(path, f"`{path}` of the recipe.")

    def function(self, name: str, title: str, value: object, document: Group) -> None:
        """Add a function that returns the document."""
        self.imports.lines[name] = ""  # taken, by no import
        kind = KINDS[type(value)] if isinstance(value, fdl.Buildable) else "list"
        body = _docstring(title, 4)
        body += comment(about(value), 4) if about(value) else []
        first, *rest = lines(document, 4, len("    return "))
        self.functions += ["", "", f"def {name}() -> {kind}:", *body, f"    return {first}", *rest]

    def constant_lines(self) -> list[str]:
        """An assignment of each constant."""
        writer = Writer(self.imports, lambda path, value, document: document)
        written: list[str] = []
        for constant in {constant.name: constant for constant in self.constants.values()}.values():
            start = f"{constant.name} = "
            first, *rest = lines(writer.document("", constant.value), 0, len(start))
            why = f"  # {constant.why}" if constant.why else ""
            if rest or len(start + first + why) > WIDTH:
                written += comment(constant.why, 0) if why else []
                why = ""
            written += [start + first + why, *rest]
        return written


def _docstring(text: str, indent: int = 0) -> list[str]:
    margin = " " * indent
    if "\n" not in text and len(text) + 6 + indent <= WIDTH:
        return [f'{margin}"""{text}"""']
    if "\n" in text:
        return [f'{margin}"""{text.rstrip()}', f'{margin}"""']
    title, _, rest = text.partition(". ")
    wrapped = textwrap.wrap(rest, WIDTH, initial_indent=margin, subsequent_indent=margin)
    return [f'{margin}"""{title}.', "", *wrapped, f'{margin}"""']


def _imports(imports: Imports, *, standard: bool) -> list[str]:
    """Import statements as ruff sorts them: of the standard library, or of other packages."""
    block = sorted({line for line in imports.lines.values() if line and _is_standard(line) == standard})
    plain = [line for line in block if line.startswith("import ")]
    named: dict[str, list[str]] = {}
    for line in block:
        if line.startswith("from "):
            module, _, name = line.removeprefix("from ").partition(" import ")
            # ruff keeps `from m import a as b` apart from other names of m: the space makes another key.
            named.setdefault(module if " as " not in name else f"{module} ", []).append(name)
    return plain + [_from(module.strip(), names) for module, names in sorted(named.items())]


def _is_standard(line: str) -> bool:
    return line.split()[1].partition(".")[0] in sys.stdlib_module_names


def _from(module: str, names: list[str]) -> str:
    # As isort orders names: CONSTANTS, Classes, functions.
    ordered = sorted(names, key=lambda name: (not name.isupper(), not name[0].isupper(), name))
    line = f"from {module} import {', '.join(ordered)}"
    return line if len(line) <= WIDTH else "\n".join([f"from {module} import (", *(f"    {n}," for n in ordered), ")"])


def _check_equal(text: str, whole: fdl.Buildable, partial: fdl.Buildable) -> None:
    """Execute the file's text, and check that it makes a configuration equal to `partial`, line by line `whole`."""
    names: dict[str, Any] = {"__name__": "exported"}
    before = dict(os.environ)
    try:
        exec(compile(text, "exported", "exec"), names)
    finally:
        os.environ.clear()
        os.environ.update(before)
    copy = names["recipe"]()
    lines = {str(line) for line in flatten.flatten(copy)} ^ {str(line) for line in flatten.flatten(whole)}
    # fiddle's equality also sees whether two places share one configuration, which lines do not show.
    if lines or copy != partial:
        raise RuntimeError(f"the exported file makes another recipe: {sorted(lines)[:4] or 'its parts are shared'}")
