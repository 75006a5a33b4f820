"""Check that schedule, optimizer, trainer, data and model are consistent.

Each rule is a function that yields violations. Its docstring or comments name the place in NeMo 2.7.3, Megatron-Core
0.15.3 or Lightning that would otherwise fail.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from superpod.collection.facts.adapters import DUPLICATED_LAYERS, NORMED_LAYERS
from superpod.errors import did_you_mean
from superpod.nemo2.validation.reading import Reader, class_name
from superpod.planner.rules.rules import Violation

MAX_ADAM_LR = 0.1
"""Maximum learning rate for Adam, which changes every weight by about the learning rate per step. Initial weights have
a standard deviation of 0.02: at a higher rate, a step would be several times as large as the weights."""


def check_learning_rates(r: Reader) -> Iterator[Violation]:
    """Yield a violation if the minimum learning rate exceeds the peak (CosineAnnealing), or Adam's peak is too high."""
    lr, optimizer = r["optim.config.lr"], r["optim.config.optimizer"]
    for path in ("optim.lr_scheduler.min_lr", "optim.config.min_lr"):
        min_lr = r[path]
        if _are_numbers(lr, min_lr) and min_lr > lr:
            yield Violation("min_lr", f"{path} {min_lr:g} is above optim.config.lr {lr:g}", f"set {path}={lr / 10:g}")
    if _are_numbers(lr) and MAX_ADAM_LR < lr <= 1 and optimizer == "adam":
        yield Violation(
            "adam_lr",
            f"optim.config.lr is {lr:g}: Adam changes every weight by about the learning rate per step; above "
            f"{MAX_ADAM_LR:g}, this is several times the size of the weights",
            "typical peaks are 1e-5 to 1e-3: optim.config.lr=3e-4",
        )


def check_warmup(r: Reader) -> Iterator[Violation]:
    """Yield a violation if an overridden schedule's phases fill the run. A shortened run may end in its warm-up."""
    warmup, constant = r["optim.lr_scheduler.warmup_steps"], r["optim.lr_scheduler.constant_steps"] or 0
    steps = r["trainer.max_steps"]
    if not _are_numbers(warmup, constant, steps):
        return
    is_overridden = r.is_overridden("optim.lr_scheduler.warmup_steps", "optim.lr_scheduler.constant_steps")
    if is_overridden and warmup + constant >= steps:
        phases = f"{warmup} warm-up steps"
        if constant:
            phases += f" and {constant} constant steps"
        yield Violation(
            "warmup",
            f"{phases} fill the run of {steps} steps, so the learning rate would never decay",
            f"set optim.lr_scheduler.warmup_steps={max(1, steps // 50)}, or a larger trainer.max_steps",
        )


def warnings(r: Reader) -> Iterator[Violation]:
    """Yield a warning if a run ends during its warm-up, which is either a short trial or a mistake."""
    warmup, steps = r["optim.lr_scheduler.warmup_steps"], r["trainer.max_steps"]
    if _are_numbers(warmup, steps) and warmup >= steps and not r.is_overridden("optim.lr_scheduler.warmup_steps"):
        message = f"the run ends after {steps} steps, during its warm-up of {warmup} steps"
        yield Violation("warmup", message, "unless it is a trial, raise trainer.max_steps or lower warmup_steps")


def check_sequence_length(r: Reader) -> Iterator[Violation]:
    """Yield a violation if the sequence lengths of data and model differ, or exceed the learned positions."""
    data, model = r["data.seq_length"], r["model.config.seq_length"]
    if not _are_numbers(data, model):
        return
    has_learned_positions = r["model.config.position_embedding_type"] == "learned_absolute"
    if data != model and (
        r.is_overridden("data.seq_length", "model.config.seq_length") or (has_learned_positions and data > model)
    ):
        message = f"data.seq_length is {data}, but model.config.seq_length is {model}"
        if has_learned_positions:
            message += ", the number of learned positions"
        yield Violation("sequence", message, f"set both: data.seq_length={data} model.config.seq_length={data}")
    positions = _class_default(r["model.config"], "seq_length")
    if has_learned_positions and class_name(r.partial) == "finetune" and _are_numbers(positions) and model > positions:
        yield Violation(
            "positions",
            f"model.config.seq_length is {model}, but the initial weights of fine-tuning have {positions} learned "
            "positions",
            f"set data.seq_length={positions} model.config.seq_length={positions}, or pretrain",
        )


LENGTHS = ("data.seq_length", "data.seq_length_dec", "model.config.seq_length", "model.config.seq_length_dec")
"""Sequence lengths of encoder and decoder."""


def check_positions(r: Reader) -> Iterator[Violation]:
    """Yield a violation if a sequence of encoder or decoder has more tokens than the learned position embedding.

    In NeMo 2.7.3, only T5's has `max_position_embeddings` rows (t5/model/t5.py). Those of GPT, BERT and Mamba have
    `seq_length` rows, which `check_sequence_length` compares with the data.
    """
    positions = r["model.config.max_position_embeddings"]
    if r["model.config.seq_length_dec"] is None or r["model.config.position_embedding_type"] != "learned_absolute":
        return
    for path in LENGTHS:
        if _are_numbers(r[path], positions) and r[path] > positions:
            yield Violation(
                "positions",
                f"{path} is {r[path]}, but model.config.max_position_embeddings is {positions}: later positions have "
                "no learned embedding",
                f"use a length of at most {positions}, or model.config.max_position_embeddings={r[path]}",
            )
            return


def check_distributed_optimizer(r: Reader) -> Iterator[Violation]:
    """Yield a violation for the distributed optimizer with an optimizer other than Adam (get_megatron_optimizer)."""
    name = r["optim.config.optimizer"]
    if r["optim.config.use_distributed_optimizer"] and name not in (None, "adam"):
        yield Violation(
            "distributed_optimizer",
            f"optim.config.optimizer is {name}, but the distributed optimizer supports Adam only",
            "set optim.config.optimizer=adam, or optim.config.use_distributed_optimizer=False",
        )


def check_vocabulary(r: Reader) -> Iterator[Violation]:
    """Yield a violation if the tokenizer has more tokens than the embedding: an index error on the GPU would follow."""
    rows, tokens = r["model.config.vocab_size"], r["data.tokenizer.vocab_size"]
    if class_name(r["data.tokenizer"]) == "NullTokenizer" and _are_numbers(tokens):
        tokens += 1  # it adds an end-of-document token
    if _are_numbers(rows, tokens) and rows < tokens:
        yield Violation(
            "vocabulary",
            f"model.config.vocab_size is {rows}, but the tokenizer has {tokens} tokens",
            f"set model.config.vocab_size={tokens} or more, or use a tokenizer with fewer tokens",
        )


def check_heads_and_experts(r: Reader) -> Iterator[Violation]:
    """Yield a violation unless query groups divide the heads and top-k is at most the number of experts."""
    heads, groups = r["model.config.num_attention_heads"], r["model.config.num_query_groups"]
    if _are_numbers(heads, groups) and groups > 0 and heads % groups:
        yield Violation(
            "query_groups",
            f"num_attention_heads {heads} is not a multiple of num_query_groups {groups}",
            f"set model.config.num_query_groups={_nearest_divisor(heads, groups)}",
        )
    experts, topk = r["model.config.num_moe_experts"], r["model.config.moe_router_topk"]
    if _are_numbers(experts, topk) and topk > experts:
        yield Violation(
            "topk",
            f"moe_router_topk {topk} is larger than num_moe_experts {experts}",
            f"set model.config.moe_router_topk={min(2, experts)}",
        )


def check_trainer(r: Reader) -> Iterator[Violation]:
    """Yield a violation per option of Lightning's trainer that conflicts with NeMo or Megatron."""
    clip = r["trainer.gradient_clip_val"]
    if clip:  # MegatronMixedPrecision.clip_gradients
        message = f"trainer.gradient_clip_val is {clip}, but Megatron's optimizer clips the gradients"
        yield Violation("clip", message, f"set optim.config.clip_grad={clip} instead")
    if r["trainer.precision"] is not None and r.precision_plugin is not None:  # accelerator_connector.py
        message = f"trainer.precision is {r['trainer.precision']!r}, but the trainer also has a precision plugin"
        yield Violation("two_precisions", message, "set trainer.plugins.precision instead")
    if r["trainer.use_distributed_sampler"] is True:  # data_connector.py: a batch sampler cannot be replaced
        message = "trainer.use_distributed_sampler is True, but NeMo's data modules distribute the samples themselves"
        yield Violation("sampler", message, "set trainer.use_distributed_sampler=False")
    if r["trainer.fast_dev_run"]:
        message = f"trainer.fast_dev_run is {r['trainer.fast_dev_run']}: the run would save and log nothing"
        yield Violation("fast_dev_run", message, "set trainer.max_steps=10 for a short run")
    if r["trainer.overfit_batches"]:
        message = f"trainer.overfit_batches is {r['trainer.overfit_batches']}, which needs Lightning's own samplers"
        yield Violation("overfit", message, "use a data folder with only a few documents instead")
    batches = r["trainer.limit_val_batches"]
    if isinstance(batches, float) and 0 < batches <= 1 and class_name(r["data"]) == "PreTrainingDataModule":
        message = f"trainer.limit_val_batches is {batches}, but NeMo needs a number of batches, not a fraction"
        yield Violation("val_share", message, "set trainer.limit_val_batches=32")  # data/pre_training.py


def check_validation_interval(r: Reader) -> Iterator[Violation]:
    """Yield a violation if the validation interval exceeds the micro-batches of an epoch (fit_loop.py, setup_data).

    NeMo's data loaders count the micro-batches of all ranks. `PreTrainingDataModule` has samples for all steps.
    """
    interval, samples = r["trainer.val_check_interval"], r["data.num_train_samples"]
    mbs, gbs = r["data.micro_batch_size"], r["data.global_batch_size"]
    is_per_epoch = isinstance(interval, int) and r["trainer.check_val_every_n_epoch"] is not None
    if not is_per_epoch or not _are_numbers(samples, mbs, gbs):
        return
    samples_per_batch = mbs * r.data_parallel_size
    if not samples_per_batch or gbs % samples_per_batch:
        return
    batches = samples // gbs * (gbs // samples_per_batch)
    if interval > batches:
        yield Violation(
            "val_interval",
            f"trainer.val_check_interval is {interval}, but an epoch of {samples} samples (data.num_train_samples) has "
            f"only {batches} micro-batches",
            "set trainer.check_val_every_n_epoch=None to count across epochs, or a smaller interval",
        )


def check_early_stopping(r: Reader) -> Iterator[Violation]:
    """Yield a violation if EarlyStopping monitors a metric that is not logged, and so stops at the first validation."""
    for number, callback in enumerate(r["trainer.callbacks"] or []):
        metric, path = getattr(callback, "monitor", None), f"trainer.callbacks[{number}].monitor"
        if class_name(callback) != "EarlyStopping" or not metric or getattr(callback, "strict", True) is False:
            continue
        if metric not in LOGGED_METRICS:
            fix = did_you_mean(str(metric), list(LOGGED_METRICS)) or f"logged metrics: {', '.join(LOGGED_METRICS)}"
            yield Violation("monitor", f"{path} is {metric!r}, which is not a logged metric", fix)
        elif metric == "val_loss" and r["trainer.limit_val_batches"] == 0:
            message = f"{path} is val_loss, but trainer.limit_val_batches is 0: there is no validation loss"
            yield Violation("monitor", message, "monitor reduced_train_loss, or raise trainer.limit_val_batches")


LOGGED_METRICS = (
    *("reduced_train_loss", "val_loss", "lr", "grad_norm", "global_step", "step", "consumed_samples"),
    *("global_batch_size", "max_memory_reserved", "max_memory_allocated", "num_zeros_in_grad"),
)
"""Metrics that NeMo's strategy, sampler and training loop log for every model."""


def check_workers(r: Reader) -> Iterator[Violation]:
    """Yield a violation for persistent data workers without workers, which torch's DataLoader rejects."""
    if r["data.num_workers"] == 0 and r["data.persistent_workers"]:
        message = "data.persistent_workers is True, but data.num_workers is 0"
        yield Violation("workers", message, "set data.num_workers=2, or data.persistent_workers=False")


ADAPTED_LAYERS = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2", "in_proj", "out_proj")
LATENT = ("linear_q_proj", "linear_q_down_proj", "linear_q_up_proj", "linear_kv_down_proj", "linear_kv_up_proj")
CANONICAL = ("linear_q", "linear_k", "linear_v", "linear_fc1_up", "linear_fc1_gate")
"""Names of linear layers in Megatron's models (those of latent attention are `LATENT`); `CANONICAL` are the names of
their parts in canonical LoRA."""


def check_adapters(r: Reader) -> Iterator[Violation]:
    """Yield a violation for adapters of layers that do not exist, or whose weights NeMo cannot merge or shard.

    If no name matches, NeMo trains no parameters, without an error.
    """
    targets, kind = r["peft.target_modules"], class_name(r["peft"])
    if kind not in ("LoRA", "DoRA", "CanonicalLoRA") or not isinstance(targets, list | tuple):
        return
    if not targets:
        fix = f"add one or more of {', '.join(ADAPTED_LAYERS)}"
        yield Violation("adapters", "peft.target_modules is empty: no layer gets an adapter", fix)
        return
    known_layers = (*ADAPTED_LAYERS, *LATENT, *CANONICAL) if kind == "CanonicalLoRA" else (*ADAPTED_LAYERS, *LATENT)
    layers = {str(target): str(target).rpartition(".")[2] for target in targets}
    for target, layer in layers.items():
        if "*" not in layer and layer not in known_layers:
            message = f"peft.target_modules contains {target!r}, which matches no layer"
            yield Violation("adapters", message, f"available layers: {', '.join(known_layers)}")
    duplicated = sorted({*DUPLICATED_LAYERS} & {*layers.values()})
    tp = r["trainer.strategy.tensor_model_parallel_size"] or 1
    if kind == "DoRA" and duplicated and tp > 1:
        yield Violation(
            "dora_duplicated",
            f"DoRA of {', '.join(duplicated)} with tensor_model_parallel_size {tp}: every rank has the entire weight, "
            f"but NeMo 2.7.3 adds only 1/{tp} of the adapter's rows",
            f"leave {', '.join(duplicated)} out of peft.target_modules, or use LoRA, or tensor_model_parallel_size 1",
        )
    model, normed = class_name(r["model"]), sorted({*NORMED_LAYERS} & {*layers.values()})
    if model.startswith(("Gemma2", "Gemma3")) and normed:
        yield Violation(
            "adapters_normed",
            f"NeMo 2.7.3's {model} adds the adapters of {' and '.join(normed)} after the layer's norm: norm(Wx) + BAx "
            "cannot be merged into a weight",
            f"leave {', '.join(normed)} out of peft.target_modules",
        )


def check_devices(r: Reader, gpus: int, gpu: str) -> Iterator[Violation]:
    """Yield a violation if `trainer.devices` exceeds `gpus`, the number of GPUs of a node with the GPU `gpu`."""
    devices = r["trainer.devices"]
    if _are_numbers(devices) and devices > gpus:
        message = f"trainer.devices is {devices}, but a node with {gpu} has {gpus} GPUs"
        yield Violation("devices", message, f"set trainer.devices={gpus} trainer.num_nodes={-(-devices // gpus)}")


def _are_numbers(*values: object) -> bool:
    """Return whether all values are an int or float, but not a bool."""
    return all(isinstance(value, int | float) and not isinstance(value, bool) for value in values)


def _nearest_divisor(number: int, target: int) -> int:
    return min((d for d in range(1, number + 1) if number % d == 0), key=lambda d: abs(d - target))


def _class_default(config: Any, field: str) -> Any:
    """Return the default of a field in a configuration's dataclass; None if it has no such field."""
    import fiddle as fdl

    if not isinstance(config, fdl.Buildable):
        return None
    dataclass_field = getattr(fdl.get_callable(config), "__dataclass_fields__", {}).get(field)
    return dataclass_field and dataclass_field.default


RULES = (
    check_learning_rates,
    check_distributed_optimizer,
    check_warmup,
    check_sequence_length,
    check_positions,
    check_vocabulary,
    check_heads_and_experts,
    check_trainer,
    check_validation_interval,
    check_early_stopping,
    check_workers,
    check_adapters,
)
"""Rules that need only the configuration."""
