"""Which files of a Hugging Face dataset's folder belong to which split. Reads names and small files only.

Two kinds of folders: what `Dataset.save_to_disk` writes (state.json, dataset_dict.json, .arrow files), and a clone or a
download of a dataset of the hub (README.md may name the files of a split; otherwise their names do, as in `datasets`).
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path

from superpod.data.readers import paths, rows
from superpod.errors import UserError

SPLITS = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "dev", "val"),
    "test": ("test", "testing", "eval", "evaluation"),
}
"""Split -> the words in a file's name that mean it, as `datasets` has them."""
_SHARD = re.compile(r"(?P<split>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})$")
_MOST = 100_000
"""Files that a folder may have."""

Splits = Mapping[str, tuple[Path, ...]]


def splits(folder: Path) -> Splits:
    """The files of each split of a dataset's folder, sorted; a dataset without splits is "train".

    Raises:
        UserError: not a folder of a dataset, or one of which files are missing.
    """
    if (folder / "dataset_dict.json").is_file():
        names = _json(folder / "dataset_dict.json").get("splits")
        if not isinstance(names, list) or not names or not all(isinstance(name, str) for name in names):
            raise UserError(f"{paths.short(folder / 'dataset_dict.json')} names no splits", _ANEW)
        return {name: _saved(folder / _plain(folder, name)) for name in names}
    if (folder / "state.json").is_file():
        return {"train": _saved(folder)}
    files = _files(folder)
    if not files:
        what = "a model's folder" if (folder / "config.json").is_file() else "no dataset's folder"
        endings = ", ".join(rows.FORMATS)
        raise UserError(f"{paths.short(folder)} is {what}: it has no file of {endings}", "name a file of samples")
    by_split = _by_readme(folder, files) or _by_name(folder, files)
    for split, members in by_split.items():
        _check_one_format(folder, split, members)
        _check_shards(members)
    return by_split


def _plain(folder: Path, name: object) -> str:
    """A name of a file in the folder; UserError for one that leads out of it."""
    if not isinstance(name, str) or name in ("", ".", "..") or "/" in name or "\0" in name:
        raise UserError(f"{paths.short(folder)} names {paths.short(repr(name))}, which is no file of its own", _ANEW)
    return name


def _saved(folder: Path) -> tuple[Path, ...]:
    """The .arrow files of a folder that `save_to_disk` wrote, in the dataset's order."""
    listed = _json(folder / "state.json").get("_data_files")
    if not isinstance(listed, list) or not listed or not all(isinstance(entry, dict) for entry in listed):
        raise UserError(f"{paths.short(folder / 'state.json')} names no data files", _ANEW)
    files = tuple(folder / _plain(folder, entry.get("filename")) for entry in listed)
    for file in files:
        if not file.is_file():
            raise UserError(f"{paths.short(file)} is missing, and {folder.name}/state.json names it", _ANEW)
    return files


def _json(file: Path) -> dict[str, object]:
    try:
        value = json.loads(file.read_bytes())
    except OSError as error:
        raise UserError(f"{paths.short(file)} cannot be read: {error.strerror}", _ANEW) from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"{paths.short(file)} is not JSON: {error}", _ANEW) from None
    if not isinstance(value, dict):
        raise UserError(f"{paths.short(file)} is not a JSON object", _ANEW)
    return value


def _files(folder: Path) -> list[Path]:
    """Files of samples below a folder, without hidden ones; links to folders are not followed, so that none loops."""
    files: list[Path] = []
    for root, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith((".", "_")))
        members = [Path(root, name) for name in sorted(names) if not name.startswith((".", "_"))]
        files += [file for file in members if _has_samples(file)]
        if len(files) > _MOST:
            raise UserError(f"{paths.short(folder)} has more than {_MOST} files", "name the files, or a glob of them")
    return files


_DESCRIPTIONS = ("dataset_info.json", "dataset_infos.json", "state.json", "dataset_dict.json", "config.json",
                 "package.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json",
                 "special_tokens_map.json")  # fmt: skip


def _has_samples(file: Path) -> bool:
    name = file.name.lower()
    for ending in rows.PACKED:
        name = name.removesuffix(ending)
    return os.path.splitext(name)[1] in rows.FORMATS and name not in _DESCRIPTIONS


def _by_readme(folder: Path, files: list[Path]) -> Splits:
    """Splits as the README's YAML head names them; empty where it names none.

    Raises:
        UserError: several configurations, or a pattern without files.
    """
    configs = _configs(folder / "README.md")
    if not configs:
        return {}
    if len(configs) > 1:
        chosen = [config for config in configs if config.get("config_name") == "default" or config.get("default")]
        if len(chosen) != 1:
            names = ", ".join(str(config.get("config_name")) for config in configs[:12])
            raise UserError(
                f"{paths.short(folder)} has {len(configs)} configurations: {names}",
                f"name the files of one: --data '{folder}/NAME/train*.parquet'",
            )
        configs = chosen
    by_split: dict[str, tuple[Path, ...]] = {}
    for split, patterns in _patterns(configs[0].get("data_files")):
        members = [file for file in files if any(file.relative_to(folder).match(p) for p in patterns)]
        if not members:
            raise UserError(f"{paths.short(folder)} has no file {', '.join(patterns)}, which its README names", _ANEW)
        by_split[split] = (*by_split.get(split, ()), *members)
    return by_split


def _configs(readme: Path) -> list[dict[str, object]]:
    import yaml

    try:
        with readme.open(encoding="utf-8") as stream:
            text = stream.read(1 << 20)
        head = text.split("---")[1] if text.startswith("---") else ""
        configs = (yaml.safe_load(head) or {}).get("configs")
    except (OSError, ValueError, AttributeError, yaml.YAMLError):
        return []  # a README is for people, and may say anything
    return [c for c in configs if isinstance(c, dict) and c.get("data_files")] if isinstance(configs, list) else []


def _patterns(data_files: object) -> list[tuple[str, list[str]]]:
    if isinstance(data_files, list) and all(isinstance(entry, dict) for entry in data_files):
        return [(str(entry.get("split", "train")), _texts(entry.get("path"))) for entry in data_files]
    if isinstance(data_files, dict):
        return [(str(split), _texts(path)) for split, path in data_files.items()]
    return [("train", _texts(data_files))]


def _texts(value: object) -> list[str]:
    return [str(part) for part in (value if isinstance(value, list) else [value])]


def _by_name(folder: Path, files: list[Path]) -> Splits:
    shards = [(_SHARD.match(_stem(file)), file) for file in files]
    if all(match for match, _ in shards):
        names = sorted({match["split"] for match, _ in shards if match})
        if set(names) & set(SPLITS):
            return {name: tuple(f for match, f in shards if match and match["split"] == name) for name in names}
    by_split = {split: tuple(f for f in files if _means(f.relative_to(folder), split)) for split in SPLITS}
    return {split: members for split, members in by_split.items() if members} or {"train": tuple(files)}


def _stem(file: Path) -> str:
    return file.name.partition(".")[0]


def _means(file: Path, split: str) -> bool:
    words = re.split(r"[-._ /0-9]+", file.as_posix().lower())
    return next((name for word in reversed(words) for name in SPLITS if word in SPLITS[name]), "") == split


def _check_one_format(folder: Path, split: str, members: tuple[Path, ...]) -> None:
    kinds = sorted({rows.format_of(file) for file in members})
    if len(kinds) > 1:
        raise UserError(
            f"{paths.short(folder)} has {split} as {' and '.join(kinds)}: perhaps the same samples twice",
            f"name the files of one: --data '{folder}/*{members[0].suffix}'",
        )


def _check_shards(members: tuple[Path, ...]) -> None:
    """UserError where a name such as train-00000-of-00002 tells of a file that is not there."""
    for file in members:
        if match := _SHARD.match(_stem(file)):
            have = {m["number"] for f in members if (m := _SHARD.match(_stem(f))) and f.parent == file.parent
                    and (m["split"], m["count"]) == (match["split"], match["count"])}  # fmt: skip
            if len(have) != int(match["count"]):
                raise UserError(
                    f"{len(have)} of {int(match['count'])} files {match['split']}-*-of-{match['count']} are in "
                    f"{paths.short(file.parent)}",
                    "fetch the others: hf download",
                )
            return


_ANEW = "save or download the dataset anew"
