"""Find custom Python code that a Hugging Face folder references. It is never executed here, and never exported."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

KEYS = ("auto_map", "custom_pipelines", "trust_remote_code")
"""Keys that make transformers or an inference server load Python files from the model's folder."""
FILES = ("config.json", "tokenizer_config.json", "generation_config.json", "processor_config.json",
         "preprocessor_config.json")  # fmt: skip


def python_files(folder: Path) -> dict[str, list[str]]:
    """Return {configuration file: Python files that it references} for a folder, with sorted names.

    Examples of names are `modeling_x.py` and `REPOSITORY/tokenization_y.py`. A configuration file that has one of
    `KEYS` but references no Python file is included with an empty list.
    """
    configs = [(file, content) for file, content in _read_configs(folder) if set(KEYS) & content.keys()]
    return {file.name: sorted(_referenced_files(content)) for file, content in configs}


def note(folder: Path) -> list[str]:
    """Return a note that the custom code of a folder is not executed; [] if it has none."""
    files = python_files(folder)
    if not files:
        return []
    code = sorted({name for names in files.values() for name in names})
    file_list = f" ({', '.join(code)})" if code else ""
    return [
        f"custom code of {folder}{file_list}, referenced in {' and '.join(files)}, is not executed; the built-in model "
        "and tokenizer of transformers for this model_type are used instead"
    ]


def remove_keys(folder: Path) -> list[str]:
    """Remove `KEYS` from the configuration files of an exported folder; return a note, or [] if they have none.

    The code is not exported, and the exported model has been compared with the built-in class of transformers.
    """
    changed = []
    for file, content in _read_configs(folder):
        removed_keys = [key for key in KEYS if key in content]
        if removed_keys:
            remaining_content = {key: value for key, value in content.items() if key not in removed_keys}
            file.write_text(json.dumps(remaining_content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
            changed.append(f"{', '.join(removed_keys)} from {file.name}")
    if not changed:
        return []
    return [f"removed {' and '.join(changed)}: built-in classes of transformers can load the folder"]


def missing_files(folder: Path) -> list[str]:
    """Return the names of Python files that a folder references but lacks; an inference server needs them."""
    files = {name for names in python_files(folder).values() for name in names}
    return sorted(name for name in files if not (folder / name).is_file())


def _read_configs(folder: Path) -> Iterator[tuple[Path, dict[str, Any]]]:
    """Yield the path and content of each readable configuration file."""
    for name in FILES:
        try:
            content = json.loads((folder / name).read_bytes())
        except (OSError, ValueError):
            continue
        if isinstance(content, dict):
            yield folder / name, content


def _referenced_files(content: dict[str, Any]) -> Iterator[str]:
    """Yield the Python files in the references of a configuration, such as `ORG/NAME--modeling_x.Model`."""
    maps = content.get("auto_map")
    values = list(maps.values()) if isinstance(maps, dict) else [maps]
    pipelines = content.get("custom_pipelines")
    if isinstance(pipelines, dict):
        values += [pipeline.get("impl") for pipeline in pipelines.values() if isinstance(pipeline, dict)]
    for value in values:
        for reference in value if isinstance(value, list) else [value]:
            if isinstance(reference, str) and "." in reference:
                repository, _, name = reference.rpartition("--")
                file = f"{name.rpartition('.')[0]}.py"
                yield f"{repository}/{file}" if repository else file
