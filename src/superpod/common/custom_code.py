"""Code of its own that a Hugging Face folder names: it is never executed here, and never exported."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

KEYS = ("auto_map", "custom_pipelines", "trust_remote_code")
"""Keys that make transformers and servers load Python files from beside the weights, or ask to be trusted to."""
FILES = ("config.json", "tokenizer_config.json", "generation_config.json", "processor_config.json",
         "preprocessor_config.json")  # fmt: skip


def named(folder: Path) -> dict[str, list[str]]:
    """File of a folder -> the Python files that it names (`modeling_x.py`, `REPOSITORY/tokenization_y.py`), sorted.

    A file with one of `KEYS` is listed though it names none.
    """
    return {file.name: sorted(_code(content)) for file, content in _configs(folder) if set(KEYS) & content.keys()}


def note(folder: Path) -> list[str]:
    """A line that names the custom code of a folder and says that it is not executed; none without custom code."""
    files = named(folder)
    if not files:
        return []
    code = sorted({name for names in files.values() for name in names})
    what = f" ({', '.join(code)})" if code else ""
    return [
        f"custom code of {folder}{what}, named in {' and '.join(files)}, is not executed: the model and tokenizer are "
        "those that transformers itself has for this model_type"
    ]


def drop(folder: Path) -> list[str]:
    """Remove `KEYS` from the files of a folder that was written here; returns a note for the user, or none.

    The code itself is not in the folder, and what is exported was compared with transformers' own class.
    """
    changed = []
    for file, content in _configs(folder):
        if kept := [key for key in KEYS if key in content]:
            rest = {key: value for key, value in content.items() if key not in kept}
            file.write_text(json.dumps(rest, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
            changed.append(f"{', '.join(kept)} of {file.name}")
    if not changed:
        return []
    return [f"left out {' and '.join(changed)}: the folder loads with the classes of transformers, without custom code"]


def missing(folder: Path) -> list[str]:
    """The Python files that a folder names and does not hold; a server could not load it."""
    files = {name for names in named(folder).values() for name in names}
    return sorted(name for name in files if not (folder / name).is_file())


def _configs(folder: Path) -> Iterator[tuple[Path, dict[str, Any]]]:
    for name in FILES:
        try:
            content = json.loads((folder / name).read_bytes())
        except (OSError, ValueError):
            continue
        if isinstance(content, dict):
            yield folder / name, content


def _code(content: dict[str, Any]) -> Iterator[str]:
    """The files of references such as `modeling_x.Model` and `ORG/NAME--modeling_x.Model`, alone or in lists."""
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
