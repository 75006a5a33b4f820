"""tiny_llama3

Llama 3 with 4 layers of 192: 3 million parameters, for two ranks of any machine. Pretrain, bf16, 1
x 2 h100: TP2 SP, mbs 4, gbs 16, 256 tokens a sample. Expected: 0.0139 s a step, 0.159 GiB of a
GPU's memory. Proof: built with TE (NeMo 2.7.3, Megatron-Core 0.15.3, Transformer Engine 2.9.0; not
its process groups and schedule).

Written by `recipes export tiny_llama3 --data /work/data/quickstart` for NeMo 2.7.3,
NeMo-Run 0.11.1 and Megatron-Core 0.15.3. It needs nothing else: change it as you like.

    python FILE.py               one node: starts a process for each of its GPUs
    torchrun ... FILE.py         several: --nnodes 1 --nproc-per-node 2, and where they meet
    srun ... python FILE.py      a task for each GPU, with RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR
                                 and MASTER_PORT in its environment
    run.run(recipe(), executor)  NeMo-Run: make the executor with env_vars=ENVIRONMENT
"""
# ruff: noqa: E402

import os
import sys

# What the run needs, set before CUDA, NCCL, PyTorch and Transformer Engine read it. A value that is
# set already stays.
ENVIRONMENT = {
    # kernels start in the order they are queued, so that communication of TP and CP goes before the
    # GEMM hiding it
    "CUDA_DEVICE_MAX_CONNECTIONS": "1",
    "NVTE_FWD_LAYERNORM_SM_MARGIN": "16",  # leave SMs to NCCL while norms run, forward
    "NVTE_BWD_LAYERNORM_SM_MARGIN": "16",  # ... and backward
    # fragmentation has ended runs at 59 of 80 GB
    "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
    "TORCH_NCCL_HIGH_PRIORITY": "1",  # communication first when both wait for an SM
    "TORCH_FR_BUFFER_SIZE": "20000",  # flight recorder: what each rank did last, at a timeout
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",  # ... written when a collective times out
    "NCCL_DEBUG": "WARN",  # errors name the peer; INFO would write megabytes a rank
    "NCCL_NVLS_ENABLE": "0",  # NVLink SHARP takes GPU memory that the planner gives to the model
}
os.environ.update(ENVIRONMENT | os.environ)

import nemo_run as run
import torch
from lightning.pytorch.loggers.tensorboard import TensorBoardLogger
from megatron.core.distributed.distributed_data_parallel_config import DistributedDataParallelConfig
from megatron.core.optimizer.optimizer_config import OptimizerConfig
from nemo import lightning as nl
from nemo.collections import llm
from nemo.collections.common.tokenizers.huggingface.auto_tokenizer import AutoTokenizer
from nemo.collections.llm.gpt.model.llama import Llama3Config
from nemo.lightning.pytorch.callbacks.garbage_collection import GarbageCollectionCallback
from nemo.lightning.pytorch.callbacks.megatron_comm_overlap import MegatronCommOverlapCallback
from nemo.lightning.pytorch.optim.lr_scheduler import CosineAnnealingScheduler
from nemo.utils.exp_manager import TimingCallback

NAME = "tiny_llama3"
NODES = 1
GPUS_PER_NODE = 2
SEQ_LENGTH = 256  # tokens a sample
MICRO_BATCH_SIZE = 4  # samples at a time: activations grow with it
GLOBAL_BATCH_SIZE = 16  # samples a step, a multiple of micro batch x data parallelism
MAX_STEPS = 60
LEARNING_RATE = 0.003  # the highest, after the warm-up
MIN_LEARNING_RATE = 0.0003  # after the last step
WARMUP_STEPS = 10
SAVE_EVERY = 10  # steps between two checkpoints
FOLDER = None  # for checkpoints and logs; None: nemo_experiments, where it is started
# tokenized text: .bin and .idx files, without their endings
DATA = ["/work/data/quickstart/text"]


def model() -> run.Config:
    """The network."""
    return run.Config(
        llm.LlamaModel,
        config=run.Config(
            Llama3Config,
            num_layers=4,
            hidden_size=192,
            num_attention_heads=6,
            num_query_groups=2,
            ffn_hidden_size=512,
            init_method_std=0.02,
            seq_length=SEQ_LENGTH,
        ),
    )


def data() -> run.Config:
    """What it trains on."""
    return run.Config(
        llm.PreTrainingDataModule,
        paths=DATA,
        seq_length=SEQ_LENGTH,
        tokenizer=run.Config(
            AutoTokenizer,
            pretrained_model_name="/work/data/quickstart/tokenizer",
            use_fast=True,
        ),
        micro_batch_size=MICRO_BATCH_SIZE,
        global_batch_size=GLOBAL_BATCH_SIZE,
        num_workers=2,
        split="969,30,1",
        index_mapping_dir="/work/data/quickstart/index_cache/de60323f9a48",
    )


def strategy() -> run.Config:
    """How the model and its optimizer are spread over the GPUs."""
    return run.Config(
        nl.MegatronStrategy,
        ddp=run.Config(
            DistributedDataParallelConfig,
            use_distributed_optimizer=True,
            check_for_nan_in_grad=True,  # stop at the step that went wrong, not days later
            # the collective divides; no pass over the gradients of its own
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
        ckpt_assume_constant_structure=True,  # the save plan is made once, not at every save
        ckpt_parallel_save=True,
        ckpt_parallel_load=True,
    )


def callbacks() -> list:
    """What happens beside the training."""
    return [
        run.Config(TimingCallback),
        # Python's collector at its own moments makes ranks wait for one another.
        run.Config(GarbageCollectionCallback, gc_interval_train=100, gc_interval_val=100),
        run.Config(MegatronCommOverlapCallback, tp_comm_overlap=True),
    ]


def plugins() -> run.Config:
    """Number formats."""
    return run.Config(
        nl.MegatronMixedPrecision,
        precision="bf16-mixed",
        params_dtype=torch.bfloat16,
        pipeline_dtype=torch.bfloat16,
        autocast_enabled=False,
        grad_reduce_in_fp32=True,  # at thousands of ranks a 16-bit sum loses small gradients
    )


def trainer() -> run.Config:
    """How long it trains, and on what."""
    return run.Config(
        nl.Trainer,
        accelerator="gpu",
        strategy=strategy(),
        callbacks=callbacks(),
        max_steps=MAX_STEPS,
        limit_val_batches=4,
        limit_test_batches=1,
        val_check_interval=20,
        log_every_n_steps=1,
        accumulate_grad_batches=1,  # Megatron accumulates: gbs / (mbs x dp)
        use_distributed_sampler=False,  # NeMo's MegatronDataSampler distributes
        plugins=plugins(),
        num_nodes=NODES,
        devices=GPUS_PER_NODE,
        # An epoch of few documents, or of a short run, has fewer batches than lie between two
        # validations: Lightning would end the run before its first step.
        check_val_every_n_epoch=None,
    )


def ckpt() -> run.Config:
    """What is saved, and when."""
    return run.Config(
        nl.ModelCheckpoint,
        monitor="step",
        save_last="link",  # a link to the newest, not a second copy
        save_top_k=3,
        mode="max",
        save_optim_on_train_end=True,  # without it a finished run cannot be continued
        filename="{step}-{consumed_samples}",
        every_n_train_steps=SAVE_EVERY,
    )


def log() -> run.Config:
    """Where logs go."""
    return run.Config(
        nl.NeMoLogger,
        name=NAME,
        tensorboard=run.Config(TensorBoardLogger, save_dir="tb_logs", name=NAME),
        ckpt=ckpt(),
        log_dir=FOLDER,
    )


def resume() -> run.Config:
    """Where a run goes on, or starts from."""
    return run.Config(nl.AutoResume, resume_if_exists=True, resume_ignore_no_checkpoint=True)


def optim() -> run.Config:
    """The optimizer and its schedule."""
    return run.Config(
        nl.MegatronOptimizerModule,
        config=run.Config(
            OptimizerConfig,
            optimizer="adam",
            lr=LEARNING_RATE,
            weight_decay=0.1,
            adam_beta1=0.9,
            adam_beta2=0.95,
            adam_eps=1e-05,
            use_distributed_optimizer=True,
            clip_grad=1.0,
            bf16=True,
            fp16=False,
        ),
        # The strategy copies trainer.max_steps into the schedule; its own default is 10.
        lr_scheduler=run.Config(
            CosineAnnealingScheduler,
            warmup_steps=WARMUP_STEPS,
            constant_steps=0,
            min_lr=MIN_LEARNING_RATE,
        ),
    )


def recipe() -> run.Partial:
    """The whole recipe."""
    return run.Partial(
        llm.pretrain,
        model=model(),
        data=data(),
        trainer=trainer(),
        log=log(),
        resume=resume(),
        optim=optim(),
    )


def main() -> None:
    """Train as one of a launcher's processes, or start one for each GPU of this machine."""
    whole = recipe()
    nodes, gpus = whole.trainer.num_nodes, whole.trainer.devices
    if "RANK" in os.environ:  # torchrun's process, or a task of srun that was given its rank
        run.run(whole, direct=True)
    elif nodes > 1:
        sys.exit(f"start this on {nodes} nodes, a process for each of {gpus} GPUs: see its top")
    else:
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        os.execv(sys.executable, [*torchrun, f"--nproc-per-node={gpus}", __file__])


if __name__ == "__main__":  # checkpoint writers import this file again
    main()
