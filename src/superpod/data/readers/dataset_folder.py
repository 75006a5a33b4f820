"""Find the files of each split in the folder of a Hugging Face dataset. Samples are not read.

The folder was either written by `Dataset.save_to_disk` (state.json, dataset_dict.json, .arrow files), or cloned or
downloaded from the Hub. In the latter case, the splits are determined by README.md, or else by the file names, as in
`datasets`.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path

from superpod.data import paths
from superpod.data.readers import rows
from superpod.errors import UserError

SPLITS = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "dev", "val"),
    "test": ("test", "testing", "eval", "evaluation"),
}
"""Split -> words that identify it in file names, as in `datasets`."""
_SHARD = re.compile(r"(?P<split>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})$")
_MAX_FILES = 100_000
"""Maximum number of files in a folder."""

Splits = Mapping[str, tuple[Path, ...]]


def find_splits(folder: Path) -> Splits:
    """Return the files of each split of a dataset; "train" without splits. Raises UserError if files are missing."""
    if (folder / "dataset_dict.json").is_file():
        names = _read_json(folder / "dataset_dict.json").get("splits")
        if not isinstance(names, list) or not names or not all(isinstance(name, str) for name in names):
            raise UserError(f"{paths.shorten(folder / 'dataset_dict.json')} lists no splits", _SAVE_AGAIN)
        return {name: _list_saved_files(folder / _check_file_name(folder, name)) for name in names}
    if (folder / "state.json").is_file():
        return {"train": _list_saved_files(folder)}
    files = _find_sample_files(folder)
    if not files:
        kind = "is a model" if (folder / "config.json").is_file() else "is not a dataset"
        suffixes = ", ".join(rows.FORMATS)
        raise UserError(
            f"{paths.shorten(folder)} {kind}: it has no file with suffix {suffixes}", "pass a file with samples"
        )
    by_split = _find_splits_in_readme(folder, files) or _find_splits_by_name(folder, files)
    for split, members in by_split.items():
        _require_single_format(folder, split, members)
        _require_all_shards(members)
    return by_split


def _check_file_name(folder: Path, name: object) -> str:
    """Return a file name in the folder's metadata. Raises UserError if it is not directly in the folder."""
    if not isinstance(name, str) or name in ("", ".", "..") or "/" in name or "\0" in name:
        message = f"{paths.shorten(folder)} lists {paths.shorten(repr(name))}, which is not a file inside it"
        raise UserError(message, _SAVE_AGAIN)
    return name


def _list_saved_files(folder: Path) -> tuple[Path, ...]:
    """Return the .arrow files of a folder written by `save_to_disk`, in the order of the dataset."""
    data_files = _read_json(folder / "state.json").get("_data_files")
    if not isinstance(data_files, list) or not data_files or not all(isinstance(entry, dict) for entry in data_files):
        raise UserError(f"{paths.shorten(folder / 'state.json')} lists no data files", _SAVE_AGAIN)
    files = tuple(folder / _check_file_name(folder, entry.get("filename")) for entry in data_files)
    for file in files:
        if not file.is_file():
            raise UserError(f"{paths.shorten(file)}, listed in {folder.name}/state.json, is missing", _SAVE_AGAIN)
    return files


def _read_json(file: Path) -> dict[str, object]:
    try:
        value = json.loads(file.read_bytes())
    except OSError as error:
        raise UserError(f"{paths.shorten(file)} cannot be read: {error.strerror}", _SAVE_AGAIN) from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"{paths.shorten(file)} is not JSON: {error}", _SAVE_AGAIN) from None
    if not isinstance(value, dict):
        raise UserError(f"{paths.shorten(file)} is not a JSON object", _SAVE_AGAIN)
    return value


def _find_sample_files(folder: Path) -> list[Path]:
    """Return the sample files below a folder, except hidden ones. Links to folders are not followed."""
    files: list[Path] = []
    for root, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith((".", "_")))
        members = [Path(root, name) for name in sorted(names) if not name.startswith((".", "_"))]
        files += [file for file in members if _is_sample_file(file)]
        if len(files) > _MAX_FILES:
            raise UserError(
                f"{paths.shorten(folder)} has more than {_MAX_FILES} files", "pass a file or a glob instead"
            )
    return files


_METADATA_FILES = ("dataset_info.json", "dataset_infos.json", "state.json", "dataset_dict.json", "config.json",
                 "package.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json",
                 "special_tokens_map.json")  # fmt: skip


def _is_sample_file(file: Path) -> bool:
    name = file.name.lower()
    for suffix in rows.COMPRESSED:
        name = name.removesuffix(suffix)
    return os.path.splitext(name)[1] in rows.FORMATS and name not in _METADATA_FILES


def _find_splits_in_readme(folder: Path, files: list[Path]) -> Splits:
    """Return the files of each split that README.md lists in its YAML header; {} if it lists none.

    Raises:
        UserError: the dataset has several configurations, or a pattern matches no file.
    """
    configs = _read_configs(folder / "README.md")
    if not configs:
        return {}
    if len(configs) > 1:
        default = [config for config in configs if config.get("config_name") == "default" or config.get("default")]
        if len(default) != 1:
            names = ", ".join(str(config.get("config_name")) for config in configs[:12])
            raise UserError(
                f"{paths.shorten(folder)} has {len(configs)} configurations: {names}",
                f"pass the files of one configuration: --data '{folder}/NAME/train*.parquet'",
            )
        configs = default
    by_split: dict[str, tuple[Path, ...]] = {}
    for split, patterns in _list_patterns(configs[0].get("data_files")):
        members = [file for file in files if any(file.relative_to(folder).match(p) for p in patterns)]
        if not members:
            message = f"{paths.shorten(folder)} has no file {', '.join(patterns)}, which is listed in its README"
            raise UserError(message, _SAVE_AGAIN)
        by_split[split] = (*by_split.get(split, ()), *members)
    return by_split


def _read_configs(readme: Path) -> list[dict[str, object]]:
    """Return the `configs` with data files from the YAML header of a README; [] if there are none."""
    import yaml

    try:
        with readme.open(encoding="utf-8") as stream:
            text = stream.read(1 << 20)
        header = text.split("---")[1] if text.startswith("---") else ""
        configs = (yaml.safe_load(header) or {}).get("configs")
    except (OSError, ValueError, AttributeError, yaml.YAMLError):
        return []  # the text of a README is arbitrary
    if not isinstance(configs, list):
        return []
    return [config for config in configs if isinstance(config, dict) and config.get("data_files")]


def _list_patterns(data_files: object) -> list[tuple[str, list[str]]]:
    if isinstance(data_files, list) and all(isinstance(entry, dict) for entry in data_files):
        return [(str(entry.get("split", "train")), _to_list(entry.get("path"))) for entry in data_files]
    if isinstance(data_files, dict):
        return [(str(split), _to_list(path)) for split, path in data_files.items()]
    return [("train", _to_list(data_files))]


def _to_list(value: object) -> list[str]:
    return [str(part) for part in (value if isinstance(value, list) else [value])]


def _find_splits_by_name(folder: Path, files: list[Path]) -> Splits:
    """Return the files of each split by file name: `train-00000-of-00002`, or a word such as `train`."""
    shards = [(_SHARD.match(_get_stem(file)), file) for file in files]
    if all(match for match, _ in shards):
        names = sorted({match["split"] for match, _ in shards if match})
        if set(names) & set(SPLITS):
            return {name: tuple(f for match, f in shards if match and match["split"] == name) for name in names}
    by_split: dict[str, tuple[Path, ...]] = {}
    for split in SPLITS:
        members = tuple(file for file in files if _find_split_in_path(file.relative_to(folder)) == split)
        if members:
            by_split[split] = members
    return by_split or {"train": tuple(files)}


def _get_stem(file: Path) -> str:
    return file.name.partition(".")[0]


def _find_split_in_path(file: Path) -> str:
    """Return the split identified by the last matching word of a path; "" if no word matches."""
    words = re.split(r"[-._ /0-9]+", file.as_posix().lower())
    return next((split for word in reversed(words) for split in SPLITS if word in SPLITS[split]), "")


def _require_single_format(folder: Path, split: str, members: tuple[Path, ...]) -> None:
    kinds = sorted({rows.get_format(file) for file in members})
    if len(kinds) > 1:
        raise UserError(
            f"{paths.shorten(folder)} has {split} in several formats, {' and '.join(kinds)}, perhaps the same samples",
            f"pass the files of one format: --data '{folder}/*{members[0].suffix}'",
        )


def _require_all_shards(members: tuple[Path, ...]) -> None:
    """Raise UserError if some of the shards train-00000-of-00002, train-00001-of-00002 are missing."""
    matches = [(file.parent, _SHARD.match(_get_stem(file))) for file in members]
    shards = [(parent, match) for parent, match in matches if match]
    if not shards:
        return
    folder, first = shards[0]
    split, count = first["split"], first["count"]
    present_files = {
        match["number"]
        for parent, match in shards
        if parent == folder and (match["split"], match["count"]) == (split, count)
    }
    if len(present_files) != int(count):
        raise UserError(
            f"{paths.shorten(folder)} has {len(present_files)} of {int(count)} files {split}-*-of-{count}",
            "download the missing files with `hf download`",
        )


_SAVE_AGAIN = "save or download the dataset again"
