"""From a Hugging Face folder to a Hugging Face folder: import, data, training, the best checkpoint, export."""

from __future__ import annotations

import fcntl
import hashlib
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from superpod.errors import UserError, did_you_mean
from superpod.node.files import read_json, write_json
from superpod.recipes.data import packing
from superpod.recipes.registry import find, recipes

if TYPE_CHECKING:
    import nemo_run as run

    from superpod.node.run_folder import RunFolder

FACT = "finetune"
"""Key of run.json that keeps the `Task`."""
BASES = ".models"
"""Folder beside the run folders: imported models, each once."""
SHARE = 0.05
"""Of the samples held out, where no file of them is given."""
_SAMPLE = 1 << 20
"""Bytes of either end of a file of weights that tell it from another."""


@dataclass(frozen=True)
class Task:
    """What to fine-tune, and on what."""

    model: str
    """A Hugging Face folder, absolute."""
    data: str
    validation_data: str = ""
    share: float = SHARE
    seed: int = 1234
    long: str = packing.LONG[0]
    pack: bool = True
    steps: int | None = None

    @classmethod
    def of(cls, run: RunFolder) -> Task:
        """That of an earlier run.

        Raises:
            UserError: the run is no fine-tuning.
        """
        kept = run.facts.get(FACT)
        if not isinstance(kept, dict) or not {"model", "data"} <= kept.keys():
            raise UserError(f"{run.path} is no fine-tuning", "`recipes run` goes on with other runs")
        return cls(**{each.name: kept[each.name] for each in fields(cls) if each.name in kept})


def check(name: str, task: Task) -> None:
    """Refuse what can be refused before NeMo is imported.

    Raises:
        UserError: no recipe of fine-tuning, no model, or lines that are no samples.
    """
    from superpod.recipes.data import samples
    from superpod.recipes.weights import huggingface

    recipe = find(name)
    if recipe.task == "pretrain":
        others = [each for each in recipes() if recipe.model.name in each and recipes()[each].task != "pretrain"]
        raise UserError(
            f"{name} is a recipe of pretraining", did_you_mean(name, others) or "see `recipes list sft lora`"
        )
    if task.long not in packing.LONG:
        raise UserError(f"--long {task.long} is none of {', '.join(packing.LONG)}")
    huggingface.family(Path(task.model))
    read = [samples.read(Path(file)) for file in filter(None, (task.data, task.validation_data))]
    if not task.validation_data and not 0 < task.share < 1:
        raise UserError(f"--validation {task.share} is no share of the samples", "0.05 holds out one in twenty")
    if not task.validation_data and len(read[0]) < 2:
        raise UserError(f"{task.data} holds one sample, and one is held out", "give --validation-data as well")


def model_folder(name: str) -> Path:
    """The folder of a model: a path, or where the hub's cache on this machine keeps ORG/NAME.

    Raises:
        UserError: neither is there; nothing is downloaded.
    """
    if Path(name).is_dir():
        return Path(name).absolute()
    if name.count("/") == 1 and not name.startswith((".", "/", "~")):
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

        try:
            return Path(snapshot_download(name, local_files_only=True))
        except (LocalEntryNotFoundError, HFValidationError):
            pass
    raise UserError(f"--model {name} is no folder, and not in this machine's hub cache", f"hf download {name}")


def change(task: Task, run_folder: Path, note: Callable[[str], None]) -> Callable[[run.Partial], dict[str, Any]]:
    """What makes a recipe the task's: for `local.prepare`. Imports the model and packs the data where not done yet."""

    def apply(partial: run.Partial) -> dict[str, Any]:
        from superpod.recipes.weights import finetune_setup, match_config
        from superpod.recipes.weights.huggingface import KEPT

        note("holding the model against the recipe")
        changed = match_config.match_config(partial, Path(task.model))
        base = imported(Path(task.model), run_folder.parents[1] / BASES, note)
        sizes = finetune_setup.sizes(partial, task.pack)
        note("encoding and packing the data")
        counts = packed(task, sizes, base / KEPT, run_folder / "data")
        finetune_setup.set_weights(partial, base)
        finetune_setup.set_data(partial, run_folder / "data", sizes, base / KEPT, counts["validation"]["sequences"])
        finetune_setup.set_steps(partial, task.steps)
        model = {field: [str(old), str(new)] for field, old, new in changed}
        return {FACT: asdict(task), "base": str(base), "samples": counts, "model_taken": model}

    return apply


def imported(model: Path, bases: Path, note: Callable[[str], None]) -> Path:
    """The NeMo checkpoint of a Hugging Face folder, made once for each content; who comes second waits for it."""
    from superpod.launchers import subprocess_call

    base = bases / f"{model.name}-{digest(model)}"
    log = base.with_name(f"{base.name}.log")
    bases.mkdir(parents=True, exist_ok=True)
    with log.open("a") as alone:
        fcntl.flock(alone, fcntl.LOCK_EX)
        if not base.is_dir():
            note(f"importing {model} into NeMo")
            subprocess_call.call("superpod.launchers.convert:import_hf", log, folder=str(model), out=str(base))
    return base


def digest(model: Path) -> str:
    """Twelve letters for a folder's content: its small files whole, of weights the size, the beginning and the end."""
    found = hashlib.sha256()
    for file in sorted(each for each in model.iterdir() if each.is_file() and not each.name.startswith(".")):
        size = file.stat().st_size
        found.update(f"{file.name}\0{size}\0".encode())
        with file.open("rb") as stream:
            found.update(stream.read(_SAMPLE))
            stream.seek(max(0, size - _SAMPLE))
            found.update(stream.read())
    return found.hexdigest()[:12]


def packed(task: Task, sizes: Any, tokenizer: Path, out: Path) -> dict[str, Any]:
    """Write packed.json and the .npy files to `out`; returns the counts of both parts. What is there already stays.

    Raises:
        UserError: long samples that are refused, or too few.
    """
    from superpod.recipes.data import chat, samples
    from superpod.recipes.weights.finetune_setup import METADATA, TRAIN, VALIDATION

    if kept := read_json(out / "counts.json"):
        return kept
    words = chat.load(str(tokenizer))
    files = filter(None, (task.data, task.validation_data))
    encoded = [[chat.encode(each, words) for each in samples.read(Path(file))] for file in files]
    fitting, counts = zip(*(packing.fit(each, sizes.longest, task.long) for each in encoded), strict=True)
    parts = fitting if task.validation_data else packing.hold_out(fitting[0], task.share, task.seed)
    pack = packing.pack if task.pack else lambda part, *_: [[each] for each in part]
    bins = [pack(part, sizes.size, sizes.multiple, task.seed) for part in parts]
    out.mkdir(parents=True, exist_ok=True)
    for name, each, batch in ((TRAIN, bins[0], 1), (VALIDATION, bins[1], sizes.batch)):
        packing.write(each, out / name, multiple=sizes.multiple, filler=words.eos_token_id, batch=batch)
    packing.write_metadata(bins, out / METADATA)
    found: dict[str, Any] = {"read": [asdict(each) for each in counts]}
    for name, part, each in zip(("training", "validation"), parts, bins, strict=True):
        found[name] = _filling(part, each, sizes)
    write_json(out / "counts.json", found)
    return found


def _filling(part: Any, bins: Any, sizes: Any) -> dict[str, Any]:
    tokens = sum(len(each.ids) - 1 for each in part)
    filled = round(tokens / (len(bins) * sizes.size), 3)
    return {"samples": len(part), "tokens": tokens, "sequences": len(bins), "filled": filled}


def export(run: RunFolder, out: Path) -> dict[str, Any]:
    """Write the best checkpoint of a run as the Hugging Face folder `out`; returns which, its loss and what was merged.

    The tokenizer goes with the chat template that the model has learnt.
    """
    from superpod.launchers import convert, subprocess_call
    from superpod.lifecycle import checkpoints

    chosen = checkpoints.best(checkpoints.found(run.path))
    job = convert.plan(run.path, out)
    said = subprocess_call.call(job.function, run.attempts[-1].path / "export.log", **job.arguments)
    return {"checkpoint": chosen.name, "val_loss": chosen.val_loss, **said}
