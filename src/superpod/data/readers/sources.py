"""What `--data` names: a file, a dataset's folder or a glob, and how much of an epoch it makes up."""

from __future__ import annotations

import glob
import math
import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from superpod.data.readers import dataset_folder, paths, rows
from superpod.errors import UserError

_WEIGHTED = re.compile(r"(?P<name>.+):(?P<weight>[^:/]*)", re.DOTALL)


@dataclass(frozen=True)
class Named:
    """One `--data` as it was given: an absolute path or glob, and the weight behind its last colon, if any."""

    name: str
    weight: float | None = None


@dataclass(frozen=True)
class Source:
    """The files that one `--data` names. `validation` are those of a folder's own validation split."""

    name: str
    files: tuple[Path, ...]
    validation: tuple[Path, ...] = ()


def parse(texts: Sequence[str]) -> tuple[tuple[str, ...], tuple[float, ...]]:
    """Absolute names, and their weights (none, or one each) of `NAME` or `NAME:WEIGHT`.

    A name that exists is a name, whatever colons are in it.

    Raises:
        UserError: a weight that is none, or weights for some names only.
    """
    named = [_named(text) for text in texts]
    weights = [one.weight for one in named if one.weight is not None]
    if weights and len(weights) != len(named):
        without = next(one.name for one in named if one.weight is None)
        raise UserError(f"--data {paths.short(without)} has no weight, and others have one", "weigh all, or none")
    twice = [one.name for at, one in enumerate(named) if one.name in [other.name for other in named[:at]]]
    if twice:
        raise UserError(f"--data {paths.short(twice[0])} is named twice", "NAME:WEIGHT gives it a larger share")
    return tuple(one.name for one in named), tuple(weights)


def _named(text: str) -> Named:
    if not text.strip():
        raise UserError("--data is empty", "name a file of samples")
    parts = _WEIGHTED.fullmatch(text)
    if _exists(text) or not parts:
        return Named(_absolute(text))
    try:
        weight = float(parts["weight"])
    except ValueError:
        if _exists(parts["name"]):
            message = f"--data {paths.short(text)} is no file, and {parts['weight']!r} is no weight"
            raise UserError(message, "NAME:0.3, or the name of a file") from None
        return Named(_absolute(text))  # a glob, or a file that is not there
    if not (math.isfinite(weight) and weight > 0):
        raise UserError(f"--data {paths.short(text)}: a weight is above 0 and finite", "leave out what has no share")
    return Named(_absolute(parts["name"]), weight)


def _exists(name: str) -> bool:
    paths.check(os.path.expanduser(name), "--data ")
    return os.path.lexists(os.path.expanduser(name))


def _absolute(name: str) -> str:
    return os.path.abspath(os.path.expanduser(name))


def find(names: Iterable[str], validation: bool = False) -> list[Source]:
    """The files of every name; with `validation`, those of a folder's validation split.

    Raises:
        UserError: a name without files, or a folder without that split.
    """
    return [_source(name, validation) for name in names]


def _source(name: str, validation: bool) -> Source:
    if os.path.isdir(name):
        return _of_folder(name, validation)
    if not os.path.lexists(name) and glob.has_magic(name):
        files = tuple(Path(file) for file in sorted(glob.glob(name, recursive=True)) if os.path.isfile(file))
        if not files:
            raise UserError(f"--data {paths.short(name)} matches no file", "quote a glob; ** matches any depth")
        return Source(name, files)
    rows.check_file(Path(name))
    return Source(name, (Path(name),))


def _of_folder(name: str, validation: bool) -> Source:
    by_split = dataset_folder.splits(Path(name))
    has = by_split.get("validation", ())
    if validation:
        files = has or (next(iter(by_split.values())) if len(by_split) == 1 else ())
        return Source(name, files or _refuse_split(name, "validation", by_split))
    return Source(name, by_split.get("train") or _refuse_split(name, "train", by_split), has)


def _refuse_split(name: str, split: str, by_split: dataset_folder.Splits) -> tuple[Path, ...]:
    first = next(iter(by_split))
    raise UserError(
        f"{paths.short(name)} has no split {split}, but {', '.join(by_split)}",
        f"name the files of one: '{by_split[first][0].parent}/{first}*'",
    )
