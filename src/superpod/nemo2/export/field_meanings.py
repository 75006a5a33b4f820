"""What a changed field of a recipe means, in one line: `recipes diff` prints it beside the values."""

from __future__ import annotations

import re
from functools import cache

MEANINGS = {
    r"recipe": "pretraining or fine-tuning",
    r"data": "another kind of data: what it learns from",
    r"ddp": "how gradients and parameters travel between the copies of the model",
    r"tensor_model_parallel_size": "splits every layer: less memory a GPU, more communication in each layer",
    r"pipeline_model_parallel_size": "splits the layers into stages: less memory, a bubble in each step",
    r"virtual_pipeline_model_parallel_size": "chunks a stage: a smaller bubble, more sends",
    r"pipeline_model_parallel_layout|(num_layers_in|account_for)_.*": "how evenly the stages share the layers",
    r"context_parallel_size": "splits the sequence: for long samples, or fewer sequences than GPUs",
    r"expert_(model|tensor)_parallel_size": "which GPUs hold which experts: memory against dispatch",
    r"sequence_parallel": "splits activations over TP too: less memory, no more communication",
    r"micro_batch_size": "samples at a time: activations in memory, size of the products",
    r"global_batch_size": "samples a step: the learning rate and the number of steps go with it",
    r"accumulate_grad_batches": "Megatron accumulates by itself; more than 1 here would do it twice",
    r"seq_length(_dec)?": "tokens a sample: memory and work grow with it, and what the model can learn",
    r"vocab_size|tokenizer.*": "ids of the mock data or of the real tokenizer: the size of the logits",
    r"num_workers|persistent_workers|pin_memory": "how fast batches are read; the result is the same",
    r"num_(train|val|test)_samples": "how much mock data there is",
    r"num_nodes|devices": "the size of the run: data parallelism is what the layout leaves over",
    r"max_steps": "how long it trains; the learning rate falls until then",
    r"lr|min_lr|warmup_steps|constant_steps|lr_scheduler": "how fast it learns, over time: the loss depends on it",
    r"weight_decay|adam_.*|clip_grad|optimizer": "the optimizer's own numbers: the loss depends on them",
    r"use_distributed_optimizer": "shards the optimizer over data parallelism: 12 bytes a parameter over so many GPUs",
    r"use_precision_aware_optimizer|(exp_avg|main_grads|main_params).*_dtype": "bytes of the optimizer's states",
    r"optimizer_.*offload.*|use_torch_optimizer_for_cpu_offload": "optimizer states in host memory: slower, smaller",
    r"fp8|fp8_recipe|fp8_margin|fp8_amax.*|fp8_wgrad|fp8_dot_product_attention": "how FP8 scales: speed against error",
    r"fp8_param.*|reuse_grad_buf.*": "parameters kept and gathered in FP8: half the bytes, one rounding more",
    r"first_last_layers_bf16|num_layers_at_.*_in_bf16": "layers that stay in BF16, where FP8's errors cost most",
    r"grad_reduce_in_fp32": "sums of gradients: FP32 takes twice the bytes, BF16 loses what is small at scale",
    r"precision|(params|pipeline)_dtype|autocast.*|bf16|fp16|initial_loss_scale": "the number format of the training",
    r"overlap_.*|align_param_gather|defer_embedding.*|.*wgrad_compute|bucket_size": "hides communication behind work",
    r"tp_comm_overlap.*": "Transformer Engine's userbuffers hide TP's communication; they need sequence_parallel",
    r"average_in_collective": "the collective divides the gradients: one pass over them less",
    r"gradient_as_bucket_view": "gradients live in the communication buffers: no copy",
    r"check_for_(nan|large).*": "stops at the step that went wrong; a synchronisation a step",
    r"gradient_accumulation_fusion|.*_fusion": "fewer kernels, the same result up to rounding",
    r"cross_entropy_fusion_impl": "memory of the logits: Transformer Engine's works in place",
    r"recompute_.*": "activations computed again in the backward pass: memory against time",
    r"cpu_offloading.*": "activations in host memory: memory against time",
    r"moe_token_dispatcher_type|moe_enable_deepep": "how tokens reach their experts",
    r"moe_.*": "routing and experts: speed, memory or balance",
    r"enable_cuda_graph|cuda_graph.*|external_cuda_graph|use_te_rng_tracker": "fewer launches; fixed shapes",
    r"attention_backend|cp_comm_type": "which kernel does the attention, and how CP passes keys and values",
    r"fsdp|use_megatron_fsdp|data_parallel_sharding_strategy": "what data parallelism shards: memory against sends",
    r"ckpt_.*|save_ckpt_format": "how checkpoints are written: time the training waits for one",
    r"every_n_train_steps|train_time_interval|save_.*|monitor|mode|filename|ckpt": "what is saved: what a crash costs",
    r"val_check_interval|limit_.*_batches": "how much of the time goes into validation",
    r"log_every_n_steps|name|log_dir|tensorboard|wandb|save_dir|use_datetime_version": "logs only",
    r"resume.*|restore_config|path": "where the run starts from, or goes on",
    r"gc_interval.*|GarbageCollectionCallback": "Python's collector at the same steps on all ranks: no waiting",
    r"TimingCallback|Nsys.*": "measures only",
    r"MegatronCommOverlapCallback": "hides communication behind work",
    r"peft|dim|alpha|target_modules|dropout|lora_.*": "what is trained beside the frozen weights",
    r"num_layers|hidden_size|ffn_hidden_size|num_attention_heads|num_query_groups|kv_channels": "another model",
    r"(hidden|attention)_dropout": "other results, and a mask in memory for each layer",
    r"init_method_std|.*_init_method.*|layernorm_epsilon|normalization|rotary_.*|share_embeddings.*": "another model",
    r"use_distributed_sampler": "NeMo's own sampler distributes; Lightning's would do it again",
    r"deterministic.*|seed": "whether two runs agree bit for bit",
}
"""Pattern of a path's last one or two names -> what a change does. The first pattern that matches counts."""


@cache
def meaning(path: str) -> str:
    """Why a difference at `path` matters, or ""."""
    names = re.sub(r"\[(\w+)\]", r".\1", path).split(".")  # callbacks[TimingCallback] -> callbacks.TimingCallback
    for ending in (names[-1], ".".join(names[-2:])):
        for pattern, text in MEANINGS.items():
            if re.fullmatch(pattern, ending):
                return text
    return ""
