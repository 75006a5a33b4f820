"""Find syntax, names and regular expressions that an older Python does not support, without running it."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

OLDEST = (3, 9)
NEWER_IN_PATTERNS = {"POSSESSIVE_REPEAT": "a possessive quantifier", "ATOMIC_GROUP": "an atomic group"}
"""Operations of a pattern that came with Python 3.11, by their names in re's parser."""


def problems(paths: list[Path]) -> list[str]:
    """Everything that Python 3.9 would refuse, with its file and line."""
    return [*(text for path in paths for text in (*_syntax(path), *_patterns(path), *_unions(path))), *_names(paths)]


def _syntax(path: Path) -> Iterator[str]:
    try:
        ast.parse(path.read_text(encoding="utf-8"), str(path), feature_version=OLDEST)
    except SyntaxError as error:
        yield f"{path.name}:{error.lineno}: {error.msg}"


def _patterns(path: Path) -> Iterator[str]:
    """Find calls of `re` with a literal pattern, and parse it with Python's own parser."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            for flags in (0, re.VERBOSE):
                yield from (f"{path.name}:{node.lineno}: {word}" for word in _newer(node.value, flags))


def _newer(pattern: str, flags: int) -> Iterator[str]:
    try:
        parsed = repr(re._parser.parse(pattern, flags))  # pyright: ignore[reportAttributeAccessIssue]
    except (re.error, OverflowError, RecursionError):
        return  # a text that is no pattern
    yield from (meaning for name, meaning in NEWER_IN_PATTERNS.items() if name in parsed)


def _unions(path: Path) -> Iterator[str]:
    """Find `int | str` where it is evaluated, for instance as an argument of isinstance."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("isinstance", "issubclass", "cast"):
            unions = [part for part in node.args if isinstance(part, ast.BinOp) and isinstance(part.op, ast.BitOr)]
            yield from (f"{path.name}:{part.lineno}: X | Y as a type at run time" for part in unions)


def _names(paths: list[Path]) -> list[str]:
    """Modules, names and keywords of the standard library that came later, by vermin."""
    target = "{}.{}-".format(*OLDEST)
    options = [f"-t={target}", "--no-tips", "--violations", "--no-parse-comments"]
    command = [Path(sys.executable).parent / "vermin", *options, *paths]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert "Minimum required versions" in done.stdout, done.stdout + done.stderr
    if done.returncode == 0:
        return []
    return [line.strip() for line in done.stdout.splitlines() if " require" in line]
