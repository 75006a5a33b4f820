"""`recipes export`: write a recipe as one Python file that depends on NeMo and NeMo-Run, but not on this project.

fiddle can also generate code (`fiddle.experimental.codegen`), but as one expression with absolute names, without
comments, and formatted with black, which NeMo does not install. A file written here can be maintained: it has the
environment variables of the run, named constants, a function per part, comments with reasons, and a `main`.
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
from superpod.nemo2.export.constants import Constant, constants, set_log_folder
from superpod.nemo2.export.source_comments import configuration_comment
from superpod.nemo2.export.value_source import KINDS, WIDTH, Group, Imports, Item, Writer, comment, lines

PARTS = {
    "model": "Return the model and its architecture.",
    "data": "Return the training and validation data.",
    "trainer": "Return the trainer: steps, nodes, validation and logging intervals.",
    "trainer.strategy": "Return the parallelism of the model and the sharding of its optimizer.",
    "trainer.plugins": "Return the number formats.",
    "trainer.callbacks": "Return the callbacks.",
    "log": "Return the loggers.",
    "log.ckpt": "Return the checkpoint settings.",
    "optim": "Return the optimizer and its learning-rate schedule.",
    "resume": "Return the checkpoint to resume or start from.",
    "peft": "Return the adapters that are trained on top of the frozen weights.",
}
"""Path -> docstring of a part that always becomes a function. Other parts become functions if they are long."""

MOCK = "Return random tokens. To train on text, use {module}."
"""Docstring of the function that returns random data."""
TEXT = {"pretrain": "llm.PreTrainingDataModule(paths=...)", "finetune": "llm.FineTuningDataModule(dataset_root=...)"}
"""NeMo's function -> its data module for text, for `MOCK`."""

MIN_LINES = 16
"""Minimum number of lines for which a configuration becomes a separate function."""

MAIN = '''

def main() -> None:
    """Train as a process of torchrun or srun, or start one process per GPU of this machine."""
    partial = recipe()
    nodes, gpus = partial.trainer.num_nodes, partial.trainer.devices
    if "RANK" in os.environ:  # set by torchrun, or by the batch script for each task of srun
        run.run(partial, direct=True)
    elif nodes > 1:
        sys.exit(f"start this on {nodes} nodes with {gpus} processes each; see the top of the file")
    else:
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        os.execv(sys.executable, [*torchrun, f"--nproc-per-node={gpus}", __file__])


if __name__ == "__main__":  # the processes that write checkpoints import this file, too
    main()
'''


ENVIRONMENT = """
# Environment variables of the run, set before CUDA, NCCL, PyTorch and Transformer Engine read them.
# Variables that are already set keep their values.
ENVIRONMENT = {values}
os.environ.update(ENVIRONMENT | os.environ)
"""


def render(partial: fdl.Buildable, heading: str, environment: Sequence[Variable] = ()) -> str:
    """Return the source of a file whose function `recipe` returns a configuration equal to `partial`.

    Args:
        partial: the recipe.
        heading: the file's docstring.
        environment: variables of the ranks; the file sets those that are not set before it imports torch.

    Raises:
        UserError: a value cannot be expressed in Python source, or belongs to this project.
        RuntimeError: the source creates a different configuration.
    """
    complete_partial = set_log_folder(partial)
    text_module = TEXT.get(fdl.get_callable(partial).__name__, TEXT["pretrain"])
    file = _File(constants(complete_partial), MOCK.format(module=text_module))
    file.add_function(
        "recipe", "Return the complete recipe.", complete_partial, file.writer.configuration("", complete_partial)
    )
    for name in ("os", "sys"):
        file.imports.module(f"import {name}", name)
    file.imports.module("import nemo_run as run", "run")
    text_lines = _docstring(heading)
    if environment:
        text_lines.append("# ruff: noqa: E402")
    text_lines += ["", *_imports(file.imports, standard=True)]
    if environment:
        text_lines += _environment(environment)
    text_lines += ["", *_imports(file.imports, standard=False)]
    if file.constants:
        text_lines.append("")
    text_lines += [*file.constant_lines(), *file.functions]
    text = "\n".join(text_lines) + "\n" + MAIN
    _check_equal(text, complete_partial, partial)
    return text


def _environment(variables: Sequence[Variable]) -> list[str]:
    """Return the source lines that set the environment variables."""
    items = [Item(f'"{v.name}": ', f'"{v.value}"', v.reason) for v in variables]
    values = "\n".join(lines(Group("{", items, "}"), 0, 0))
    return ENVIRONMENT.format(values=values).splitlines()


@dataclass
class _File:
    """The functions of an exported file; each follows the functions that it calls."""

    constants: Mapping[str, Constant]
    """Path -> constant that replaces the value."""
    mock_title: str
    """Docstring of the function that returns random data."""
    imports: Imports = field(default_factory=Imports)
    functions: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.imports.lines |= {constant.name: "" for constant in self.constants.values()}

    @property
    def writer(self) -> Writer:
        return Writer(self.imports, self.replace)

    def replace(self, path: str, value: object, document: str | Group) -> str | Group:
        """Return the source tree at `path`, or its replacement: a constant, or a call of a new function."""
        constant = self.constants.get(path)
        if constant and value == constant.value:
            return constant.name
        nodes = value if isinstance(value, list) else [value]
        if isinstance(document, str) or not nodes or not isinstance(nodes[0], fdl.Buildable):
            return document
        if path not in PARTS and "." in path and len(lines(document, 4, 4)) < MIN_LINES:
            return document
        name = path.rpartition(".")[2].partition("[")[0]  # trainer.callbacks[0] -> callbacks
        while name in self.imports.lines or name in ("recipe", "main"):
            name += "_"
        self.add_function(name, self._title(path, value), value, document)
        return f"{name}()"

    def _title(self, path: str, value: object) -> str:
        if path == "data" and isinstance(value, fdl.Buildable) and fdl.get_callable(value).__name__ == "MockDataModule":
            return self.mock_title
        return PARTS.get(path, f"Return `{path}` of the recipe.")

    def add_function(self, name: str, title: str, value: object, document: Group) -> None:
        """Add a function `name` with the docstring `title` that returns `value`, whose source tree is `document`."""
        self.imports.lines[name] = ""  # reserve the name; nothing is imported
        kind = KINDS[type(value)] if isinstance(value, fdl.Buildable) else "list"
        body = _docstring(title, 4)
        value_comment = configuration_comment(value)
        if value_comment:
            body += comment(value_comment, 4)
        first, *rest = lines(document, 4, len("    return "))
        self.functions += ["", "", f"def {name}() -> {kind}:", *body, f"    return {first}", *rest]

    def constant_lines(self) -> list[str]:
        """Return the source lines that assign the constants."""
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
    """Return the source lines of a docstring; a long line of text is split after its first sentence."""
    margin = " " * indent
    if "\n" not in text and len(text) + 6 + indent <= WIDTH:
        return [f'{margin}"""{text}"""']
    if "\n" in text:
        return [f'{margin}"""{text.rstrip()}', f'{margin}"""']
    title, _, rest = text.partition(". ")
    wrapped_lines = textwrap.wrap(rest, WIDTH, initial_indent=margin, subsequent_indent=margin)
    return [f'{margin}"""{title}.', "", *wrapped_lines, f'{margin}"""']


def _imports(imports: Imports, *, standard: bool) -> list[str]:
    """Return the import statements of the standard library (`standard`) or of other packages, in ruff's order."""
    block = sorted({line for line in imports.lines.values() if line and _is_standard(line) == standard})
    plain_imports = [line for line in block if line.startswith("import ")]
    named: dict[str, list[str]] = {}
    for line in block:
        if line.startswith("from "):
            module, _, name = line.removeprefix("from ").partition(" import ")
            # ruff puts `from m import a as b` on a separate line; the trailing space creates a separate key.
            key = f"{module} " if " as " in name else module
            named.setdefault(key, []).append(name)
    return plain_imports + [_from_import(module.strip(), names) for module, names in sorted(named.items())]


def _is_standard(line: str) -> bool:
    return line.split()[1].partition(".")[0] in sys.stdlib_module_names


def _from_import(module: str, names: list[str]) -> str:
    """Return an import statement, with names in isort's order: CONSTANTS, Classes, functions."""
    ordered = sorted(names, key=lambda name: (not name.isupper(), not name[0].isupper(), name))
    line = f"from {module} import {', '.join(ordered)}"
    if len(line) <= WIDTH:
        return line
    return "\n".join([f"from {module} import (", *(f"    {name}," for name in ordered), ")"])


def _check_equal(text: str, complete: fdl.Buildable, partial: fdl.Buildable) -> None:
    """Raise RuntimeError unless a file with the source `text` returns a recipe equal to `partial`.

    It must also have the same lines as `complete`, which is `partial` with an explicit log folder.
    """
    names: dict[str, Any] = {"__name__": "exported"}
    old_environ = dict(os.environ)
    try:
        exec(compile(text, "exported", "exec"), names)
    finally:
        os.environ.clear()
        os.environ.update(old_environ)
    exported_recipe = names["recipe"]()
    exported_lines = set(map(str, flatten.flatten(exported_recipe)))
    different_lines = exported_lines ^ set(map(str, flatten.flatten(complete)))
    # fiddle's equality also detects whether two fields share one configuration object, which the lines do not show.
    if different_lines or exported_recipe != partial:
        detail = sorted(different_lines)[:4] or "configuration objects are shared differently"
        raise RuntimeError(f"the exported file creates a different recipe: {detail}")
