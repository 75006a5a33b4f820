"""Fine-tune a Hugging Face model: import it, pack the data, train, and export the best checkpoint."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from superpod.collection import recipe_job
from superpod.collection.facts import proof_level
from superpod.collection.registry import Recipe, find, recipes
from superpod.collection.sizes.sized import Size, adapt
from superpod.common import atomic_folder, locks
from superpod.common.json_files import read_json, write_json
from superpod.data.samples import packing
from superpod.data.samples.samples import DEFAULT, ReadOptions
from superpod.errors import UserError, did_you_mean
from superpod.launch.finetuning import tuning_overrides
from superpod.planner.rules import kernel_rules
from superpod.runtime.attempts.model_steps import PACKED
from superpod.runtime.runs import owner, run_facts
from superpod.weights.finetuning import packed_data
from superpod.weights.finetuning.packed_data import Counts, DataOptions

if TYPE_CHECKING:
    import nemo_run as run

    from superpod.runtime.runs.run_folder import RunFolder
    from superpod.weights.finetuning.data_and_weights import PackingSizes

BASES = ".models"
"""Folder next to the run folders (`owner.folder_in`) with the models that this user has imported."""
DECLARED = Size()
"""The smallest declared size of the recipe."""
CONTEXT_PARALLEL = "trainer.strategy.context_parallel_size"
_COUNTS = packed_data.COUNTS_FILE
_IMPORTER = b"table of both directions, forward check"
"""Part of the digest of a model. Change it if the import changes: models imported by earlier versions, which silently
lost biases, must not be reused."""
_SAMPLE = 1 << 20
"""Bytes at each end of a file that are part of the digest of a model."""


@dataclass(frozen=True)
class Task:
    """The model and the data of a fine-tuning run."""

    model: str
    """absolute path of a Hugging Face folder"""
    data: tuple[str, ...]
    """absolute paths of files and dataset folders, and absolute globs"""
    validation_data: tuple[str, ...] = ()
    share: float | None = None
    """share of held-out samples; None = `packed_data.VALIDATION_SHARE`, or 0 with `validation_data`"""
    seed: int = 1234
    long: str = packing.LONG[0]
    pack: bool = True
    steps: int | None = None
    weights: tuple[float, ...] = ()
    reading: ReadOptions = DEFAULT
    template: str = ""
    """absolute path of a Jinja chat template; "" = that of the model"""
    learn: str = "answers"
    """tokens to train on: `--train-on`"""
    start: str = ""
    """absolute path of a NeMo checkpoint with the initial weights; "" = import those of `model`"""
    patience: int = 0
    """number of validations without a lower loss after which training ends; 0 = no early stopping"""
    min_delta: float = 0.0
    """minimum decrease of the loss, in nats per token, for early stopping"""
    forward_check: bool = True
    """whether to compare a forward pass with transformers after import and export"""

    @property
    def samples(self) -> DataOptions:
        """The options of the task for its data."""
        names = [field.name for field in fields(DataOptions)]
        return DataOptions(**{name: getattr(self, name) for name in names})

    @classmethod
    def from_run(cls, run: RunFolder) -> Task:
        """Read the task of a run from its run.json. Raises UserError if it is not a fine-tuning run."""
        facts = run.facts.get(run_facts.FINETUNE)
        if not isinstance(facts, dict) or not {"model", "data"} <= facts.keys():
            raise UserError(f"{run.path} is not a fine-tuning run", "`recipes run` resumes other runs")
        values = {field.name: facts[field.name] for field in fields(cls) if field.name in facts}
        for name in ("data", "validation_data", "weights"):  # JSON has no tuples, and older runs have a single string
            value = values.get(name) or ()
            values[name] = (value,) if isinstance(value, str) else tuple(value)
        reading = values.get("reading") or {}
        values["reading"] = ReadOptions(**{**reading, "keys": tuple(reading.get("keys", ()))})
        return cls(**values)


def check(name: str, task: Task, overrides: Sequence[str] = (), size: Size = DECLARED, prepared: bool = False) -> None:
    """Check a fine-tuning request as far as possible without NeMo.

    `name` is the recipe; the layout of `size` determines whether samples are split over ranks. With `prepared`, the run
    has its packed data, so that the samples are not checked. Raises UserError if the recipe is not for fine-tuning, the
    model is missing, or a line of data is not a sample.
    """
    from superpod.weights.transfer import conversion

    recipe = find(name)
    if recipe.task == "pretrain":
        names = [other.name for other in recipes().values() if other.task != "pretrain"]
        other_names = [other for other in names if recipe.model.name in other]
        raise UserError(
            f"{name} is a pretraining recipe, not a fine-tuning recipe",
            did_you_mean(name, other_names) or "`recipes list sft lora` lists fine-tuning recipes",
        )
    proof_level.require_trainable(recipe)
    _check_packing(recipe, task)
    _check_context_parallelism(recipe, overrides, size)
    conversion.check_importable(Path(task.model), task.forward_check)
    if not prepared:
        packed_data.check_data(task.samples)


def _check_packing(recipe: Recipe, task: Task) -> None:
    """Raise UserError if the model cannot be trained on packed samples.

    `--no-pack` writes the same file format, so it helps only for models that ignore the boundaries of samples.
    """
    why = recipe_job.explain_no_packing(recipe.shape)
    if recipe.task == "dora" and recipe.shape.kv_lora:  # peft/dora.py: a magnitude of (1, 1, width) on (tokens, width)
        why = "DoRA in NeMo 2.7.3 passes its latent attention one more dimension than packed samples have"
    ignores_boundaries = recipe_job.ignores_sample_ends(recipe.shape)
    if not why or (ignores_boundaries and not task.pack):
        return
    hint = f"use NeMo's FineTuningDataModule without packing in `recipes export {recipe.name}`, or a different model"
    if ignores_boundaries:
        hint = "use --no-pack, which puts each sample into its own sequence"
    raise UserError(f"{recipe.model.name} cannot train on packed samples: {why}", hint)


def _check_context_parallelism(recipe: Recipe, overrides: Sequence[str], size: Size) -> None:
    """Raise UserError if attention with the layout's CP cannot handle padding between samples, packed or not."""
    planned = recipe_job.job(adapt(recipe, size), size.num_nodes)
    override_value = tuning_overrides.values_by_path(overrides).get(CONTEXT_PARALLEL, "")
    cp = int(override_value) if override_value.isdecimal() else planned.layout.cp

    hint = f"use {CONTEXT_PARALLEL}=1"
    without_cp = [str(nodes) for nodes in recipe.nodes if recipe.layout(nodes).cp == 1]
    if without_cp and not override_value:
        hint = f"use --num-nodes {' or '.join(without_cp)}, or {CONTEXT_PARALLEL}=1"

    if cp > 1 and recipe_job.ignores_sample_ends(recipe.shape):
        raise UserError(
            f"{recipe.name} with cp {cp} would split each sample over the ranks, but NeMo 2.7.3 does not pass the "
            f"boundaries of samples to {recipe.model.name}",
            hint,
        )
    why = kernel_rules.explain_refused_padding(planned.replace(layout=replace(planned.layout, cp=cp)))
    if why:
        raise UserError(
            f"{recipe.name} with cp {cp} pads every sample to a multiple of {2 * cp} tokens, but Transformer Engine "
            f"2.9 has no attention for padding between samples on {planned.node.gpu.name}: {why}",
            f"{hint}, or NeMo's FineTuningDataModule without packing in `recipes export {recipe.name}`",
        )


def sync_seq_lengths(overrides: Sequence[str]) -> tuple[str, ...]:
    """Return the overrides, with the sequence length of the model added if they set only `data.seq_length`."""
    values = tuning_overrides.values_by_path(overrides)
    length = values.get("data.seq_length")
    if not length or "model.config.seq_length" in values:
        return tuple(overrides)
    return (*overrides, f"model.config.seq_length={length}")


def model_folder(name: str) -> Path:
    """Return the folder of a model: `name` is a path, or ORG/NAME in this machine's Hugging Face cache.

    Downloads nothing. Raises UserError if the model is neither.
    """
    if Path(name).is_dir():
        return Path(name).absolute()
    may_be_hub_name = name.count("/") == 1 and not name.startswith((".", "/", "~"))
    if may_be_hub_name:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

        try:
            return Path(snapshot_download(name, local_files_only=True))
        except (LocalEntryNotFoundError, HFValidationError):
            pass
    if Path(name).exists():
        raise UserError(f"--model {name} is a file, not a folder", "specify the folder that contains its config.json")
    hint = (
        f"run `hf download {name}`" if may_be_hub_name else "specify a folder, or ORG/NAME after `hf download ORG/NAME`"
    )
    raise UserError(f"--model {name} is neither a folder nor in the Hugging Face cache of this machine", hint)


def task_change(
    task: Task,
    run_folder: Path,
    note: Callable[[str], None],
    overrides: Sequence[str] = (),
    deferred_base: Path | None = None,
) -> Callable[[run.Partial], dict[str, object]]:
    """Return the argument `change` of `local.prepare` that imports the model, packs the data and sets them in a recipe.

    Args:
        task: the model and the data.
        run_folder: the folder for the packed data.
        note: called with each line to print.
        overrides: overrides of the recipe. Their number of steps takes precedence over that in `task`.
        deferred_base: path of the checkpoint of a model that the run's job will import; None = import it now.
    """
    steps = tuning_overrides.read_steps(overrides) or task.steps

    def apply(partial: run.Partial) -> dict[str, object]:
        from superpod.weights.families import match_config
        from superpod.weights.finetuning import data_and_weights, steps_and_checkpoints
        from superpod.weights.transfer.conversion import KEPT

        tuning_overrides.refuse_interval(partial, overrides, steps)
        restore = tuning_overrides.worker_restorer(partial, overrides)
        note("comparing the model with the recipe")
        changes = match_config.match_config(partial, Path(task.model))
        base = Path(task.start) if task.start else deferred_base
        if base is None:
            bases = owner.folder_in(run_folder.parents[1], BASES)
            base = import_model(Path(task.model), bases, note, forward_check=task.forward_check)
        sizes = data_and_weights.compute_sizes(partial, task.pack)
        note("encoding and packing the data")
        data = run_folder / "data"
        keeps_model_files = not (deferred_base or task.start)  # the imported checkpoint has copies of them
        model_files = base / KEPT if keeps_model_files else Path(task.model)
        tokenizer = packed_data.prepare_tokenizer_folder(task.samples, model_files, data)
        counts = pack_data(task, sizes, tokenizer, data)
        tokenizer = base / KEPT if tokenizer == model_files and not task.start else tokenizer
        data_and_weights.set_initial_weights(partial, base)
        held_out = counts["validation"]["sequences"]
        data_and_weights.set_data(partial, data, sizes, tokenizer, held_out, packed=task.pack)
        steps_and_checkpoints.set_steps(partial, steps)
        restore(partial)
        steps_and_checkpoints.set_early_stopping(partial, task.patience, task.min_delta)
        changed = {field: [str(old), str(new)] for field, old, new in changes}
        return {run_facts.FINETUNE: asdict(task), "base": str(base), "samples": counts, "model_taken": changed}

    return apply


def base_checkpoint(model: Path, bases: Path, *, forward_check: bool = True) -> Path:
    """Return the path in `bases` of the NeMo checkpoint of a Hugging Face folder, whose name contains its digest.

    Without the forward check, it has a different name.
    """
    suffix = "" if forward_check else "-unchecked"
    return bases / f"{model.name}-{digest(model)}{suffix}"


def import_model(model: Path, bases: Path, note: Callable[[str], None], *, forward_check: bool = True) -> Path:
    """Import a Hugging Face folder to `bases`, unless it is imported, and return its NeMo checkpoint.

    Waits if another process is importing the folder. `note` is called with each line to print.
    """
    from superpod.launch import subprocess_call
    from superpod.weights.transfer import conversion

    base = base_checkpoint(model, bases, forward_check=forward_check)
    log = base.with_name(f"{base.name}.log")
    bases.mkdir(parents=True, exist_ok=True)
    with owner.restrict_umask(), log.open("a") as lock:
        locks.lock(lock.fileno(), wait=True)
        owner.refuse_writable(base)
        if not base.is_dir():
            note(f"importing {model} into NeMo")
            atomic_folder.remove_abandoned(base)
            importer = "superpod.launch.convert:import_hf"
            import_arguments = {"folder": str(model), "out": str(base), "forward_check": forward_check}
            subprocess_call.call(importer, log, **import_arguments)
        for line in conversion.read_import_notes(base):
            note(line)
    return base


def digest(model: Path) -> str:
    """Return twelve hex digits of a hash of a folder: the name, size, and first and last MiB of every file."""
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
    """Return the folder with the packed data of a run."""
    return Path(str(run.facts.get(PACKED) or run.path / "data"))


def is_packed(run: RunFolder) -> bool:
    """Return whether the data of a run are packed, so that the user's data files are no longer needed."""
    return (packed_folder(run) / _COUNTS).is_file()


def pack_data(task: Task, sizes: PackingSizes, tokenizer_folder: Path, out: Path) -> Counts:
    """Write packed.json and the .npy files to `out`, unless they exist; return the counts of samples and sequences.

    Raises UserError if a sample is too long and `task.long` is "refuse", or there are too few samples.
    """
    from superpod.data.samples import chat

    existing_counts = read_json(out / _COUNTS)
    if existing_counts:
        return cast("Counts", existing_counts)
    counts = packed_data.pack(task.samples, sizes, chat.load_tokenizer(str(tokenizer_folder)), out)
    write_json(out / _COUNTS, counts)  # last: its presence means that the rest is complete
    return counts


def export(run: RunFolder, out: Path) -> dict[str, Any]:
    """Export the best checkpoint of a run to the Hugging Face folder `out`; return facts about the export.

    Keys: `checkpoint` (its name), `val_loss`, and the result of `conversion.export_hf`. The exported tokenizer has the
    chat template of the training. An incomplete export of this run is replaced. Raises UserError if `out` exists
    otherwise.
    """
    from superpod.launch import convert, subprocess_call
    from superpod.reports.runs import checkpoint_list
    from superpod.runtime.runs import pending_export

    checkpoint = checkpoint_list.choose_best(checkpoint_list.list_checkpoints(run.path))
    atomic_folder.remove_abandoned(out)
    with pending_export.record_running_export(run.path, out):
        job = convert.plan_conversion(run.path, out, forward_check=Task.from_run(run).forward_check)
        export_facts = subprocess_call.call(job.function, run.attempts[-1].path / "export.log", **job.arguments)
    return {"checkpoint": checkpoint.name, "val_loss": checkpoint.val_loss, **export_facts}
