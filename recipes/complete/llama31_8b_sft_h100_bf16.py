"""llama31_8b_sft_h100_bf16

Llama 3.1 8B: Llama 3's shape, context extended to 128k. SFT in bf16 on 1 x 8 h100: TP2 SP, mbs 2,
global batch size 32, sequence length 4096. Predicted: 1.3 s per step, 55 GiB of memory per GPU.
Proof: built with TE (NeMo 2.7.3, Megatron-Core 0.15.3, Transformer Engine 2.9.0; process groups and
schedule not checked).

Written by `recipes export llama31_8b_sft_h100_bf16` for NeMo 2.7.3, NeMo-Run 0.11.1 and
Megatron-Core 0.15.3. It does not need superpod-recipes; edit it freely.

    python FILE.py               on one node; starts one process per GPU
    torchrun ... FILE.py         on several nodes, with --nnodes 1 --nproc-per-node 8 and a
                                 rendezvous endpoint
    srun ... python FILE.py      one task per GPU, with RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR
                                 and MASTER_PORT in the environment
    run.run(recipe(), executor)  with NeMo-Run; pass env_vars=ENVIRONMENT to the executor
"""
# ruff: noqa: E402

import os
import sys

# Environment variables of the run, set before CUDA, NCCL, PyTorch and Transformer Engine read them.
# Variables that are already set keep their values.
ENVIRONMENT = {
    # kernels start in launch order: TP and CP communication before the GEMM that overlaps with it
    "CUDA_DEVICE_MAX_CONNECTIONS": "1",
    "NVTE_FWD_LAYERNORM_SM_MARGIN": "16",  # SMs reserved for NCCL during norms, forward pass
    "NVTE_BWD_LAYERNORM_SM_MARGIN": "16",  # SMs reserved for NCCL during norms, backward pass
    # less fragmentation, which has caused out-of-memory errors at 59 of 80 GB
    "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
    "TORCH_NCCL_HIGH_PRIORITY": "1",  # communication kernels take precedence over computation
    "TORCH_FR_BUFFER_SIZE": "20000",  # flight recorder: keep the last collectives of each rank
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",  # flight recorder: dump them when a collective times out
    "NCCL_DEBUG": "WARN",  # errors name the peer; INFO would log megabytes per rank
    "NCCL_NVLS_ENABLE": "0",  # NVLink SHARP needs GPU memory that the planner assigns to the model
}
os.environ.update(ENVIRONMENT | os.environ)

import nemo_run as run
import torch
from lightning.pytorch.loggers.tensorboard import TensorBoardLogger
from megatron.core.distributed.distributed_data_parallel_config import DistributedDataParallelConfig
from megatron.core.optimizer.optimizer_config import OptimizerConfig
from nemo import lightning as nl
from nemo.collections import llm
from nemo.collections.common.tokenizers.null_tokenizer import NullTokenizer
from nemo.lightning.pytorch.callbacks.garbage_collection import GarbageCollectionCallback
from nemo.lightning.pytorch.callbacks.megatron_comm_overlap import MegatronCommOverlapCallback
from nemo.lightning.pytorch.optim.lr_scheduler import CosineAnnealingScheduler
from nemo.utils.exp_manager import TimingCallback

NAME = "llama31_8b_sft_h100_bf16"
NODES = 1
GPUS_PER_NODE = 8
SEQ_LENGTH = 4096  # tokens per sample
MICRO_BATCH_SIZE = 2  # samples per forward pass; memory of activations grows with it
GLOBAL_BATCH_SIZE = 32  # samples per step: a multiple of micro-batch size x data-parallel size
MAX_STEPS = 1000
LEARNING_RATE = 5e-06  # peak, reached after the warm-up
MIN_LEARNING_RATE = 0.0  # reached at the last step
WARMUP_STEPS = 50
SAVE_EVERY = 1000  # steps between two checkpoints
FOLDER = None  # checkpoints and logs; None: nemo_experiments in the current folder
WEIGHTS = "nemo://meta-llama/Llama-3.1-8B"  # initial weights; written by `nemo llm import`


def model() -> run.Config:
    """Return the model and its architecture."""
    return run.Config(
        llm.LlamaModel,
        config=run.Config(
            llm.Llama31Config8B, seq_length=SEQ_LENGTH, cross_entropy_fusion_impl="te"
        ),
    )


def data() -> run.Config:
    """Return random tokens. To train on text, use llm.FineTuningDataModule(dataset_root=...)."""
    return run.Config(
        llm.MockDataModule,
        seq_length=SEQ_LENGTH,
        tokenizer=run.Config(NullTokenizer, vocab_size=128255),
        micro_batch_size=MICRO_BATCH_SIZE,
        global_batch_size=GLOBAL_BATCH_SIZE,
        num_workers=2,
    )


def strategy() -> run.Config:
    """Return the parallelism of the model and the sharding of its optimizer."""
    return run.Config(
        nl.MegatronStrategy,
        ddp=run.Config(
            DistributedDataParallelConfig,
            use_distributed_optimizer=True,
            check_for_nan_in_grad=True,  # stop at the first step with non-finite gradients
            # the collective averages, which saves a pass over the gradients
            average_in_collective=True,
            grad_reduce_in_fp32=True,
            overlap_grad_reduce=True,
            overlap_param_gather=True,
        ),
        gradient_as_bucket_view=True,
        pipeline_dtype=torch.bfloat16,
        tensor_model_parallel_size=2,
        pipeline_model_parallel_size=1,
        virtual_pipeline_model_parallel_size=None,
        context_parallel_size=1,
        expert_model_parallel_size=1,
        expert_tensor_parallel_size=None,
        sequence_parallel=True,
        account_for_embedding_in_pipeline_split=False,
        account_for_loss_in_pipeline_split=False,
        ckpt_async_save=True,
        ckpt_assume_constant_structure=True,  # plan the save once instead of at every save
        ckpt_parallel_save=True,
        ckpt_parallel_load=True,
        ckpt_load_strictness="log_all",  # weights imported without TE have no _extra_state
    )


def callbacks() -> list:
    """Return the callbacks."""
    return [
        run.Config(TimingCallback),
        # All ranks collect garbage at the same steps, so that they do not wait for each other.
        run.Config(GarbageCollectionCallback, gc_interval_train=100, gc_interval_val=100),
        run.Config(MegatronCommOverlapCallback, tp_comm_overlap=True),
    ]


def plugins() -> run.Config:
    """Return the number formats."""
    return run.Config(
        nl.MegatronMixedPrecision,
        precision="bf16-mixed",
        params_dtype=torch.bfloat16,
        pipeline_dtype=torch.bfloat16,
        autocast_enabled=False,
        grad_reduce_in_fp32=True,  # a 16-bit sum over thousands of ranks loses small gradients
    )


def trainer() -> run.Config:
    """Return the trainer: steps, nodes, validation and logging intervals."""
    return run.Config(
        nl.Trainer,
        accelerator="gpu",
        strategy=strategy(),
        callbacks=callbacks(),
        max_steps=MAX_STEPS,
        limit_val_batches=32,
        limit_test_batches=32,
        val_check_interval=250,
        log_every_n_steps=10,
        accumulate_grad_batches=1,  # Megatron accumulates: gbs / (mbs x dp)
        use_distributed_sampler=False,  # NeMo's MegatronDataSampler distributes the samples
        plugins=plugins(),
        num_nodes=NODES,
        devices=GPUS_PER_NODE,
    )


def ckpt() -> run.Config:
    """Return the checkpoint settings."""
    return run.Config(
        nl.ModelCheckpoint,
        monitor="step",
        save_last="link",  # a link to the newest checkpoint, not a second copy
        save_top_k=3,
        mode="max",
        save_optim_on_train_end=True,  # otherwise, a finished run could not be extended
        filename="{step}-{consumed_samples}",
        every_n_train_steps=SAVE_EVERY,
    )


def log() -> run.Config:
    """Return the loggers."""
    return run.Config(
        nl.NeMoLogger,
        name=NAME,
        tensorboard=run.Config(TensorBoardLogger, save_dir="tb_logs", name=NAME),
        ckpt=ckpt(),
        log_dir=FOLDER,
    )


def resume() -> run.Config:
    """Return the checkpoint to resume or start from."""
    return run.Config(
        nl.AutoResume,
        resume_if_exists=True,
        resume_ignore_no_checkpoint=True,
        restore_config=run.Config(nl.RestoreConfig, path=WEIGHTS),
    )


def optim() -> run.Config:
    """Return the optimizer and its learning-rate schedule."""
    return run.Config(
        nl.MegatronOptimizerModule,
        config=run.Config(
            OptimizerConfig,
            optimizer="adam",
            lr=LEARNING_RATE,
            weight_decay=0.1,
            adam_beta1=0.9,
            adam_beta2=0.98,  # as in NeMo: an average over 50 steps
            adam_eps=1e-05,
            use_distributed_optimizer=True,
            clip_grad=1.0,
            bf16=True,
            fp16=False,
        ),
        # The strategy copies trainer.max_steps into the schedule, whose default is 10.
        lr_scheduler=run.Config(
            CosineAnnealingScheduler,
            warmup_steps=WARMUP_STEPS,
            constant_steps=0,
            min_lr=MIN_LEARNING_RATE,
        ),
    )


def recipe() -> run.Partial:
    """Return the complete recipe."""
    return run.Partial(
        llm.finetune,
        model=model(),
        data=data(),  # `requests/resolve.py` replaces it if there is a data folder.
        trainer=trainer(),
        log=log(),
        resume=resume(),
        optim=optim(),
        tokenizer="data",  # the tokenizer of the data module; a data folder has the model's own
    )


def main() -> None:
    """Train as a process of torchrun or srun, or start one process per GPU of this machine."""
    partial = recipe()
    nodes, gpus = partial.trainer.num_nodes, partial.trainer.devices
    if "RANK" in os.environ:  # set by torchrun, or by the batch script for each task of srun
        run.run(partial, direct=True)
    elif nodes > 1:
        sys.exit(f"start this on {nodes} nodes with {gpus} processes each; see the top of the file")
    else:
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        os.execv(sys.executable, [*torchrun, f"--nproc-per-node={gpus}", __file__])


if __name__ == "__main__":  # the processes that write checkpoints import this file, too
    main()
