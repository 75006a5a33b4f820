"""From a Hugging Face folder to a Hugging Face folder: import, data, training, the best checkpoint, export."""

from __future__ import annotations

import fcntl
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from superpod.errors import UserError, did_you_mean
from superpod.node.files import read_json, write_json
from superpod.planner import kernel_rules
from superpod.recipes import planned_job
from superpod.recipes.data import packing
from superpod.recipes.registry import Recipe, find, recipes

if TYPE_CHECKING:
    import nemo_run as run

    from superpod.node.run_folder import RunFolder
    from superpod.recipes.data.chat import Encoded
    from superpod.recipes.weights.finetune_setup import Sizes

FACT = "finetune"
"""Key of run.json that keeps the `Task`."""
BASES = ".models"
"""Folder beside the run folders that holds every imported model once."""
CONTEXT_PARALLEL = "trainer.strategy.context_parallel_size"
SHARE = 0.05
"""Share of the samples held out when there is no file of validation data."""
_SAMPLE = 1 << 20
"""Bytes at either end of a file of weights that go into its digest."""


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
        """The task of an earlier run.

        Raises:
            UserError: the run is not a fine-tuning run.
        """
        kept = run.facts.get(FACT)
        if not isinstance(kept, dict) or not {"model", "data"} <= kept.keys():
            raise UserError(f"{run.path} is not a fine-tuning run", "`recipes run` continues other runs")
        return cls(**{field.name: kept[field.name] for field in fields(cls) if field.name in kept})


def check(name: str, task: Task, overrides: Sequence[str] = (), num_nodes: int | None = None) -> None:
    """Refuse mistakes that need no NeMo to find.

    Args:
        name: of a recipe.
        task: what to fine-tune it on.
        overrides: changes of the recipe, of which the last size of context parallelism counts.
        num_nodes: None = the recipe's smallest size.

    Raises:
        UserError: the recipe is not for fine-tuning, the model is missing, or a line of data is not a sample.
    """
    from superpod.recipes.data import samples
    from superpod.recipes.weights import huggingface

    recipe = find(name)
    if recipe.task == "pretrain":
        names = [other.name for other in recipes().values() if other.task != "pretrain"]
        others = [other for other in names if recipe.model.name in other]
        raise UserError(
            f"{name} is a recipe of pretraining", did_you_mean(name, others) or "see `recipes list sft lora`"
        )
    _check_packing(recipe, task)
    _check_context_parallelism(recipe, overrides, num_nodes)
    if task.long not in packing.LONG:
        raise UserError(f"--long {task.long} is not one of {', '.join(packing.LONG)}")
    huggingface.family(Path(task.model))
    files = [samples.read(Path(file)) for file in filter(None, (task.data, task.validation_data))]
    if not task.validation_data and not 0 < task.share < 1:
        raise UserError(f"--validation {task.share} is not a share of the samples", "0.05 holds out one in twenty")
    if not task.validation_data and len(files[0]) < 2:
        raise UserError(f"{task.data} holds one sample, and validation needs one too", "give --validation-data as well")


def _check_packing(recipe: Recipe, task: Task) -> None:
    """Unpacked samples lie in the same files, and so are refused alike, but by models that read no ends of samples."""
    why = planned_job.refuses_packed(recipe.shape)
    if recipe.task == "dora" and recipe.shape.kv_lora:  # peft/dora.py: a magnitude of (1, 1, width) on (tokens, width)
        why = "NeMo 2.7.3's DoRA gives its latent attention a dimension more than packed samples have"
    alone = planned_job.knows_no_ends(recipe.shape)
    if why and (task.pack or not alone):
        export = f"`recipes export {recipe.name}` with NeMo's FineTuningDataModule, unpacked"
        raise UserError(
            f"{recipe.model.name} takes no packed samples: {why}",
            "--no-pack gives each sample its own sequence" if alone else f"{export}; or fine-tune another model",
        )


def _check_context_parallelism(recipe: Recipe, overrides: Sequence[str], num_nodes: int | None) -> None:
    """Samples lie end to end in a sequence, packed or one by one: attention must take the padding between them."""
    planned = planned_job.job(recipe, num_nodes)
    given = [value for path, _, value in (text.partition("=") for text in overrides) if path == CONTEXT_PARALLEL]
    cp = int(given[-1]) if given and given[-1].isdecimal() else planned.layout.cp
    whole = [str(nodes) for nodes in recipe.nodes if recipe.layout(nodes).cp == 1]
    size = f"--num-nodes {' or '.join(whole)}; " if whole and not given else ""
    if cp > 1 and planned_job.knows_no_ends(recipe.shape):
        raise UserError(
            f"{recipe.name} with cp {cp} would share out each sample over the ranks, and NeMo 2.7.3 does not tell "
            f"{recipe.model.name} where one ends",
            f"{size}{CONTEXT_PARALLEL}=1",
        )
    if why := kernel_rules.refuses_padded_samples(planned.replace(layout=replace(planned.layout, cp=cp))):
        raise UserError(
            f"{recipe.name} with cp {cp} pads every sample to a multiple of {2 * cp} tokens, and "
            f"{planned.node.gpu.name} has no attention for padding between samples, Transformer Engine 2.9: {why}",
            f"{size}{CONTEXT_PARALLEL}=1; or `recipes export {recipe.name}` with NeMo's FineTuningDataModule, unpacked",
        )


def with_both_lengths(overrides: Sequence[str]) -> tuple[str, ...]:
    """The overrides, where `data.seq_length=N` is the model's length too: packed sequences give both (`set_data`)."""
    given: dict[str, str] = {}
    for text in overrides:
        path, _, value = text.partition("=")
        given[path] = value
    length = given.get("data.seq_length")
    more = (f"model.config.seq_length={length}",) if length and "model.config.seq_length" not in given else ()
    return (*overrides, *more)


def model_folder(name: str) -> Path:
    """The folder of a model: a path, or the folder of ORG/NAME in this machine's hub cache.

    Raises:
        UserError: neither exists; nothing is downloaded.
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
    raise UserError(f"--model {name} is not a folder, and not in this machine's hub cache", f"hf download {name}")


def change(task: Task, run_folder: Path, note: Callable[[str], None]) -> Callable[[run.Partial], dict[str, object]]:
    """The change that `local.prepare` makes to a recipe for this task; the first one imports model and data."""

    def apply(partial: run.Partial) -> dict[str, object]:
        from superpod.recipes.weights import finetune_setup, match_config
        from superpod.recipes.weights.huggingface import KEPT

        note("comparing the model with the recipe")
        changes = match_config.match_config(partial, Path(task.model))
        base = imported(Path(task.model), run_folder.parents[1] / BASES, note)
        sizes = finetune_setup.sizes(partial, task.pack)
        note("encoding and packing the data")
        counts = packed(task, sizes, base / KEPT, run_folder / "data")
        finetune_setup.set_weights(partial, base)
        held_out = counts["validation"]["sequences"]
        finetune_setup.set_data(partial, run_folder / "data", sizes, base / KEPT, held_out, packed=task.pack)
        finetune_setup.set_steps(partial, task.steps)
        taken = {field: [str(old), str(new)] for field, old, new in changes}
        return {FACT: asdict(task), "base": str(base), "samples": counts, "model_taken": taken}

    return apply


def imported(model: Path, bases: Path, note: Callable[[str], None]) -> Path:
    """The NeMo checkpoint of a Hugging Face folder, made once for its content; a second process waits for the first."""
    from superpod.launchers import subprocess_call

    base = bases / f"{model.name}-{digest(model)}"
    log = base.with_name(f"{base.name}.log")
    bases.mkdir(parents=True, exist_ok=True)
    with log.open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not base.is_dir():
            note(f"importing {model} into NeMo")
            subprocess_call.call("superpod.launchers.convert:import_hf", log, folder=str(model), out=str(base))
    return base


def digest(model: Path) -> str:
    """Twelve hex digits for a folder's content: names, sizes, and the first and last MiB of every file."""
    digest = hashlib.sha256()
    for file in sorted(path for path in model.iterdir() if path.is_file() and not path.name.startswith(".")):
        size = file.stat().st_size
        digest.update(f"{file.name}\0{size}\0".encode())
        with file.open("rb") as stream:
            digest.update(stream.read(_SAMPLE))
            stream.seek(max(0, size - _SAMPLE))
            digest.update(stream.read())
    return digest.hexdigest()[:12]


def packed(task: Task, sizes: Sizes, tokenizer_folder: Path, out: Path) -> dict[str, Any]:
    """Write packed.json and the .npy files to `out`, unless they exist; returns the counts of both parts.

    Raises:
        UserError: a sample is too long and `task.long` refuses it, or there are too few samples.
    """
    from superpod.recipes.data import chat, samples
    from superpod.recipes.weights.finetune_setup import METADATA, TRAIN, VALIDATION

    if kept := read_json(out / "counts.json"):
        return kept
    tokenizer = chat.load(str(tokenizer_folder))
    files = filter(None, (task.data, task.validation_data))
    encoded = [[chat.encode(sample, tokenizer) for sample in samples.read(Path(file))] for file in files]
    fitting, read_counts = zip(*(packing.fit(file, sizes.longest, task.long) for file in encoded), strict=True)
    parts = fitting if task.validation_data else packing.hold_out(fitting[0], task.share, task.seed)
    bins = [
        packing.pack(part, sizes.size, sizes.multiple, task.seed) if task.pack else [[sample] for sample in part]
        for part in parts
    ]
    filler = cast("int", tokenizer.eos_token_id)  # `chat.load` refuses a tokenizer without one
    out.mkdir(parents=True, exist_ok=True)
    for name, part_bins, batch in ((TRAIN, bins[0], 1), (VALIDATION, bins[1], sizes.batch)):
        packing.write(part_bins, out / name, multiple=sizes.multiple, filler=filler, batch=batch)
    packing.write_metadata(bins, out / METADATA)
    counts: dict[str, Any] = {"read": [asdict(file) for file in read_counts]}
    counts |= {"training": _filling(bins[0], sizes), "validation": _filling(bins[1], sizes)}
    write_json(out / "counts.json", counts)  # last: its presence means that the rest is complete
    return counts


def _filling(bins: list[list[Encoded]], sizes: Sizes) -> dict[str, int | float]:
    samples = [sample for sequence in bins for sample in sequence]
    tokens = sum(len(sample.ids) - 1 for sample in samples)  # the last id is only predicted, never read
    filled = round(tokens / (len(bins) * sizes.size), 3)
    return {"samples": len(samples), "tokens": tokens, "sequences": len(bins), "filled": filled}


def export(run: RunFolder, out: Path) -> dict[str, Any]:
    """Write the best checkpoint of a run as the Hugging Face folder `out`; returns its name, loss and what was merged.

    The tokenizer is written with the chat template that the model was trained on.
    """
    from superpod.launchers import convert, subprocess_call
    from superpod.lifecycle import checkpoints

    chosen = checkpoints.best(checkpoints.at(run.path))
    job = convert.plan(run.path, out)
    exported = subprocess_call.call(job.function, run.attempts[-1].path / "export.log", **job.arguments)
    return {"checkpoint": chosen.name, "val_loss": chosen.val_loss, **exported}
