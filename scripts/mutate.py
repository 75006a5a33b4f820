"""Mutation testing: plant one fault at a time in a copy of the source tree, and run the nearest fast tests.

    .venv/bin/python scripts/mutate.py --seed 1 --count 60 planner/rules/rules.py 'weights/**/*.py'

Faults are sampled uniformly from all possible mutations in the files; messages, type hints and log lines are not
mutated. Prints the mutants that survive and the number that the tests kill; the exit status is 0 in both cases.
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
"""Files mutated by default -> their tests in tests/; any other file has the tests of its folder."""
FAST = "not slow and not slurm and not long and not nemo and not train"
SLOW_IMPORTS = ("numpy", "pydantic", "jinja2", "torch", "transformers.models.llama.modeling_llama")
"""Third-party modules imported once, before the tests of all mutants."""
SILENT = ("print", "note", "debug", "info", "warning", "log", "isinstance", "getattr", "hasattr", "cast", "TypeVar")
SYMMETRIC = ("max", "min", "maximum", "minimum", "isclose", "equal", "assert_close")
"""Functions whose first two arguments can be swapped without effect."""
SKIPPED = ("annotation", "returns", "decorator_list", "bases")
OPERATORS: dict[type[ast.AST], str] = {
    ast.Eq: "!=", ast.NotEq: "==", ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.In: "not in",
    ast.NotIn: "in", ast.Is: "is not", ast.IsNot: "is", ast.Add: "-", ast.Sub: "+", ast.Mult: "/", ast.Div: "*",
    ast.FloorDiv: "*", ast.Mod: "//", ast.BitAnd: "|", ast.BitOr: "&", ast.And: "or", ast.Or: "and",
}  # fmt: skip
TYPE_CHECKING = "TYPE_CHECKING"


class Mutant(NamedTuple):
    """One fault: the replacement of a range of bytes in a file."""

    file: str
    line: int
    begin: int
    end: int
    new: str

    def source(self) -> bytes:
        """Return the content of the file with the fault."""
        source = (ROOT / self.file).read_bytes()
        return source[: self.begin] + self.new.encode() + source[self.end :]


def mutants(file: str) -> Iterator[Mutant]:
    """Yield all possible mutants of a file."""
    source = (ROOT / file).read_bytes()
    lines = source.splitlines(keepends=True)
    for node, new in faults(ast.parse(source)):
        first, last = (sum(map(len, lines[: number - 1])) for number in (node.lineno, node.end_lineno or 0))
        yield Mutant(file, node.lineno, first + node.col_offset, last + (node.end_col_offset or 0), new)


def faults(node: ast.AST) -> Iterator[tuple[ast.expr | ast.stmt, str]]:
    """Yield (node, replacement text) for a syntax node and its descendants."""
    if isinstance(node, (ast.JoinedStr, ast.Import, ast.ImportFrom, ast.Assert)) or is_silent(node):
        return
    if isinstance(node, ast.expr):
        yield from ((node, new) for new in replace_expression(node))
    if isinstance(node, ast.stmt):
        yield from ((node, new) for new in replace_statement(node))
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
    """Return whether a node has no effect on the program's behaviour: output, logging, type checks."""
    if isinstance(node, ast.Call):
        return called_name(node) in SILENT
    if isinstance(node, ast.Expr):
        return is_silent(node.value)
    return isinstance(node, ast.If) and ast.unparse(node.test) == TYPE_CHECKING


def called_name(node: ast.Call) -> str:
    """Return the name of the called function, without its module or object."""
    return ast.unparse(node.func).rpartition(".")[2]


def replace_expression(node: ast.expr) -> Iterator[str]:
    """Yield the mutations of an expression as text."""
    to_text = ast.unparse
    match node:
        case ast.Compare(left, [operator], [right]):
            yield f"({to_text(left)} {OPERATORS[type(operator)]} {to_text(right)})"
        case ast.BoolOp(operator, values):
            yield "(" + f" {OPERATORS[type(operator)]} ".join(f"({to_text(value)})" for value in values) + ")"
        case ast.UnaryOp(ast.Not(), operand):
            yield f"bool({to_text(operand)})"
        case ast.BinOp(left, operator, right) if type(operator) in OPERATORS and not (is_text(left) or is_text(right)):
            yield f"(({to_text(left)}) {OPERATORS[type(operator)]} ({to_text(right)}))"
            if isinstance(operator, (ast.Sub, ast.Div, ast.FloorDiv, ast.Mod)):
                yield f"({to_text(ast.BinOp(right, operator, left))})"
        case ast.IfExp(test, body, orelse):
            yield f"({to_text(orelse)} if {to_text(test)} else {to_text(body)})"
        case ast.Constant(bool() | int() | float() as value):
            yield repr(not value if isinstance(value, bool) else value + 1)
        case ast.Call(args=[first, second, *rest]) if (
            to_text(first) != to_text(second) and called_name(node) not in SYMMETRIC
        ):
            yield to_text(ast.Call(node.func, [second, first, *rest], node.keywords))


def replace_statement(node: ast.stmt) -> Iterator[str]:
    """Yield the mutations of a statement as text."""
    match node:
        case ast.Raise() | ast.Continue() | ast.Break() | ast.AugAssign() | ast.Delete() | ast.Expr(ast.Call()):
            yield "pass"
        case ast.Assign(targets=[ast.Attribute() | ast.Subscript()]):
            yield "pass"
        case ast.Return(ast.expr() as value) if not (isinstance(value, ast.Constant) and value.value in (None, False)):
            yield "return None"


def is_text(node: ast.expr) -> bool:
    """Return whether an operand is a string literal."""
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str))


def find_tests(file: str) -> list[str]:
    """Return the test files nearest to a source file, those with its name first."""
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
    """Copy all files that git does not ignore to the folder `into`."""
    command = ["git", "ls-files", "-zco", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, check=True).stdout.decode()
    for name in filter(os.path.lexists, (ROOT / name for name in listed.split("\0") if name)):
        place = into / name.relative_to(ROOT)
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(name, place, follow_symlinks=False)


def start_tests(tree: Path, tests: list[str]) -> int:
    """Run tests in a copy of the tree, in a fork of this process with its slow imports; return the process ID."""
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


def kill_tests(child: int, tree: Path) -> None:
    """Kill a run of tests and all processes that it started, including those in other sessions."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if f"MUTANT_OF={tree}".encode() in (entry / "environ").read_bytes().split(b"\0"):
                os.kill(int(entry.name), signal.SIGKILL)


def run_mutants(sampled: list[Mutant], trees: list[Path], timeout: float) -> list[Mutant]:
    """Run the tests of each mutant in one of the copies, and return the mutants that survive."""
    waiting, running, alive = list(sampled), dict[int, tuple[Mutant, Path, float]](), list[Mutant]()
    while waiting or running:
        while trees and waiting:
            mutant, tree = waiting.pop(0), trees.pop()
            (tree / mutant.file).write_bytes(mutant.source())
            running[start_tests(tree, find_tests(mutant.file))] = (mutant, tree, time.monotonic())
        time.sleep(0.1)
        for child, (mutant, tree, begun) in list(running.items()):
            ended, status = os.waitpid(child, os.WNOHANG)
            seconds = time.monotonic() - begun
            if not ended and seconds < timeout:
                continue
            kill_tests(child, tree)
            if not ended:
                os.waitpid(child, 0)
            if survived := ended and status == 0:
                alive.append(mutant)
            result = "SURVIVED" if survived else "killed" if ended else "timed out"
            print(f"{result:9} {seconds:5.1f} s  {mutant.file}:{mutant.line}", flush=True)
            shutil.copy2(ROOT / mutant.file, tree / mutant.file)
            del running[child]
            trees.append(tree)
    return alive


def main() -> None:
    """Sample mutants, run their tests and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "files", nargs="*", default=list(NEAREST), help="files or patterns in src/superpod; default: those of NEAREST"
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--timeout", type=float, default=180, help="seconds for the tests of one mutant (default: 180)")
    options = parser.parse_args()
    files = sorted(
        {str(path.relative_to(ROOT)) for pattern in options.files for path in (ROOT / PACKAGE).glob(pattern)}
    )
    sites = [mutant for file in files for mutant in mutants(file)]
    sampled = random.Random(options.seed).sample(sites, min(options.count, len(sites)))
    for module in SLOW_IMPORTS:
        with contextlib.suppress(ImportError), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            importlib.import_module(module)
    with tempfile.TemporaryDirectory(prefix="mutants-") as scratch:
        trees = [Path(scratch) / str(number) for number in range(options.workers)]
        for tree in trees:
            copy_tree(tree)
        child = start_tests(trees[0], sorted({test for mutant in sampled for test in find_tests(mutant.file)}))
        if os.waitpid(child, 0)[1]:
            sys.exit(f"{(trees[0] / 'output.txt').read_text()[-3000:]}\nthe tests fail before anything is mutated")
        alive = run_mutants(sampled, trees, options.timeout)
    for mutant in sorted(alive):
        before, after = (text.decode().splitlines() for text in ((ROOT / mutant.file).read_bytes(), mutant.source()))
        lines = list(difflib.unified_diff(before, after, n=0, lineterm=""))[2:]
        print(f"\n{mutant.file}:{mutant.line}", *lines, sep="\n")
    print(f"\nkilled {len(sampled) - len(alive)} of {len(sampled)}, a sample of {len(sites)} with seed {options.seed}")


if __name__ == "__main__":
    main()
