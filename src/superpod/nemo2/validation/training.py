"""What the schedule, the optimizer, the trainer, the data and the model must agree on.

Each rule is a function of the built configuration; the docstring says what it refuses, and where a library would meet
it (NeMo 2.7.3, Megatron-Core 0.15.3, Lightning), if one would.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from superpod.collection.facts.adapted_layers import DUPLICATED, NORMED
from superpod.errors import did_you_mean
from superpod.nemo2.validation.reading import Reader, name_of
from superpod.planner.rules.rules import Violation

ADAM_LR = 0.1
"""Adam moves every weight by about the learning rate in a step, and weights are drawn with a deviation of 0.02: beyond
this, one step is several times the weights themselves."""


def learning_rates(r: Reader) -> Iterator[Violation]:
    """The lowest rate is below the peak (NeMo's CosineAnnealing raises, after the warm-up); Adam's peak is a step."""
    lr, optimizer = r["optim.config.lr"], r["optim.config.optimizer"]
    for path in ("optim.lr_scheduler.min_lr", "optim.config.min_lr"):
        least = r[path]
        if _are_numbers(lr, least) and least > lr:
            yield Violation("min_lr", f"{path} {least:g} is above optim.config.lr {lr:g}", f"write {path}={lr / 10:g}")
    if _are_numbers(lr) and ADAM_LR < lr <= 1 and optimizer == "adam":
        yield Violation(
            "adam_lr",
            f"optim.config.lr is {lr:g}: a step of Adam moves every weight by about as much, and beyond {ADAM_LR:g} "
            "by several times what weights are",
            "models peak at 1e-5 to 1e-3: optim.config.lr=3e-4",
        )


def warmup(r: Reader) -> Iterator[Violation]:
    """A schedule that an override sets fits into the run; a run that was only shortened may end in its warm-up."""
    warm, hold = (r[f"optim.lr_scheduler.{name}_steps"] for name in ("warmup", "constant"))
    steps = r["trainer.max_steps"]
    if not _are_numbers(warm, hold or 0, steps):
        return
    hold = hold or 0
    scheduled = r.overridden("optim.lr_scheduler.warmup_steps", "optim.lr_scheduler.constant_steps")
    if scheduled and warm + hold >= steps:
        held = f" and {hold} constant" if hold else ""
        yield Violation(
            "warmup",
            f"{warm} steps of warm-up{held} leave nothing of a run of {steps} steps: its learning rate never decays",
            f"write optim.lr_scheduler.warmup_steps={max(1, steps // 50)}, or a longer trainer.max_steps",
        )


def advice(r: Reader) -> Iterator[Violation]:
    """A run that ends in its warm-up trains, and never at its learning rate: a short trial, or a mistake."""
    warm, steps = r["optim.lr_scheduler.warmup_steps"], r["trainer.max_steps"]
    if _are_numbers(warm, steps) and warm >= steps and not r.overridden("optim.lr_scheduler.warmup_steps"):
        message = f"the run ends after {steps} steps, within its warm-up of {warm}"
        yield Violation("warmup", message, "for more than a trial: a longer trainer.max_steps, or fewer warmup_steps")


def sequence(r: Reader) -> Iterator[Violation]:
    """The data's sequence is the model's; learned positions have a row for each token, and no more."""
    data, model = r["data.seq_length"], r["model.config.seq_length"]
    if not _are_numbers(data, model):
        return
    learned = r["model.config.position_embedding_type"] == "learned_absolute"
    if data != model and (r.overridden("data.seq_length", "model.config.seq_length") or (learned and data > model)):
        positions = f", whose learned positions end at {model}" if learned else ""
        yield Violation(
            "sequence",
            f"data.seq_length is {data}, and model.config.seq_length is {model}{positions}",
            f"write both: data.seq_length={data} model.config.seq_length={data}",
        )
    rows = _class_default(r["model.config"], "seq_length")
    if learned and _is_finetuning(r) and _are_numbers(rows) and model > rows:
        yield Violation(
            "positions",
            f"model.config.seq_length is {model}, and the weights that fine-tuning starts from have {rows} learned "
            "positions",
            f"write data.seq_length={rows} model.config.seq_length={rows}, or pretrain",
        )


LENGTHS = ("data.seq_length", "data.seq_length_dec", "model.config.seq_length", "model.config.seq_length_dec")


def positions(r: Reader) -> Iterator[Violation]:
    """A learned table of positions has a row for every token of encoder and decoder (an index error on the GPU).

    Of NeMo 2.7.3's models, only T5 gives the table `max_position_embeddings` rows (t5/model/t5.py); GPT, BERT and
    Mamba give it `seq_length` rows, which `sequence` compares with the data.
    """
    rows = r["model.config.max_position_embeddings"]
    if r["model.config.seq_length_dec"] is None or r["model.config.position_embedding_type"] != "learned_absolute":
        return
    for path in LENGTHS:
        if _are_numbers(r[path], rows) and r[path] > rows:
            yield Violation(
                "positions",
                f"{path} is {r[path]}, and model.config.max_position_embeddings is {rows}: the positions behind it "
                "have no learned embedding",
                f"write a length of at most {rows}, or model.config.max_position_embeddings={r[path]}",
            )
            return


def optimizer(r: Reader) -> Iterator[Violation]:
    """The distributed optimizer shards Adam's states, and no other's (megatron-core, get_megatron_optimizer)."""
    name = r["optim.config.optimizer"]
    if r["optim.config.use_distributed_optimizer"] and name not in (None, "adam"):
        yield Violation(
            "distributed_optimizer",
            f"optim.config.optimizer is {name}, and the distributed optimizer takes Adam only",
            "write optim.config.optimizer=adam, or optim.config.use_distributed_optimizer=False",
        )


def vocabulary(r: Reader) -> Iterator[Violation]:
    """The embedding has a row for every token of the tokenizer (an index error on the GPU, at the first rare token)."""
    rows, tokens = r["model.config.vocab_size"], r["data.tokenizer.vocab_size"]
    if name_of(r["data.tokenizer"]) == "NullTokenizer" and _are_numbers(tokens):
        tokens += 1  # it adds the end of a document
    if _are_numbers(rows, tokens) and rows < tokens:
        yield Violation(
            "vocabulary",
            f"model.config.vocab_size is {rows}, and the tokenizer has {tokens} tokens",
            f"write model.config.vocab_size={tokens} or more, or a tokenizer with fewer",
        )


def heads(r: Reader) -> Iterator[Violation]:
    """Queries share keys evenly; a router picks no more experts than there are."""
    number, groups = r["model.config.num_attention_heads"], r["model.config.num_query_groups"]
    if _are_numbers(number, groups) and groups > 0 and number % groups:
        yield Violation(
            "query_groups",
            f"num_attention_heads {number} is no multiple of num_query_groups {groups}",
            f"write model.config.num_query_groups={_divisor(number, groups)}",
        )
    experts, topk = r["model.config.num_moe_experts"], r["model.config.moe_router_topk"]
    if _are_numbers(experts, topk) and topk > experts:
        yield Violation(
            "topk",
            f"moe_router_topk {topk} is more than the {experts} experts (num_moe_experts)",
            f"write model.config.moe_router_topk={min(2, experts)}",
        )


def trainer(r: Reader) -> Iterator[Violation]:
    """Lightning's own features that Megatron's loop does not take."""
    clip = r["trainer.gradient_clip_val"]
    if clip:  # MegatronMixedPrecision.clip_gradients
        fix = f"write optim.config.clip_grad={clip} instead"
        yield Violation("clip", f"trainer.gradient_clip_val is {clip}; Megatron's optimizer clips", fix)
    if r["trainer.precision"] is not None and r.precision_plugin is not None:  # accelerator_connector.py
        message = f"trainer.precision is {r['trainer.precision']!r} beside a precision plugin; Lightning takes one"
        yield Violation("two_precisions", message, "write trainer.plugins.precision instead")
    if r["trainer.use_distributed_sampler"] is True:  # data_connector.py: a batch sampler cannot be replaced
        message = "trainer.use_distributed_sampler is on, and NeMo's data modules distribute samples themselves"
        yield Violation("sampler", message, "write trainer.use_distributed_sampler=False")
    if r["trainer.fast_dev_run"]:
        message = f"trainer.fast_dev_run is {r['trainer.fast_dev_run']}: nothing would be saved or logged"
        yield Violation("fast_dev_run", message, "write trainer.max_steps=10 for a short run")
    if r["trainer.overfit_batches"]:
        message = f"trainer.overfit_batches is {r['trainer.overfit_batches']}, which needs Lightning's own samplers"
        yield Violation("overfit", message, "write a data folder of few documents")
    share = r["trainer.limit_val_batches"]
    if isinstance(share, float) and 0 < share <= 1 and name_of(r["data"]) == "PreTrainingDataModule":
        message = f"trainer.limit_val_batches is {share}; NeMo takes no share of a blend, only a number of batches"
        yield Violation("val_share", message, "write trainer.limit_val_batches=32")  # data/pre_training.py


def validation(r: Reader) -> Iterator[Violation]:
    """An epoch has as many batches as the interval between two validations (Lightning's fit_loop.py, setup_data).

    NeMo's loaders count micro-batches of all ranks. `PreTrainingDataModule` draws samples for all steps of the run.
    """
    interval, samples = r["trainer.val_check_interval"], r["data.num_train_samples"]
    mbs, gbs = r["data.micro_batch_size"], r["data.global_batch_size"]
    if (
        not isinstance(interval, int)
        or not _are_numbers(samples, mbs, gbs)
        or r["trainer.check_val_every_n_epoch"] is None
    ):
        return
    rows = mbs * r.data_parallel_size
    if not rows or gbs % rows:
        return
    batches = samples // gbs * (gbs // rows)
    if interval > batches:
        yield Violation(
            "val_interval",
            f"trainer.val_check_interval is {interval}, and an epoch of data.num_train_samples {samples} has {batches} "
            "micro-batches",
            "write trainer.check_val_every_n_epoch=None, which counts over epochs, or a smaller interval",
        )


def monitors(r: Reader) -> Iterator[Violation]:
    """A callback waits for a metric that is logged: EarlyStopping ends the run at the first validation without it."""
    for number, callback in enumerate(r["trainer.callbacks"] or []):
        metric, path = getattr(callback, "monitor", None), f"trainer.callbacks[{number}].monitor"
        if name_of(callback) != "EarlyStopping" or not metric or getattr(callback, "strict", True) is False:
            continue
        if metric not in LOGGED:
            near = did_you_mean(str(metric), list(LOGGED)) or f"it logs {', '.join(LOGGED)}"
            yield Violation("monitor", f"{path} is {metric!r}, which training does not log", near)
        elif metric == "val_loss" and r["trainer.limit_val_batches"] == 0:
            message = f"{path} is val_loss, and trainer.limit_val_batches is 0: there is none"
            yield Violation("monitor", message, "monitor reduced_train_loss, or give a number of batches")


LOGGED = (
    *("reduced_train_loss", "val_loss", "lr", "grad_norm", "global_step", "step", "consumed_samples"),
    *("global_batch_size", "max_memory_reserved", "max_memory_allocated", "num_zeros_in_grad"),
)
"""What NeMo's strategy, sampler and loop log of every model."""


def workers(r: Reader) -> Iterator[Violation]:
    """torch's DataLoader: workers that stay, or fetch ahead, must exist."""
    if r["data.num_workers"] == 0 and r["data.persistent_workers"]:
        message = "data.persistent_workers is on, and data.num_workers is 0"
        yield Violation("workers", message, "write data.num_workers=2, or data.persistent_workers=False")


ADAPTED = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2", "in_proj", "out_proj")
LATENT = ("linear_q_proj", "linear_q_down_proj", "linear_q_up_proj", "linear_kv_down_proj", "linear_kv_up_proj")
CANONICAL = ("linear_q", "linear_k", "linear_v", "linear_fc1_up", "linear_fc1_gate")
"""Linear layers of Megatron's models, and canonical LoRA's names of their parts."""


def adapters(r: Reader) -> Iterator[Violation]:
    """Adapters are beside layers that exist; where no name matches, NeMo trains nothing and does not notice."""
    names = r["peft.target_modules"]
    if name_of(r["peft"]) not in ("LoRA", "DoRA", "CanonicalLoRA") or not isinstance(names, list | tuple):
        return
    known = (*ADAPTED, *LATENT, *(CANONICAL if name_of(r["peft"]) == "CanonicalLoRA" else ()))
    for name in names:
        last = str(name).rpartition(".")[2]
        if "*" not in last and last not in known:
            message = f"peft.target_modules names {name!r}, and no layer is called so"
            yield Violation("adapters", message, f"layers are {', '.join(known)}")
    whole = sorted({*DUPLICATED} & {str(name).rpartition(".")[2] for name in names})
    tp = r["trainer.strategy.tensor_model_parallel_size"] or 1
    if name_of(r["peft"]) == "DoRA" and whole and tp > 1:
        yield Violation(
            "dora_duplicated",
            f"DoRA of {', '.join(whole)} with tensor_model_parallel_size {tp}: every rank has the whole weight, and "
            f"NeMo 2.7.3 adds 1/{tp} of the adapter's rows to it",
            f"leave {', '.join(whole)} out of peft.target_modules, or use LoRA, or tensor_model_parallel_size 1",
        )
    model, normed = name_of(r["model"]), sorted({*NORMED} & {str(name).rpartition(".")[2] for name in names})
    if model.startswith(("Gemma2", "Gemma3")) and normed:
        yield Violation(
            "adapters_normed",
            f"NeMo 2.7.3's {model} adds an adapter of {' and '.join(normed)} behind the layer's own norm: "
            "norm(Wx) + BAx is trained, and no merged weight computes that",
            f"leave {', '.join(normed)} out of peft.target_modules",
        )
    if not names:
        yield Violation(
            "adapters", "peft.target_modules is empty: no layer gets an adapter", f"name {', '.join(ADAPTED)}"
        )


def placement(r: Reader, gpus: int, gpu: str) -> Iterator[Violation]:
    """A node has the GPUs; `gpus` of them in one of its nodes."""
    devices = r["trainer.devices"]
    if _are_numbers(devices) and devices > gpus:
        message = f"trainer.devices is {devices}, and a node of {gpu} has {gpus} GPUs"
        yield Violation("devices", message, f"write trainer.devices={gpus} trainer.num_nodes={-(-devices // gpus)}")


def _are_numbers(*values: object) -> bool:
    return all(isinstance(value, int | float) and not isinstance(value, bool) for value in values)


def _is_finetuning(r: Reader) -> bool:
    return name_of(r.partial) == "finetune"


def _divisor(number: int, near: int) -> int:
    return min((d for d in range(1, number + 1) if number % d == 0), key=lambda d: abs(d - near))


def _class_default(config: Any, field: str) -> Any:
    """The default of a dataclass's field, whatever the configuration sets."""
    import fiddle as fdl

    if not isinstance(config, fdl.Buildable):
        return None
    declared = getattr(fdl.get_callable(config), "__dataclass_fields__", {}).get(field)
    return declared and declared.default


RULES = (
    *(learning_rates, optimizer, warmup, sequence, positions, vocabulary, heads, trainer, validation),
    *(monitors, workers, adapters),
)
"""All rules of this file that need nothing but the configuration."""
