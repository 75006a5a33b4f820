# pyright: reportMissingImports=false
"""Build all recipes that Megatron-Bridge ships, let it validate them, and write docs/bridge_recipes.md.

    PYTHONPATH=src PYTHON_OF_BRIDGE scripts/bridge_recipes.py HF_CONFIGS

HF_CONFIGS is the absolute path of a folder that has a folder with config.json per model, named as in this project
(`tests/bridge/hf_configs.py` writes them). Recipes of other models are counted, not built. Needs no GPU: see
`superpod.bridge.import_bridge`.
"""

from __future__ import annotations

import os
import re
import sys
import tomllib
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"  # fail at once instead of trying to reach the hub
from superpod.bridge import check_files, facts
from superpod.bridge.shipped_recipes import find_recipes

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "bridge_recipes.md"
HF_IDS = ROOT / "src" / "superpod" / "collection" / "facts" / "hf_ids.toml"
NAME = re.compile(r"_(?P<gpus>\d+)gpu_(?P<gpu>[a-z0-9]+)_")
BLACKWELL = ("b200", "b300", "gb200", "gb300", "vr200", "r100")
NO_SIZES = "no sizes of the model"
NEEDS_INPUT = re.compile(rf"data-cache-path|pretrained checkpoint|{NO_SIZES}", re.IGNORECASE)
"""Errors about what only the user can provide: files, and the sizes of a model that the recipe leaves open."""

HEADING = """# Recipes of Megatron-Bridge {version}

Written by `scripts/bridge_recipes.py`: all {total} recipes of the wheel, each built for the number of GPUs in its name
and validated by Megatron-Bridge itself (`runtime_config_update`), without a GPU. Expert parallelism is also compared
with the number of GPUs, which only the creation of the process groups checks (megatron/core/parallel_state.py).

| result | recipes |
|---|---|
| accepted | {accepted} |
| contradicts itself (below) | {wrong} |
| needs a file or sizes from the user | {needs_input} |
| not built: the model's config.json is not available here, or it is not a language model | {not_built} |

| recipe | contradiction |
|---|---|
"""


def main() -> None:
    """Write the page."""
    validate = make_validator(Path(sys.argv[1]))
    recipes = find_recipes("recipes") | find_recipes("perf_recipes")
    answers = {name: validate(name, function) for name, function in recipes.items()}
    wrong = {name: error for name, error in answers.items() if error and error != NOT_BUILT and not needs_input(error)}
    counts = Counter(category(error) for error in answers.values())
    text = HEADING.format(version=facts.version(), total=len(answers), **{key: counts[key] for key in CATEGORIES})
    rows = [f"| `{name.removesuffix('_config')}` | {shorten(error)} |" for name, error in sorted(wrong.items())]
    PAGE.write_text(text + "\n".join(rows) + "\n")
    print(f"{PAGE}: {dict(counts)}")


NOT_BUILT = "not built"
CATEGORIES = ("accepted", "wrong", "needs_input", "not_built")


def category(error: str | None) -> str:
    """Return the category of a result, one of `CATEGORIES`."""
    if error is None:
        return "accepted"
    if error == NOT_BUILT:
        return "not_built"
    return "needs_input" if needs_input(error) else "wrong"


def needs_input(error: str) -> bool:
    """Return whether an error is about what only the user can provide."""
    return NEEDS_INPUT.search(error) is not None


def shorten(error: str) -> str:
    """Return the error for a cell of a table."""
    text = error.replace("|", "\\|").removeprefix("AssertionError: ").strip()
    return text if len(text) < 260 else text[:257] + "..."


def make_validator(hf_configs: Path) -> Callable[[str, Callable[[], Any]], str | None]:
    """Return a function that returns the error of a recipe, None if there is none, or `NOT_BUILT`."""
    models = {hf.lower(): model for model, ids in tomllib.loads(HF_IDS.read_text()).items() for hf in ids}

    def find_hf_config(hf_model: str) -> str:
        folder = hf_configs / models.get(hf_model.lower(), "missing")
        if not folder.is_dir():
            raise FileNotFoundError(folder)
        return str(folder)

    def validate(name: str, function: Callable[[], Any]) -> str | None:
        size = NAME.search(name)
        assert size, name
        gpus, gpu = int(size["gpus"]), size["gpu"]
        with check_files.run_environment(find_hf_config, 100 if gpu in BLACKWELL else 90, f"NVIDIA {gpu.upper()}"):
            try:
                config = function()
            except OSError:  # a config.json, a tokenizer or a processor of images that is not on this machine
                return NOT_BUILT
            except Exception as error:
                return check_files.describe(error)
            if config.peft is not None and config.checkpoint.pretrained_checkpoint is None:
                config.checkpoint.pretrained_checkpoint = "."
            if not config.model.num_layers:
                return NO_SIZES
            return check_files.validate(config, gpus) or expert_parallel_error(config.model, gpus)

    return validate


def expert_parallel_error(model: Any, gpus: int) -> str | None:
    """Return why the process groups of expert parallelism cannot be created on this number of GPUs, or None."""
    ep, pp = model.expert_model_parallel_size, model.pipeline_model_parallel_size
    etp = model.expert_tensor_parallel_size or model.tensor_model_parallel_size
    if not model.num_moe_experts or gpus % (ep * etp * pp) == 0:
        return None
    return f"EP {ep} x ETP {etp} x PP {pp} = {ep * etp * pp} does not divide {gpus} GPUs"


main()
