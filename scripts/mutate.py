"""Mutation testing: plant one fault at a time in a copy of the tree, and see whether the nearest fast tests notice.

    .venv/bin/python scripts/mutate.py --seed 1 --count 60 planner/rules/rules.py 'weights/**/*.py'

Faults are drawn uniformly over what can be mutated in the files; messages, type hints and log lines are left alone.
Prints the mutants that no test killed, and the share that was killed; the exit status is 0 either way.
"""

import argparse
import ast
import contextlib
import difflib
import fnmatch
import importlib
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = "src/superpod/"
NEAREST = {
    "planner/rules/*rules.py": "planner/test_layout.py planner/rules/test_rules.py "
    "planner/rules/test_family_rules.py planner/rules/test_kernel_rules.py planner/test_legality.py",
    "planner/memory/*.py": "planner/memory planner/rules/test_textbook.py",
    "weights/**/*.py": "weights weights/families weights/transfer weights/serving",
    "data/samples/chat*.py": "data/samples/test_chat.py data/samples/test_chat_template.py",
    "runtime/checkpoints/resume.py": "runtime/checkpoints/test_resume.py runtime/attempts/test_attempt_resume.py "
    "runtime/attempts/test_next_attempt.py slurm/submission/test_resume.py",
    "runtime/attempts/guard.py": "runtime/attempts/test_guard.py runtime/attempts/test_attempt.py "
    "runtime/attempts/test_attempt_end.py",
    "requests/resume_changes.py": "requests/test_resume_changes.py",
}
"""What is mutated by default, and its tests below tests/; another file has the tests of its folder."""
FAST = "not slow and not slurm and not long and not nemo and not train"
SLOW_IMPORTS = ("numpy", "pydantic", "jinja2", "torch", "transformers.models.llama.modeling_llama")
"""Imported once, before the tests of all mutants; nothing of this project."""
SILENT = ("print", "note", "debug", "info", "warning", "log", "isinstance", "getattr", "hasattr", "cast", "TypeVar")
SYMMETRIC = ("max", "min", "maximum", "minimum", "isclose", "equal", "assert_close")
"""Calls whose first two arguments may change places."""
SKIPPED = ("annotation", "returns", "decorator_list", "bases")
OPERATORS: dict[type[ast.AST], str] = {
    ast.Eq: "!=", ast.NotEq: "==", ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.In: "not in",
    ast.NotIn: "in", ast.Is: "is not", ast.IsNot: "is", ast.Add: "-", ast.Sub: "+", ast.Mult: "/", ast.Div: "*",
    ast.FloorDiv: "*", ast.Mod: "//", ast.BitAnd: "|", ast.BitOr: "&", ast.And: "or", ast.Or: "and",
}  # fmt: skip
TYPE_CHECKING = "TYPE_CHECKING"


class Mutant(NamedTuple):
    """One fault: bytes of a file and what stands there instead."""

    file: str
    line: int
    begin: int
    end: int
    new: str

    def source(self) -> bytes:
        """The file with the fault."""
        source = (ROOT / self.file).read_bytes()
        return source[: self.begin] + self.new.encode() + source[self.end :]


def mutants(file: str) -> Iterator[Mutant]:
    """Everything that can be mutated in a file of the tree."""
    source = (ROOT / file).read_bytes()
    lines = source.splitlines(keepends=True)
    for node, new in faults(ast.parse(source)):
        first, last = (sum(map(len, lines[: number - 1])) for number in (node.lineno, node.end_lineno or 0))
        yield Mutant(file, node.lineno, first + node.col_offset, last + (node.end_col_offset or 0), new)


def faults(node: ast.AST) -> Iterator[tuple[ast.expr | ast.stmt, str]]:
    """Nodes with the text that takes their place, in and below a node."""
    if isinstance(node, (ast.JoinedStr, ast.Import, ast.ImportFrom, ast.Assert)) or is_silent(node):
        return
    if isinstance(node, ast.expr):
        yield from ((node, new) for new in in_expression(node))
    if isinstance(node, ast.stmt):
        yield from ((node, new) for new in in_statement(node))
    conditions = getattr(node, "ifs", [node.test] if isinstance(node, (ast.If, ast.While)) else [])
    yield from ((test, f"(not ({ast.unparse(test)}))") for test in conditions)
    if isinstance(node, ast.Raise):  # its message
        return
    for name, value in ast.iter_fields(node):
        if name not in SKIPPED:
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST):
                    yield from faults(child)


def is_silent(node: ast.AST) -> bool:
    """Whether nothing that the program does depends on a node."""
    if isinstance(node, ast.Call):
        return called(node) in SILENT
    if isinstance(node, ast.Expr):
        return is_silent(node.value)
    return isinstance(node, ast.If) and ast.unparse(node.test) == TYPE_CHECKING


def called(node: ast.Call) -> str:
    """The last name of what is called."""
    return ast.unparse(node.func).rpartition(".")[2]


def in_expression(node: ast.expr) -> Iterator[str]:
    """What may stand in place of an expression."""
    say = ast.unparse
    match node:
        case ast.Compare(left, [operator], [right]):
            yield f"({say(left)} {OPERATORS[type(operator)]} {say(right)})"
        case ast.BoolOp(operator, values):
            yield "(" + f" {OPERATORS[type(operator)]} ".join(f"({say(value)})" for value in values) + ")"
        case ast.UnaryOp(ast.Not(), operand):
            yield f"bool({say(operand)})"
        case ast.BinOp(left, operator, right) if type(operator) in OPERATORS and not (is_text(left) or is_text(right)):
            yield f"(({say(left)}) {OPERATORS[type(operator)]} ({say(right)}))"
            if isinstance(operator, (ast.Sub, ast.Div, ast.FloorDiv, ast.Mod)):
                yield f"({say(ast.BinOp(right, operator, left))})"
        case ast.IfExp(test, body, orelse):
            yield f"({say(orelse)} if {say(test)} else {say(body)})"
        case ast.Constant(bool() | int() | float() as value):
            yield repr(not value if isinstance(value, bool) else value + 1)
        case ast.Call(args=[first, second, *rest]) if say(first) != say(second) and called(node) not in SYMMETRIC:
            yield say(ast.Call(node.func, [second, first, *rest], node.keywords))


def in_statement(node: ast.stmt) -> Iterator[str]:
    """What may stand in place of a statement."""
    match node:
        case ast.Raise() | ast.Continue() | ast.Break() | ast.AugAssign() | ast.Delete() | ast.Expr(ast.Call()):
            yield "pass"
        case ast.Assign(targets=[ast.Attribute() | ast.Subscript()]):
            yield "pass"
        case ast.Return(ast.expr() as value) if not (isinstance(value, ast.Constant) and value.value in (None, False)):
            yield "return None"


def is_text(node: ast.expr) -> bool:
    """Whether an operand is a string."""
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str))


def tests_of(file: str) -> list[str]:
    """The tests nearest to a file, those that have its name first."""
    file = file.removeprefix(PACKAGE)
    folder = str(Path(file).parent)
    listed = next((tests for pattern, tests in NEAREST.items() if fnmatch.fnmatch(file, pattern)), folder).split()
    found = []
    for name in listed:
        paths = sorted((ROOT / "tests").glob(name if name.endswith(".py") else f"{name}/test_*.py"))
        if not paths:
            sys.exit(f"error: NEAREST names tests/{name}, which does not exist")
        found += paths
    return [str(path.relative_to(ROOT)) for path in sorted(found, key=lambda path: Path(file).stem not in path.stem)]


def copy_tree(into: Path) -> None:
    """The files that git knows or does not ignore."""
    command = ["git", "ls-files", "-zco", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, check=True).stdout.decode()
    for name in filter(os.path.lexists, (ROOT / name for name in listed.split("\0") if name)):
        place = into / name.relative_to(ROOT)
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(name, place, follow_symlinks=False)


def begin(tree: Path, tests: list[str]) -> int:
    """Run tests in a copy, in a fork of this process, which has imported what is slow to import; returns its id."""
    if child := os.fork():
        return child
    status = 1
    try:
        os.setsid()
        os.chdir(tree)
        with open(tree / "output.txt", "w+b") as output:
            for stream in range(3):
                os.dup2(output.fileno(), stream)
        sys.path[:0] = [str(tree), str(tree / "src")]
        sys.dont_write_bytecode = True  # the next mutant may have the size and the second of this one
        os.environ.update(PYTHONPATH=str(tree / "src"), MUTANT_OF=str(tree), PYTHONDONTWRITEBYTECODE="1")
        status = int(pytest.main(["-qx", "-p", "no:cacheprovider", "--hypothesis-seed=0", "-m", FAST, *tests]))
        sys.stdout.flush()
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


def finish(child: int, tree: Path) -> None:
    """Kill a run of tests and all that it started, also in sessions of their own."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if f"MUTANT_OF={tree}".encode() in (entry / "environ").read_bytes().split(b"\0"):
                os.kill(int(entry.name), signal.SIGKILL)


def judge(drawn: list[Mutant], trees: list[Path], timeout: float) -> list[Mutant]:
    """The mutants that no test kills, each run in one of the copies."""
    waiting, running, alive = list(drawn), dict[int, tuple[Mutant, Path, float]](), list[Mutant]()
    while waiting or running:
        while trees and waiting:
            mutant, tree = waiting.pop(0), trees.pop()
            (tree / mutant.file).write_bytes(mutant.source())
            running[begin(tree, tests_of(mutant.file))] = (mutant, tree, time.monotonic())
        time.sleep(0.1)
        for child, (mutant, tree, begun) in list(running.items()):
            ended, status = os.waitpid(child, os.WNOHANG)
            seconds = time.monotonic() - begun
            if not ended and seconds < timeout:
                continue
            finish(child, tree)
            if not ended:
                os.waitpid(child, 0)
            if survived := ended and status == 0:
                alive.append(mutant)
            said = "SURVIVED" if survived else "killed" if ended else "timed out"
            print(f"{said:9} {seconds:5.1f} s  {mutant.file}:{mutant.line}", flush=True)
            shutil.copy2(ROOT / mutant.file, tree / mutant.file)
            del running[child]
            trees.append(tree)
    return alive


def main() -> None:
    """Draw, run and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", default=list(NEAREST), help="files or patterns; default: those of NEAREST")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--timeout", type=float, default=180, help="seconds for the tests of one mutant")
    asked = parser.parse_args()
    files = sorted({str(path.relative_to(ROOT)) for pattern in asked.files for path in (ROOT / PACKAGE).glob(pattern)})
    sites = [mutant for file in files for mutant in mutants(file)]
    drawn = random.Random(asked.seed).sample(sites, min(asked.count, len(sites)))
    for module in SLOW_IMPORTS:
        with contextlib.suppress(ImportError), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            importlib.import_module(module)
    with tempfile.TemporaryDirectory(prefix="mutants-") as scratch:
        trees = [Path(scratch) / str(number) for number in range(asked.workers)]
        for tree in trees:
            copy_tree(tree)
        child = begin(trees[0], sorted({test for mutant in drawn for test in tests_of(mutant.file)}))
        if os.waitpid(child, 0)[1]:
            sys.exit(f"{(trees[0] / 'output.txt').read_text()[-3000:]}\nthe tests fail before anything is mutated")
        alive = judge(drawn, trees, asked.timeout)
    for mutant in sorted(alive):
        before, after = (text.decode().splitlines() for text in ((ROOT / mutant.file).read_bytes(), mutant.source()))
        lines = list(difflib.unified_diff(before, after, n=0, lineterm=""))[2:]
        print(f"\n{mutant.file}:{mutant.line}", *lines, sep="\n")
    print(f"\nkilled {len(drawn) - len(alive)} of {len(drawn)}, drawn of {len(sites)} with seed {asked.seed}")


if __name__ == "__main__":
    main()
