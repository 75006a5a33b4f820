"""Parse `--data`: a file, a dataset folder or a glob, with an optional weight."""

from __future__ import annotations

import glob
import math
import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from superpod.data import paths
from superpod.data.readers import dataset_folder, rows
from superpod.errors import UserError

_WEIGHTED = re.compile(r"(?P<name>.+):(?P<weight>[^:/]*)", re.DOTALL)


@dataclass(frozen=True)
class NamedSource:
    """A parsed `--data`: an absolute path or glob, and the weight after the last colon."""

    name: str
    weight: float | None = None


@dataclass(frozen=True)
class Source:
    """The files of one `--data`; `validation` are those of a dataset folder's validation split."""

    name: str
    files: tuple[Path, ...]
    validation: tuple[Path, ...] = ()


def parse_data_options(texts: Sequence[str]) -> tuple[tuple[str, ...], tuple[float, ...]]:
    """Return the absolute names and the weights in arguments of the form `NAME` or `NAME:WEIGHT`.

    The weights are empty if no argument has one. An existing path is a name even if it contains colons.

    Raises:
        UserError: a weight is invalid, a name is repeated, or only some names have weights.
    """
    named_sources = [_parse_data_option(text) for text in texts]
    names = [one.name for one in named_sources]
    weights = [one.weight for one in named_sources if one.weight is not None]
    if weights and len(weights) != len(named_sources):
        unweighted = next(one.name for one in named_sources if one.weight is None)
        raise UserError(
            f"--data {paths.shorten(unweighted)} has no weight, but others do",
            "pass a weight for every --data or for none",
        )
    for name in names:
        if names.count(name) > 1:
            raise UserError(f"--data {paths.shorten(name)} is given twice", "use NAME:WEIGHT to increase its share")
    return tuple(names), tuple(weights)


def _parse_data_option(text: str) -> NamedSource:
    if not text.strip():
        raise UserError("--data is empty", "pass a file with samples")
    parts = _WEIGHTED.fullmatch(text)
    if _exists(text) or not parts:
        return NamedSource(_to_absolute(text))
    try:
        weight = float(parts["weight"])
    except ValueError:
        if _exists(parts["name"]):
            message = f"--data {paths.shorten(text)} is not a file, and {parts['weight']!r} is not a weight"
            raise UserError(message, "write NAME:0.3, or the name of a file") from None
        return NamedSource(_to_absolute(text))  # a glob, or a missing file
    if not (math.isfinite(weight) and weight > 0):
        message = f"--data {paths.shorten(text)}: a weight must be positive and finite"
        raise UserError(message, "remove the --data that should not be used")
    return NamedSource(_to_absolute(parts["name"]), weight)


def _exists(name: str) -> bool:
    paths.check(os.path.expanduser(name), "--data ")
    return os.path.lexists(os.path.expanduser(name))


def _to_absolute(name: str) -> str:
    return os.path.abspath(os.path.expanduser(name))


def find_sources(names: Iterable[str], validation: bool = False) -> list[Source]:
    """Return the files of each --data argument.

    Args:
        names: files, dataset folders or globs.
        validation: find validation samples: of a dataset, return only its validation split.

    Raises:
        UserError: a name has no files, or a dataset lacks the split.
    """
    return [_find_source(name, validation) for name in names]


def _find_source(name: str, validation: bool) -> Source:
    if os.path.isdir(name):
        return _find_dataset_files(name, validation)
    if not os.path.lexists(name) and glob.has_magic(name):
        files = tuple(Path(file) for file in sorted(glob.glob(name, recursive=True)) if os.path.isfile(file))
        if not files:
            raise UserError(f"--data {paths.shorten(name)} matches no file", "quote the glob; ** matches any depth")
        return Source(name, files)
    rows.check_file(Path(name))
    return Source(name, (Path(name),))


def _find_dataset_files(name: str, validation: bool) -> Source:
    by_split = dataset_folder.find_splits(Path(name))
    validation_files = by_split.get("validation", ())
    if not validation:
        return Source(name, by_split.get("train") or _raise_missing_split(name, "train", by_split), validation_files)
    if not validation_files and len(by_split) == 1:
        validation_files = next(iter(by_split.values()))
    return Source(name, validation_files or _raise_missing_split(name, "validation", by_split))


def _raise_missing_split(name: str, split: str, by_split: dataset_folder.Splits) -> NoReturn:
    first = next(iter(by_split))
    raise UserError(
        f"{paths.shorten(name)} has no split {split}, only {', '.join(by_split)}",
        f"pass the files of one split: '{by_split[first][0].parent}/{first}*'",
    )
