"""Check which overrides may change when a run is resumed, for `run`, `finetune` and `submit`. Does not need NeMo.

NeMo 2.7.3 restores from a checkpoint the weights, the optimizer with its param groups (learning rate, weight decay),
the schedule with its length, and the position in the data. Everything else is read from the recipe at each start. An
override that the checkpoint would silently undo is refused.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from superpod.errors import UserError
from superpod.runtime.runs.run_folder import RunFolder

NEW_RUN = "omit the change, or start a new run with it"


@dataclass(frozen=True)
class Rule:
    """A rule about whether a field may change when a run is resumed."""

    path: str
    """regular expression for the paths of fields; matches the fields below them too"""
    refusal: str = ""
    """the reason why the field cannot change; "" = it can"""
    note: str = ""
    """the effect of the change, shown to the user"""


STATE = "the checkpoint restores it with the optimizer state, regardless of the override"
SHAPE = "the run's checkpoints contain its weights"
POSITION = "the run's position in its data is counted in samples that depend on it"
SAVED_AS = "the checkpoint's optimizer was saved in this format"
STEPS, MIN_RATE = "trainer.max_steps", "optim.lr_scheduler.min_lr"
SIZE = "a run keeps its size"
SIZES = "(tensor|pipeline|virtual_pipeline|expert|expert_tensor|context)[a-z_]*parallel_size"

RULES = (
    Rule(
        r"trainer\.max_steps",
        note="the learning rate keeps its original schedule: it stays at its minimum after the schedule's end, and "
        "does not decrease earlier if the run ends earlier",
    ),
    Rule(r"trainer\.num_nodes", refusal=SIZE),
    Rule(r"trainer\.plugins", refusal="the checkpoint was saved in the formats of its precision"),
    Rule(
        rf"trainer\.(devices|strategy\.({SIZES}|sequence_parallel))",
        note="the layout changes, provided that the checkpoint's optimizer can be resharded",
    ),
    Rule(r"trainer\.strategy\.(ckpt_optim_fully_reshardable|save_ckpt_format|fsdp)", refusal=SAVED_AS),
    Rule(r"trainer\.strategy\.ddp\.(use_distributed_optimizer|use_megatron_fsdp|data_parallel_sharding_strategy)",
         refusal=SAVED_AS),
    Rule(r"trainer"),
    Rule(r"log"),
    Rule(r"optim\.config\.clip_grad"),
    Rule(r"optim", refusal=STATE),
    Rule(r"model\.config\.(recompute_\w+|\w*dropout|\w*fusion\w*|attention_backend|cpu_offloading\w*|\w*cuda_graph\w*|"
         r"tp_comm_\w+|overlap_\w+|\w+_overlap|moe_(aux|z)_loss_coeff|moe_token_dispatcher_type|moe_expert_capacity\w*|"
         r"deterministic_mode|batch_p2p_\w+|distribute_saved_activations|cross_entropy_loss_fusion)"),
    Rule(r"model\.config\.seq_length", refusal=POSITION),
    Rule(r"model", refusal=SHAPE),
    Rule(r"data\.(num_workers|pin_memory|persistent_workers)"),
    Rule(r"data\.global_batch_size", note="the number of samples per step changes; the learning rate is not scaled"),
    Rule(r"data\.micro_batch_size"),
    Rule(r"data", refusal=POSITION),
    Rule(r"tokenizer", refusal=POSITION),
    Rule(r"peft", refusal=SHAPE),
    Rule(r"model_transform", refusal=SHAPE),
    Rule(r"resume", refusal="a resumed run loads its own latest checkpoint"),
)  # fmt: skip
"""The first matching rule decides. `tests/launch/test_resumed_overrides.py` compares them with real checkpoints."""

PACKED = (
    Rule(r"data\.(global|micro)_batch_size", refusal="its samples are packed into batches of this size"),
    Rule(
        r"log\.ckpt\.every_n_train_steps",
        refusal="a fine-tuning run saves a checkpoint after each validation: trainer.val_check_interval",
    ),
)
"""Rules for fine-tuning runs, which keep their packed data; they precede RULES."""

OPTIONS = {"fp16": SHAPE, "fsdp": SAVED_AS, "precision_aware": SAVED_AS, "offload_optimizer": SAVED_AS}
"""Options of `with=` that cannot be added when a run is resumed -> reason. Others affect speed, memory or logging."""


@dataclass(frozen=True)
class Change:
    """A field that an override sets to a different value than the run has."""

    path: str
    old: str
    new: str
    note: str = ""

    def __str__(self) -> str:
        line = f"{self.path}: {self.old} -> {self.new}"
        return f"{line}  ({self.note})" if self.note else line


def find_changes(run: RunFolder, overrides: Sequence[str]) -> list[Change]:
    """Return the fields that overrides change in a resumed run. Overrides that repeat the run's values are omitted.

    Raises UserError if a field cannot change; the message has all such fields with the reasons.
    """
    old_values = _current_values(run)
    new_values = _split_pairs(overrides, "=")
    changes = [
        Change(path, old_values.get(path, "-"), value, _rule(run, path).note)
        for path, value in new_values.items()
        if path not in old_values or _normalize(old_values[path]) != _normalize(value)
    ]
    _refuse_steps_at_zero_rate(run, old_values, new_values)

    refusals = []
    for change in changes:
        reason = _refusal(run, change.path, change.new)
        if reason:
            refusals.append(f"{change.path}: {change.old} -> {change.new}: {reason}")
    if refusals:
        raise UserError(f"{run.path} cannot be resumed with {'; '.join(refusals)}", NEW_RUN)
    return changes


def _refuse_steps_at_zero_rate(run: RunFolder, old_values: dict[str, str], new_values: dict[str, str]) -> None:
    """Raise UserError for steps after the end of a schedule whose minimum learning rate is 0: they train nothing."""
    old, steps, min_rate = old_values.get(STEPS, ""), new_values.get(STEPS, ""), old_values.get(MIN_RATE, "")
    if not (old.isdecimal() and steps.isdecimal() and int(steps) > int(old) and _has_checkpoint(run)):
        return
    if _normalize(min_rate) == 0:
        raise UserError(
            f"{run.path} cannot be resumed with {STEPS}={steps}: the schedule in its checkpoints reaches a learning "
            f"rate of 0 at step {old}, so further steps would not change the weights",
            "start a new run with more steps; a fine-tuning run can start from the folder that this one exported",
        )


def _has_checkpoint(run: RunFolder) -> bool:
    """Return whether the checkpoint folder of a run is not empty."""
    return run.checkpoints.is_dir() and any(run.checkpoints.iterdir())


def _refusal(run: RunFolder, path: str, value: str) -> str:
    """Return the reason why a field cannot be set to a value; "" if it can. Most rules apply only with a checkpoint."""
    rule = _rule(run, path)
    if not _has_checkpoint(run):
        return rule.refusal if rule in PACKED or rule.refusal == SIZE else ""
    if path != "with":
        return rule.refusal
    return next((OPTIONS[name] for name in value.split(",") if name in OPTIONS), "")


def _rule(run: RunFolder, path: str) -> Rule:
    """Return the first rule for a field; a rule that permits changes if there is none."""
    rules = (*PACKED, *RULES) if "finetune" in run.facts else RULES
    return next((rule for rule in rules if re.match(rf"({rule.path})(\W|$)", path)), Rule(path))


def _current_values(run: RunFolder) -> dict[str, str]:
    """Return path -> value of a run, from recipe.txt and its overrides.

    The overrides take precedence, since the batch sizes in the recipe.txt of a fine-tuning run are those of packed
    sequences.
    """
    try:
        lines = (run.path / "recipe.txt").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    return _split_pairs(lines, " = ") | _split_pairs(run.facts.get("overrides", ()), "=")


def _split_pairs(lines: Sequence[str], separator: str) -> dict[str, str]:
    """Return path -> value of lines such as `path = value`; later lines take precedence."""
    return {path: value for path, _, value in (line.partition(separator) for line in lines)}


def _normalize(text: str) -> object:
    """Return a text as a number if it is one (1e-3 equals 0.001), or else without quotes."""
    try:
        return float(text)
    except ValueError:
        return text.strip().strip("'\"")
