"""Mistakes that a user makes by override, and changes that are none; run as a script, it resolves all of them.

`python override_cases.py OUT.json` writes, of each case, what `resolve` says: it imports NeMo once for all.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import NamedTuple

BF16, FP8, A100 = "llama3_8b_pretrain_h100_bf16", "llama3_8b_pretrain_h100_fp8cs", "llama3_8b_pretrain_a100_bf16"
MOE, LORA, SFT = "mixtral_8x7b_pretrain_h100_bf16", "llama3_8b_lora_h100_bf16", "llama3_8b_sft_h100_bf16"
BIG, GPT3, STARCODER = "llama3_70b_pretrain_h100_bf16", "gpt3_175b_pretrain_h100_bf16", "starcoder_15b_sft_h100_bf16"
TINY, DORA, GEMMA2 = "tiny_llama3", "deepseek_v3_dora_b300_bf16", "gemma2_9b_lora_h100_bf16"


class Mistake(NamedTuple):
    """A recipe, its overrides, and what the refusal must contain: the numbers or names that broke a rule."""

    recipe: str
    overrides: tuple[str, ...]
    says: tuple[str, ...]
    issue: bool = False
    """Whether it was given from outside, not chosen here."""


def _m(recipe: str, overrides: str, *says: str, issue: bool = False) -> Mistake:
    return Mistake(recipe, tuple(overrides.split()), says, issue)


ZERO2 = "trainer.strategy.ddp.data_parallel_sharding_strategy=optim_grads"
RESHARDABLE = "trainer.strategy.ckpt_optim_fully_reshardable=True"
_DTYPES = "trainer.plugins.params_dtype=torch.float16 trainer.plugins.pipeline_dtype=torch.float16"
MISTAKES = (
    # Point 15 of the issue: these reached training.
    _m(A100, "trainer.plugins.fp8=hybrid", "a100", "fp8", issue=True),
    _m(MOE, "model.config.moe_token_dispatcher_type=a2a", "'a2a'", "alltoall", issue=True),
    _m(BF16, "optim.config.optimizer=adamw", "'adamw'", "adam, sgd", issue=True),
    _m(BF16, "optim.config.optimizer=lion", "'lion'", "adam, sgd", issue=True),
    # megatron-core's DistributedOptimizer asserts Adam; NeMo's overlap callback writes bucket_size.
    _m(BF16, "optim.config.optimizer=sgd optim.config.lr=0.5", "sgd", "supports Adam only"),
    _m(BF16, "trainer.strategy.ddp.bucket_size=100000000", "100000000", "134217728"),
    _m(BF16, "data.seq_length=4096 model.config.seq_length=8192", "4096", "8192", issue=True),
    _m(BF16, "model.config.seq_length=16384 data.seq_length=8192", "16384", "8192", issue=True),
    _m(BF16, "log.ckpt.every_n_train_steps=0", "is 0", issue=True),
    _m(BF16, "log.ckpt.save_top_k=0", "is 0", issue=True),
    _m(BF16, "resume.resume_if_exists=False", "resume_if_exists is False", "step 0", issue=True),
    _m(BF16, "optim.config.lr=30", "is 30", issue=True),
    _m(BF16, "optim.lr_scheduler.warmup_steps=5000 trainer.max_steps=1000", "5000", "1000", issue=True),
    _m(BF16, "model.config.vocab_size=32000", "32000", "128256", issue=True),
    _m(GPT3, "data.seq_length=4096 model.config.seq_length=2048", "4096", "2048", "both set", issue=True),
    _m(STARCODER, "data.seq_length=16384 model.config.seq_length=16384", "16384", "8192", "learned", issue=True),
    _m(BF16, "trainer.accumulate_grad_batches=4", "is 4", "global_batch_size", issue=True),
    _m(BF16, "optim.lr_scheduler.min_lr=1e-3", "0.001", "0.0003", issue=True),
    _m(BF16, "trainer.plugins.precision=16-mixed", "16-mixed", "bf16", issue=True),
    _m(BF16, "optim.config.fp16=True optim.config.bf16=False", "bf16", "plugin", issue=True),
    _m(FP8, "trainer.plugins.fp8_recipe=mxfp8", "mxfp8", "h100", issue=True),
    _m(BF16, "log.ckpt.save_last=False", "save_last is False", "step 0", issue=True),
    _m(BF16, "log.ckpt.every_n_train_steps=None", "no save interval", issue=True),
    _m(MOE, "model.config.moe_router_topk=9", "9", "num_moe_experts 8", issue=True),
    # Others of ours.
    _m(
        DORA,
        "peft.target_modules=['linear_q_down_proj','linear_q_up_proj']",
        *("linear_q_down_proj", "tensor_model_parallel_size 2", "use LoRA"),
    ),
    _m(BF16, "optim.config.lr=0", "is 0"),
    _m(BF16, "optim.config.lr=-1e-4", "-0.0001"),
    _m(BF16, "optim.config.lr=nan", "nan"),
    _m(BF16, "optim.config.lr=0.5", "is 0.5", "Adam"),
    _m(BF16, "optim.config.adam_beta1=9", "is 9"),
    _m(BF16, "optim.config.adam_beta2=1.0", "adam_beta2 is 1"),
    _m(BF16, "optim.config.adam_eps=0", "is 0"),
    _m(BF16, "optim.config.weight_decay=-0.1", "-0.1"),
    _m(BF16, "optim.config.clip_grad=-1", "-1"),
    _m(BF16, "optim.config.exp_avg_dtype=torch.bfloat16", "exp_avg_dtype"),
    _m(BF16, "optim.lr_scheduler.warmup_steps=-1", "-1"),
    _m(BF16, "model.config.hidden_dropout=1.5", "1.5"),
    _m(BF16, "model.config.attention_dropout=-0.1", "-0.1"),
    _m(BF16, "model.config.num_query_groups=5", "32", "5"),
    _m(BF16, "model.config.num_layers=0", "is 0"),
    _m(BF16, "model.config.normalization=rmsnorm", "'rmsnorm'", "RMSNorm"),
    _m(BF16, "model.config.position_embedding_type=rotary", "rotary", "rope"),
    _m(BF16, "model.config.cross_entropy_fusion_impl=apex", "'apex'", "native, te"),
    _m(BF16, "model.config.init_method_std=0", "is 0"),
    _m(BF16, "model.config.rotary_percent=2", "is 2"),
    _m(MOE, "model.config.moe_router_load_balancing_type=aux", "'aux'", "aux_loss"),
    _m(MOE, "model.config.moe_router_dtype=fp16", "'fp16'", "fp32, fp64"),
    _m(MOE, "model.config.num_moe_experts=6 trainer.strategy.expert_model_parallel_size=4", "6", "ep 4"),
    _m(BF16, "data.num_workers=-1", "-1"),
    _m(BF16, "data.num_workers=0 data.persistent_workers=True", "num_workers is 0"),
    _m(BF16, "data.micro_batch_size=3", "3"),
    _m(BF16, "trainer.gradient_clip_val=1.0", "is 1.0", "clip_grad"),
    _m(BF16, "trainer.precision=bf16-mixed", "bf16-mixed", "plugin"),
    _m(BF16, "trainer.use_distributed_sampler=True", "use_distributed_sampler"),
    _m(BF16, "trainer.accelerator=cpu", "'cpu'", "gpu"),
    _m(BF16, "trainer.fast_dev_run=True", "fast_dev_run"),
    _m(BF16, "trainer.limit_train_batches=0", "is 0"),
    _m(BF16, "trainer.val_check_interval=0", "is 0"),
    _m(BF16, "trainer.enable_checkpointing=False", "enable_checkpointing"),
    _m(BF16, "trainer.devices=16", "16", "8 GPUs"),
    _m(BF16, "trainer.devices=3", "3"),
    _m(BF16, "trainer.strategy.ckpt_load_optimizer=False", "ckpt_load_optimizer", "moments"),
    _m(BF16, "trainer.strategy.tensor_model_parallel_size=64", "64"),
    _m(BIG, "trainer.strategy.pipeline_dtype=torch.float32", "pipeline_dtype", "fp32"),
    _m(BF16, "log.ckpt.save_top_k=-2", "-2"),
    _m(BF16, "log.ckpt.save_weights_only=True", "save_weights_only", "moments"),
    _m(BF16, "log.ckpt.mode=min", "min", "oldest"),
    _m(BF16, "log.ckpt.monitor=val_loss", "val_loss", "worst"),
    _m(BF16, "log.ckpt.monitor=val_lost log.ckpt.mode=min", "'val_lost'"),
    _m(BF16, "log.ckpt.monitor=val_loss log.ckpt.mode=min trainer.limit_val_batches=0", "val_loss", "is 0"),
    _m(BF16, "log.ckpt.every_n_epochs=1", "every_n_epochs", "every_n_train_steps"),
    _m(BF16, "log.ckpt.filename=model", "'model'", "step"),
    _m(BF16, "resume.resume_ignore_no_checkpoint=False", "resume_ignore_no_checkpoint", "first attempt"),
    _m(FP8, "trainer.plugins.fp8=hybird", "'hybird'", "hybrid"),
    _m(FP8, "trainer.plugins.fp8_recipe=tensorwide", "'tensorwide'", "tensorwise"),
    _m(FP8, "trainer.plugins.fp8_recipe=delayed", "delayed"),
    _m(FP8, "trainer.plugins.num_layers_at_end_in_bf16=31", "31", "32"),
    _m(FP8, "trainer.plugins.fp8=None", "fp8_param_gather"),
    _m(FP8, "trainer.plugins.fp4=e2m1", "fp8 and fp4"),
    _m("gpt_oss_20b_pretrain_h100_fp8cs", "model.config.moe_router_padding_for_fp8=False", "add_bias_linear"),
    _m(FP8, f"trainer.plugins.precision=16-mixed {_DTYPES}", "with fp16"),
    _m(FP8, "trainer.plugins.first_last_layers_bf16=False trainer.plugins.num_layers_at_end_in_bf16=2", "no effect"),
    _m(BF16, "with=fp16 trainer.plugins.fp16_loss_scale=4096.0", "loss scale"),
    _m(BF16, "model.config.fp8=hybrid", "is hybrid", "None", "trainer.plugins.fp8"),
    _m(BF16, "model.config.fp16=True", "is True", "False", "trainer.plugins.precision"),
    _m(BF16, "trainer.max_steps=-1", "is -1", "no limit"),
    _m(BF16, "trainer.max_steps=abc", "must be of type int", "set trainer.max_steps=VALUE"),
    _m(BF16, "trainer.overfit_batches=2", "overfit_batches is 2", "samplers"),
    _m(LORA, "peft.dim=0", "is 0"),
    _m(LORA, "peft.dropout=1.5", "1.5"),
    _m(LORA, "peft.target_modules=['q_proj']", "'q_proj'", "linear_qkv"),
    _m(
        GEMMA2,
        "peft.target_modules=['linear_qkv','linear_proj']",
        "Gemma2Model",
        "adapters of linear_proj",
        "leave linear_proj",
    ),
    _m(LORA, "resume.restore_config=None", "random weights"),
    # What Megatron-FSDP and an optimizer on the host take for granted.
    _m(SFT, "with=fsdp", "cannot start from weights", "fsdp_dtensor"),
    _m(LORA, "with=fsdp", "cannot start from weights", "fsdp_dtensor"),
    _m("tiny_llama3_fp32", "with=fsdp", "FP32 with gated MLPs", "no attribute 'module'", "train in bf16"),
    _m("tiny_llama3_fp32", "with=offload_optimizer", "parameters are FP32", "non-leaf", "train in bf16"),
    _m(BF16, "with=fp16,fsdp", "FP16 fails at the first step", "train in bf16"),
    _m(
        BF16,
        f"with=fsdp {ZERO2} trainer.strategy.tensor_model_parallel_size=8",
        "ZeRO-2",
        "8 GPUs",
        "tp x pp x cp = 8",
    ),
    _m(
        BF16,
        f"with=fsdp {ZERO2} trainer.callbacks[2].overlap_grad_reduce=False",
        "overlap_grad_reduce is False",
        "ZeRO-3",
    ),
    _m(BF16, "with=offload_optimizer trainer.strategy.ckpt_optim_fully_reshardable=False", "is False", "on the host"),
    _m(LORA, "with=offload_optimizer", "needs the distributed optimizer", "offload_activations"),
)
"""At least 41; each is refused before training by a message with its numbers, and a next move."""


def _l(recipe: str, overrides: str = "") -> tuple[str, tuple[str, ...]]:
    return recipe, tuple(overrides.split())


LEGITIMATE = (
    _l(BF16, "trainer.max_steps=10"),
    _l(BF16, "trainer.max_steps=100 log.ckpt.every_n_train_steps=20"),
    _l(BF16, "optim.lr_scheduler.warmup_steps=0"),
    _l(BF16, "optim.lr_scheduler.warmup_steps=100 trainer.max_steps=1000"),
    _l(BF16, "optim.config.lr=1e-3"),
    _l(BF16, "optim.config.lr=1e-6 optim.lr_scheduler.min_lr=0"),
    _l(BF16, "optim.config.adam_beta2=0.999 optim.config.adam_eps=1e-8"),
    _l(BF16, "optim.config.weight_decay=0"),
    _l(BF16, "optim.config.clip_grad=0.0"),
    _l(BF16, "data.seq_length=4096 model.config.seq_length=4096"),
    _l(BF16, "data.seq_length=4096"),
    _l(BF16, "model.config.seq_length*=2"),
    _l(BF16, "data.global_batch_size=1024"),
    _l(BF16, "data.num_workers=8 data.persistent_workers=True"),
    _l(BF16, "data.num_workers=0"),
    _l(BF16, "model.config.vocab_size=128512"),
    _l(BF16, "model.config.hidden_dropout=0.1 model.config.attention_dropout=0.1"),
    _l(BF16, "model.config.num_layers=16"),
    _l(BF16, "model.config.num_query_groups=4"),
    _l(BF16, "model.config.init_method_std=0.01"),
    _l(BF16, "model.config.rotary_base=1000000"),
    _l(BF16, "model.config.seq_length=8192"),
    _l(BF16, "trainer.val_check_interval=500 trainer.limit_val_batches=10"),
    _l(BF16, "trainer.limit_val_batches=0"),
    _l(BF16, "trainer.log_every_n_steps=1"),
    _l(BF16, "trainer.num_nodes=2"),
    _l(BF16, "trainer.accumulate_grad_batches=1"),
    _l(BF16, "trainer.max_time=00:12:00:00"),
    _l(BF16, "trainer.strategy.ckpt_async_save=False"),
    _l(BF16, "log.ckpt.save_top_k=-1"),
    _l(BF16, "log.ckpt.save_top_k=10 log.ckpt.every_n_train_steps=50"),
    _l(BF16, "log.ckpt.save_last=True"),
    _l(BF16, "log.ckpt.monitor=val_loss log.ckpt.mode=min"),
    _l(BF16, "log.ckpt.filename={val_loss:.2f}-{step}-{consumed_samples}"),
    _l(BF16, "log.ckpt.save_optim_on_train_end=False"),
    _l(BF16, "log.ckpt.every_n_train_steps=0 log.ckpt.every_n_epochs=1"),
    _l(MOE, "model.config.moe_expert_capacity_factor=-1.0"),
    _l(BF16, "with=full_recompute"),
    _l(BF16, "with=precision_aware"),
    _l(BF16, f"with=precision_aware {RESHARDABLE} optim.config.store_param_remainders=False"),
    _l(BF16, "with=deterministic"),
    _l(BF16, "with=offload_optimizer"),
    _l(BF16, "with=fault_tolerance"),
    _l(LORA, "with=stragglers,fault_tolerance"),
    _l(BF16, f"with=fsdp {ZERO2}"),
    _l(BF16, "with=fsdp trainer.strategy.num_distributed_optimizer_instances=2"),
    _l(
        FP8,
        "trainer.plugins.fp8=None trainer.plugins.fp8_param_gather=False trainer.plugins.first_last_layers_bf16=False",
    ),
    _l(FP8, "trainer.plugins.num_layers_at_end_in_bf16=2"),
    _l(FP8, "trainer.plugins.fp8_recipe=delayed trainer.plugins.first_last_layers_bf16=False"),
    _l(MOE, "model.config.moe_aux_loss_coeff=0.001"),
    _l(MOE, "model.config.moe_router_dtype=fp32"),
    _l(MOE, "model.config.moe_router_topk=1 model.config.moe_router_pre_softmax=True"),
    _l(LORA, "peft.dim=8 peft.alpha=16"),
    _l(LORA, "peft.target_modules=['linear_qkv','*.layers.0.*.linear_proj']"),
    _l(LORA, "peft.dropout=0.1"),
    _l(LORA, "resume.restore_config.path=/shared/weights/llama3"),
    _l(SFT, "trainer.max_steps=40"),
    _l(SFT, "optim.config.lr=1e-5 optim.lr_scheduler.warmup_steps=10"),
    _l(GPT3, "data.seq_length=4096 model.config.seq_length=4096 data.micro_batch_size=1"),
    _l(TINY, "trainer.max_steps=4 data.micro_batch_size=1"),
)
"""At least 40; none is refused."""


def judged(recipe: str, overrides: tuple[str, ...]) -> dict[str, str]:
    """Return the refusal of `Request.check` or `resolve`; {} = none; `early` = before NeMo is imported."""
    from superpod.errors import UserError
    from superpod.requests.request import Request
    from superpod.requests.resolve import resolve

    request = Request(recipe, overrides)
    early = "yes"
    try:
        request.check()
        early = ""
        resolve(request)
    except UserError as refused:
        return {"message": str(refused), "hint": refused.hint, "early": early}
    return {}


def main(out: Path) -> None:
    """Resolve every case and write the refusals."""
    answers = {
        "mistakes": [judged(case.recipe, case.overrides) for case in MISTAKES],
        "legitimate": [judged(*case) for case in LEGITIMATE],
    }
    out.write_text(json.dumps(answers, indent=1))


if __name__ == "__main__":
    import os

    os.environ.setdefault("TORCH_EXTENSIONS_DIR", os.devnull)
    main(Path(sys.argv[1]))
