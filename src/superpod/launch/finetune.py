"""From a Hugging Face folder to a Hugging Face folder: import, data, training, the best checkpoint, export."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from superpod.collection import recipe_job
from superpod.collection.facts import proof_level
from superpod.collection.registry import Recipe, find, recipes
from superpod.collection.sizes.sized import Size, sized
from superpod.common import atomic_folder, locks
from superpod.common.files import read_json, write_json
from superpod.data.samples import packing
from superpod.data.samples.samples import DEFAULT, Reading
from superpod.errors import UserError, did_you_mean
from superpod.launch import finetune_overrides
from superpod.planner.rules import kernel_rules
from superpod.runtime.attempts.model_steps import PACKED
from superpod.runtime.runs import owner, run_facts
from superpod.weights import finetune_data
from superpod.weights.finetune_data import Counts, DataOptions

if TYPE_CHECKING:
    import nemo_run as run

    from superpod.runtime.runs.run_folder import RunFolder
    from superpod.weights.finetune_setup import Sizes

BASES = ".models"
"""Folder next to the run folders (`owner.folder_in`) that holds every model that this user has imported."""
DECLARED = Size()
"""The recipe's smallest size."""
CONTEXT_PARALLEL = "trainer.strategy.context_parallel_size"
_COUNTS = finetune_data.COUNTS
_IMPORTER = b"table of both directions, forward check"
"""Changes with the import, so that what an earlier one has made is not taken: it lost biases without a word."""
_SAMPLE = 1 << 20
"""Bytes at either end of a file of weights that go into its digest."""


@dataclass(frozen=True)
class Task:
    """What to fine-tune, and on what."""

    model: str
    """A Hugging Face folder, absolute."""
    data: tuple[str, ...]
    """Files, folders of datasets and globs, absolute."""
    validation_data: tuple[str, ...] = ()
    share: float | None = None
    """Of the samples held out; None: `finetune_data.SHARE`, where there are no others to validate on."""
    seed: int = 1234
    long: str = packing.LONG[0]
    pack: bool = True
    steps: int | None = None
    weights: tuple[float, ...] = ()
    reading: Reading = DEFAULT
    template: str = ""
    """A file of Jinja, absolute."""
    learn: str = "answers"
    start: str = ""
    """A NeMo checkpoint with the weights to start from, absolute; "" = those of `model`, imported."""
    patience: int = 0
    """Validations without a better loss after which the training ends; 0 = it does not."""
    min_delta: float = 0.0
    """By how much a loss must be lower to be better, nats."""
    forward_check: bool = True
    """Import and export end with a forward pass held against transformers."""

    @property
    def samples(self) -> DataOptions:
        """The part of the task that is about data."""
        names = [field.name for field in fields(DataOptions)]
        return DataOptions(**{name: getattr(self, name) for name in names})

    @classmethod
    def from_run(cls, run: RunFolder) -> Task:
        """The task of an earlier run.

        Raises:
            UserError: the run is not a fine-tuning run.
        """
        kept = run.facts.get(run_facts.FINETUNE)
        if not isinstance(kept, dict) or not {"model", "data"} <= kept.keys():
            raise UserError(f"{run.path} is not a fine-tuning run", "`recipes run` continues other runs")
        known = {field.name: kept[field.name] for field in fields(cls) if field.name in kept}
        for name in ("data", "validation_data", "weights"):  # JSON has no tuples, and older runs have one name
            value = known.get(name) or ()
            known[name] = (value,) if isinstance(value, str) else tuple(value)
        reading = known.get("reading") or {}
        known["reading"] = Reading(**{**reading, "keys": tuple(reading.get("keys", ()))})
        return cls(**known)


def check(name: str, task: Task, overrides: Sequence[str] = (), size: Size = DECLARED, prepared: bool = False) -> None:
    """Refuse mistakes that need no NeMo to find.

    Args:
        name: of a recipe.
        task: what to fine-tune it on.
        overrides: changes of the recipe, of which the last size of context parallelism counts.
        size: of the run; its layout decides whether samples are shared out over ranks.
        prepared: the run has its packed data already, and needs no sample any more.

    Raises:
        UserError: the recipe is not for fine-tuning, the model is missing, or a line of data is not a sample.
    """
    from superpod.weights.transfer import huggingface

    recipe = find(name)
    if recipe.task == "pretrain":
        names = [other.name for other in recipes().values() if other.task != "pretrain"]
        others = [other for other in names if recipe.model.name in other]
        raise UserError(
            f"{name} is a recipe of pretraining", did_you_mean(name, others) or "see `recipes list sft lora`"
        )
    proof_level.require_trainable(recipe)
    _check_packing(recipe, task)
    _check_context_parallelism(recipe, overrides, size)
    huggingface.importable(Path(task.model), task.forward_check)
    if not prepared:
        finetune_data.check(task.samples)


def _check_packing(recipe: Recipe, task: Task) -> None:
    """Unpacked samples lie in the same files, and so are refused alike, but by models that read no ends of samples."""
    why = recipe_job.refuses_packed(recipe.shape)
    if recipe.task == "dora" and recipe.shape.kv_lora:  # peft/dora.py: a magnitude of (1, 1, width) on (tokens, width)
        why = "NeMo 2.7.3's DoRA gives its latent attention a dimension more than packed samples have"
    alone = recipe_job.knows_no_ends(recipe.shape)
    if why and (task.pack or not alone):
        export = f"`recipes export {recipe.name}` with NeMo's FineTuningDataModule, unpacked"
        raise UserError(
            f"{recipe.model.name} takes no packed samples: {why}",
            "--no-pack gives each sample its own sequence" if alone else f"{export}; or fine-tune another model",
        )


def _check_context_parallelism(recipe: Recipe, overrides: Sequence[str], size: Size) -> None:
    """Samples lie end to end in a sequence, packed or one by one: attention must take the padding between them."""
    planned = recipe_job.job(sized(recipe, size), size.num_nodes)
    given = [value for path, _, value in (text.partition("=") for text in overrides) if path == CONTEXT_PARALLEL]
    cp = int(given[-1]) if given and given[-1].isdecimal() else planned.layout.cp
    whole = [str(nodes) for nodes in recipe.nodes if recipe.layout(nodes).cp == 1]
    near = f"--num-nodes {' or '.join(whole)}; " if whole and not given else ""
    if cp > 1 and recipe_job.knows_no_ends(recipe.shape):
        raise UserError(
            f"{recipe.name} with cp {cp} would share out each sample over the ranks, and NeMo 2.7.3 does not tell "
            f"{recipe.model.name} where one ends",
            f"{near}{CONTEXT_PARALLEL}=1",
        )
    if why := kernel_rules.refuses_padded_samples(planned.replace(layout=replace(planned.layout, cp=cp))):
        raise UserError(
            f"{recipe.name} with cp {cp} pads every sample to a multiple of {2 * cp} tokens, and "
            f"{planned.node.gpu.name} has no attention for padding between samples, Transformer Engine 2.9: {why}",
            f"{near}{CONTEXT_PARALLEL}=1; or `recipes export {recipe.name}` with NeMo's FineTuningDataModule, unpacked",
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
    of_hub = name.count("/") == 1 and not name.startswith((".", "/", "~"))
    if of_hub:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

        try:
            return Path(snapshot_download(name, local_files_only=True))
        except (LocalEntryNotFoundError, HFValidationError):
            pass
    if Path(name).exists():
        raise UserError(f"--model {name} is a file, not a folder", "name the folder that its config.json lies in")
    fetch = f"hf download {name}" if of_hub else "give a folder, or ORG/NAME as `hf download` fetches it"
    raise UserError(f"--model {name} is not a folder, and not in this machine's hub cache", fetch)


def task_change(
    task: Task, run_folder: Path, note: Callable[[str], None], overrides: Sequence[str] = (), later: Path | None = None
) -> Callable[[run.Partial], dict[str, object]]:
    """The change that `local.prepare` makes to a recipe for this task; the first one imports model and data.

    `overrides` are those of the recipe: what they say of steps holds, whatever the task said before. `later` is the
    checkpoint of a model that the run's job imports.
    """
    steps = finetune_overrides.read_steps(overrides) or task.steps

    def apply(partial: run.Partial) -> dict[str, object]:
        from superpod.weights import finetune_setup
        from superpod.weights.families import match_config
        from superpod.weights.transfer.huggingface import KEPT

        finetune_overrides.refuse_interval(partial, overrides, steps)
        restore = finetune_overrides.worker_restorer(partial, overrides)
        note("comparing the model with the recipe")
        changes = match_config.match_config(partial, Path(task.model))
        base = Path(task.start) if task.start else later
        if base is None:
            bases = owner.folder_in(run_folder.parents[1], BASES)
            base = import_model(Path(task.model), bases, note, forward_check=task.forward_check)
        sizes = finetune_setup.sizes(partial, task.pack)
        note("encoding and packing the data")
        data = run_folder / "data"
        given = Path(task.model) if later or task.start else base / KEPT  # whose files the import keeps
        tokenizer = finetune_data.tokenizer_folder(task.samples, given, data)
        counts = pack_data(task, sizes, tokenizer, data)
        tokenizer = base / KEPT if tokenizer == given and not task.start else tokenizer
        finetune_setup.set_weights(partial, base)
        held_out = counts["validation"]["sequences"]
        finetune_setup.set_data(partial, data, sizes, tokenizer, held_out, packed=task.pack)
        finetune_setup.set_steps(partial, steps)
        restore(partial)
        finetune_setup.set_early_stopping(partial, task.patience, task.min_delta)
        taken = {field: [str(old), str(new)] for field, old, new in changes}
        return {run_facts.FINETUNE: asdict(task), "base": str(base), "samples": counts, "model_taken": taken}

    return apply


def base_checkpoint(model: Path, bases: Path, *, forward_check: bool = True) -> Path:
    """Where the NeMo checkpoint of a Hugging Face folder is, or will be; one that was not checked has its own place."""
    return bases / f"{model.name}-{digest(model)}{'' if forward_check else '-unchecked'}"


def import_model(model: Path, bases: Path, note: Callable[[str], None], *, forward_check: bool = True) -> Path:
    """The NeMo checkpoint of a Hugging Face folder, made once for its content; a second process waits for the first."""
    from superpod.launch import subprocess_call
    from superpod.weights.transfer import huggingface

    base = base_checkpoint(model, bases, forward_check=forward_check)
    log = base.with_name(f"{base.name}.log")
    bases.mkdir(parents=True, exist_ok=True)
    with owner.others_cannot_write(), log.open("a") as lock:
        locks.lock(lock.fileno(), wait=True)
        owner.refuse_writable(base)
        if not base.is_dir():
            note(f"importing {model} into NeMo")
            atomic_folder.remove_dead(base)
            importer = "superpod.launch.convert:import_hf"
            wanted = {"folder": str(model), "out": str(base), "forward_check": forward_check}
            subprocess_call.call(importer, log, **wanted)
        for line in huggingface.import_notes(base):
            note(line)
    return base


def digest(model: Path) -> str:
    """Twelve hex digits for a folder's content: names, sizes, and the first and last MiB of every file."""
    digest = hashlib.sha256(_IMPORTER)
    for file in sorted(path for path in model.iterdir() if path.is_file() and not path.name.startswith(".")):
        size = file.stat().st_size
        digest.update(f"{file.name}\0{size}\0".encode())
        with file.open("rb") as stream:
            digest.update(stream.read(_SAMPLE))
            stream.seek(max(0, size - _SAMPLE))
            digest.update(stream.read())
    return digest.hexdigest()[:12]


def packed_folder(run: RunFolder) -> Path:
    """Where the packed data of a run are."""
    return Path(str(run.facts.get(PACKED) or run.path / "data"))


def is_packed(run: RunFolder) -> bool:
    """Whether a run has its packed data, so that it needs the user's files no more."""
    return (packed_folder(run) / _COUNTS).is_file()


def pack_data(task: Task, sizes: Sizes, tokenizer_folder: Path, out: Path) -> Counts:
    """Write packed.json and the .npy files to `out`, unless they exist; returns the counts of both parts.

    Raises:
        UserError: a sample is too long and `task.long` refuses it, or there are too few samples.
    """
    from superpod.data.samples import chat

    if kept := read_json(out / _COUNTS):
        return cast("Counts", kept)
    counts = finetune_data.pack(task.samples, sizes, chat.load(str(tokenizer_folder)), out)
    write_json(out / _COUNTS, counts)  # last: its presence means that the rest is complete
    return counts


def export(run: RunFolder, out: Path) -> dict[str, Any]:
    """Write the best checkpoint of a run as the Hugging Face folder `out`; returns its name, loss and what was merged.

    The tokenizer is written with the chat template that the model was trained on. What an export of this run left
    there, which was ended before `pending_export.record`, is replaced; another folder is refused.
    """
    from superpod.launch import convert, subprocess_call
    from superpod.reports.runs import checkpoints
    from superpod.runtime.runs import pending_export

    chosen = checkpoints.best(checkpoints.at(run.path))
    atomic_folder.remove_dead(out)
    with pending_export.exporting(run.path, out):
        job = convert.plan_conversion(run.path, out, forward_check=Task.from_run(run).forward_check)
        exported = subprocess_call.call(job.function, run.attempts[-1].path / "export.log", **job.arguments)
    return {"checkpoint": chosen.name, "val_loss": chosen.val_loss, **exported}
