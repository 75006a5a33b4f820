"""What a run may change when it goes on: one table for `run`, `finetune` and `submit` with `--resume`. Needs no NeMo.

A checkpoint of NeMo 2.7.3 brings back the weights, the optimizer with its param groups (learning rate, weight decay),
the schedule with its length and the position in the data; all else is read from the recipe at each start. What the
checkpoint would bring back over an override is refused: it would be dropped in silence.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from superpod.errors import UserError
from superpod.runtime.runs.run_folder import RunFolder

NEW_RUN = "leave it out, or start a new run with it"


@dataclass(frozen=True)
class Rule:
    """What an override does to a run that goes on."""

    path: str
    """a pattern of paths; a field under one that fits belongs to it"""
    keeps: str = ""
    """why it cannot change; '' = it can"""
    words: str = ""
    """what a user must know of the change"""


STATE = "the checkpoint brings it back, with the optimizer's state, over whatever is given"
SHAPE = "the run's checkpoints hold its weights"
POSITION = "the run's position in its data is counted in samples of this"
SAVED_AS = "the checkpoint's optimizer was saved in this form"
STEPS, MIN_RATE = "trainer.max_steps", "optim.lr_scheduler.min_lr"
SIZE = "a run keeps its size"
SIZES = "(tensor|pipeline|virtual_pipeline|expert|expert_tensor|context)[a-z_]*parallel_size"

RULES = (
    Rule(
        r"trainer\.max_steps",
        words="the learning rate keeps the schedule that the run began with: beyond its end it stays at its minimum, "
        "and it does not fall sooner where the run ends sooner",
    ),
    Rule(r"trainer\.num_nodes", keeps=SIZE),
    Rule(r"trainer\.plugins", keeps="the checkpoint was saved in the formats of its precision"),
    Rule(
        rf"trainer\.(devices|strategy\.({SIZES}|sequence_parallel))",
        words="the layout changes, where the checkpoint's optimizer was saved so that it can",
    ),
    Rule(r"trainer\.strategy\.(ckpt_optim_fully_reshardable|save_ckpt_format|fsdp)", keeps=SAVED_AS),
    Rule(r"trainer\.strategy\.ddp\.(use_distributed_optimizer|use_megatron_fsdp|data_parallel_sharding_strategy)",
         keeps=SAVED_AS),
    Rule(r"trainer"),
    Rule(r"log"),
    Rule(r"optim\.config\.clip_grad"),
    Rule(r"optim", keeps=STATE),
    Rule(r"model\.config\.(recompute_\w+|\w*dropout|\w*fusion\w*|attention_backend|cpu_offloading\w*|\w*cuda_graph\w*|"
         r"tp_comm_\w+|overlap_\w+|\w+_overlap|moe_(aux|z)_loss_coeff|moe_token_dispatcher_type|moe_expert_capacity\w*|"
         r"deterministic_mode|batch_p2p_\w+|distribute_saved_activations|cross_entropy_loss_fusion)"),
    Rule(r"model\.config\.seq_length", keeps=POSITION),
    Rule(r"model", keeps=SHAPE),
    Rule(r"data\.(num_workers|pin_memory|persistent_workers)"),
    Rule(r"data\.global_batch_size", words="steps take other numbers of samples from here on; the learning rate is not "
         "scaled with them"),
    Rule(r"data\.micro_batch_size"),
    Rule(r"data", keeps=POSITION),
    Rule(r"tokenizer", keeps=POSITION),
    Rule(r"peft", keeps=SHAPE),
    Rule(r"model_transform", keeps=SHAPE),
    Rule(r"resume", keeps="a run that goes on resumes from its own newest checkpoint"),
)  # fmt: skip
"""The first that fits decides. `tests/launch/test_resumed_overrides.py` holds them against real checkpoints."""

PACKED = (
    Rule(r"data\.(global|micro)_batch_size", keeps="its samples are packed into batches of this size"),
    Rule(
        r"log\.ckpt\.every_n_train_steps", keeps="a fine-tuning saves after each validation: trainer.val_check_interval"
    ),
)
"""Of fine-tuning, before RULES: the packed data of the run is kept."""

OPTIONS = {"fp16": SHAPE, "fsdp": SAVED_AS, "precision_aware": SAVED_AS, "offload_optimizer": SAVED_AS}
"""Options of `with=` that cannot be taken up, and why; the others change speed, memory or what is watched."""


@dataclass(frozen=True)
class Change:
    """A field that is another one than the run had."""

    path: str
    old: str
    new: str
    words: str = ""

    def __str__(self) -> str:
        line = f"{self.path}: {self.old} -> {self.new}"
        return f"{line}  ({self.words})" if self.words else line


def find_changes(run: RunFolder, overrides: Sequence[str]) -> list[Change]:
    """What these overrides change of a run that goes on; one that repeats what the run has changes nothing.

    Raises:
        UserError: naming every field that cannot change, and why.
    """
    before = _current_values(run)
    new = {path: value for path, _, value in (text.partition("=") for text in overrides)}
    changed = [
        (path, before.get(path, "-"), value) for path, value in new.items() if not _is_unchanged(before, path, value)
    ]
    _refuse_idle_steps(run, before, new)
    if refused := [(path, old, value, why) for path, old, value in changed if (why := _refusal(run, path, value))]:
        lines = [f"{path}: {old} -> {value}: {why}" for path, old, value, why in refused]
        raise UserError(f"{run.path} cannot go on with {'; '.join(lines)}", NEW_RUN)
    return [Change(path, old, value, _rule(run, path).words) for path, old, value in changed]


def _refuse_idle_steps(run: RunFolder, before: dict[str, str], new: dict[str, str]) -> None:
    """Refuse steps past the end of a schedule that ends at 0: they would change nothing, and look like training."""
    old, steps, least = (values.get(path, "") for values, path in ((before, STEPS), (new, STEPS), (before, MIN_RATE)))
    if not (old.isdecimal() and steps.isdecimal() and int(steps) > int(old) and _has_checkpoint(run)):
        return
    if _normalize(least) == 0:
        raise UserError(
            f"{run.path} cannot go on to {STEPS}={steps}: its learning rate ends at 0 at step {old}, as its "
            "checkpoints have it, and more steps would learn nothing",
            "start a new run with more steps; a fine-tuning from the folder that this one wrote",
        )


def _has_checkpoint(run: RunFolder) -> bool:
    return run.checkpoints.is_dir() and any(run.checkpoints.iterdir())


def _refusal(run: RunFolder, path: str, value: str) -> str:
    """Why a field cannot be that; '' = it can. Before the first checkpoint there is nothing to contradict it."""
    rule = _rule(run, path)
    if not _has_checkpoint(run):
        return rule.keeps if rule in PACKED or rule.keeps == SIZE else ""
    if path != "with":
        return rule.keeps
    return next((OPTIONS[name] for name in value.split(",") if name in OPTIONS), "")


def _rule(run: RunFolder, path: str) -> Rule:
    rules = (*PACKED, *RULES) if "finetune" in run.facts else RULES
    return next((rule for rule in rules if re.match(rf"({rule.path})(\W|$)", path)), Rule(path))


def _current_values(run: RunFolder) -> dict[str, str]:
    """What the run has: its overrides, for fine-tuning packs batches of other sizes; else the lines of its recipe."""
    overrides = {path: value for path, _, value in _pairs(run.facts.get("overrides", ()), "=")}
    try:
        lines = (run.path / "recipe.txt").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    return {path: value for path, _, value in _pairs(lines, " = ")} | overrides


def _pairs(lines: Sequence[str], sign: str) -> Iterator[tuple[str, str, str]]:
    return (line.partition(sign) for line in lines)


def _is_unchanged(before: dict[str, str], path: str, value: str) -> bool:
    return path in before and _normalize(before[path]) == _normalize(value)


def _normalize(text: str) -> object:
    """A number as a number: 1e-3 is 0.001; text without quotes."""
    try:
        return float(text)
    except ValueError:
        return text.strip().strip("'\"")
