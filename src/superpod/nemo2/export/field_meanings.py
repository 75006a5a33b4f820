"""Explain in one line what a field of a recipe affects; `recipes diff` prints this next to the values."""

from __future__ import annotations

import re
from functools import cache

MEANINGS = {
    r"recipe": "pretraining or fine-tuning",
    r"data": "type of data",
    r"ddp": "communication of gradients and parameters between model replicas",
    r"tensor_model_parallel_size": "splits every layer: less memory per GPU, more communication in each layer",
    r"pipeline_model_parallel_size": "splits the layers into stages: less memory, but a pipeline bubble in each step",
    r"virtual_pipeline_model_parallel_size": "model chunks per stage: a smaller bubble, more sends",
    r"pipeline_model_parallel_layout|(num_layers_in|account_for)_.*": "distribution of the layers over pipeline stages",
    r"context_parallel_size": "splits the sequence: for long samples, or for fewer sequences than GPUs",
    r"expert_(model|tensor)_parallel_size": "distribution of the experts: memory versus dispatch time",
    r"sequence_parallel": "also splits activations over TP: less memory at the same communication volume",
    r"micro_batch_size": "samples per forward pass: memory of activations, size of the GEMMs",
    r"global_batch_size": "samples per step: learning rate and number of steps must match it",
    r"accumulate_grad_batches": "Megatron accumulates gradients itself; a value above 1 would accumulate twice",
    r"seq_length(_dec)?": "tokens per sample: memory and computation grow with it; longest context in training",
    r"vocab_size|tokenizer.*": "token ids of the mock data or of the real tokenizer: size of the logits",
    r"num_workers|persistent_workers|pin_memory": "speed of the data loader; results stay the same",
    r"num_(train|val|test)_samples": "amount of mock data",
    r"num_nodes|devices": "number of GPUs; determines the data-parallel size, given the other parallel sizes",
    r"max_steps": "length of the training; the learning rate decays until then",
    r"lr|min_lr|warmup_steps|constant_steps|lr_scheduler": "learning rate over time: affects the loss",
    r"weight_decay|adam_.*|clip_grad|optimizer": "optimizer hyperparameters: affect the loss",
    r"use_distributed_optimizer": "shards 12 bytes per parameter of optimizer states over data parallelism",
    r"use_precision_aware_optimizer|(exp_avg|main_grads|main_params).*_dtype": "memory of the optimizer states",
    r"optimizer_.*offload.*|use_torch_optimizer_for_cpu_offload": "optimizer states in host memory: memory versus time",
    r"fp8|fp8_recipe|fp8_margin|fp8_amax.*|fp8_wgrad|fp8_dot_product_attention": "FP8 scaling: speed versus accuracy",
    r"fp8_param.*|reuse_grad_buf.*": "stores and gathers parameters in FP8: half the bytes, one more rounding",
    r"first_last_layers_bf16|num_layers_at_.*_in_bf16": "keeps the layers in BF16 that are most sensitive to FP8",
    r"grad_reduce_in_fp32": "reduction of gradients: FP32 needs twice the bytes; BF16 loses small values at scale",
    r"precision|(params|pipeline)_dtype|autocast.*|bf16|fp16|initial_loss_scale": "number format of the training",
    r"overlap_.*|align_param_gather|defer_embedding.*|.*wgrad_compute|bucket_size": (
        "overlap of communication with computation"
    ),
    r"tp_comm_overlap.*": "overlaps TP communication with Transformer Engine's userbuffers; needs sequence_parallel",
    r"average_in_collective": "averages gradients in the collective: saves a pass over them",
    r"gradient_as_bucket_view": "gradients share the communication buffers: saves a copy",
    r"check_for_(nan|large).*": "stops at the first invalid gradient; costs one synchronization per step",
    r"gradient_accumulation_fusion|.*_fusion": "fewer kernels; same result up to rounding",
    r"cross_entropy_fusion_impl": "memory of the logits: Transformer Engine's kernel works in place",
    r"recompute_.*": "recomputes activations in the backward pass: memory versus time",
    r"cpu_offloading.*": "activations in host memory: memory versus time",
    r"moe_token_dispatcher_type|moe_enable_deepep": "dispatch of tokens to their experts",
    r"moe_.*": "routing and experts: speed, memory or load balance",
    r"enable_cuda_graph|cuda_graph.*|external_cuda_graph|use_te_rng_tracker": "fewer kernel launches; constant shapes",
    r"attention_backend|cp_comm_type": "attention kernel, and exchange of keys and values in CP",
    r"fsdp|use_megatron_fsdp|data_parallel_sharding_strategy": "data-parallel sharding: memory versus communication",
    r"ckpt_.*|save_ckpt_format": "format and speed of saving checkpoints",
    r"every_n_train_steps|train_time_interval|save_.*|monitor|mode|filename|ckpt": (
        "checkpoints: how often, how many; steps lost in a crash"
    ),
    r"val_check_interval|limit_.*_batches": "share of the time spent on validation",
    r"log_every_n_steps|name|log_dir|tensorboard|wandb|save_dir|use_datetime_version": "logging only",
    r"resume.*|restore_config|path": "checkpoint from which the run starts or resumes",
    r"gc_interval.*|GarbageCollectionCallback": "collects garbage at the same steps on all ranks, so none waits",
    r"TimingCallback|Nsys.*": "measurement only",
    r"MegatronCommOverlapCallback": "overlap of communication with computation",
    r"peft|dim|alpha|target_modules|dropout|lora_.*": "adapters on top of the frozen weights",
    r"num_layers|hidden_size|ffn_hidden_size|num_attention_heads|num_query_groups|kv_channels": "different model",
    r"(hidden|attention)_dropout": "affects results; stores a mask for each layer",
    r"init_method_std|.*_init_method.*|layernorm_epsilon|normalization|rotary_.*|share_embeddings.*": "different model",
    r"use_distributed_sampler": "NeMo's sampler distributes the samples; Lightning's would distribute them again",
    r"deterministic.*|seed": "bitwise reproducibility",
}
"""Regular expression for the last one or two names of a path -> effect of the field. The first match applies."""


@cache
def meaning(path: str) -> str:
    """Return the effect of the field at `path`; "" if it is unknown."""
    names = re.sub(r"\[(\w+)\]", r".\1", path).split(".")  # callbacks[TimingCallback] -> callbacks.TimingCallback
    for ending in (names[-1], ".".join(names[-2:])):
        for pattern, text in MEANINGS.items():
            if re.fullmatch(pattern, ending):
                return text
    return ""
