"""What every command that leads to a job refuses: values that no object takes, and models that cannot be built."""

import pytest

from superpod.rehearsal import validation
from superpod.requests.request import Request

LLAMA, LORA, TINY = "llama3_8b_pretrain_h100_bf16", "llama31_8b_lora_h100_bf16", "tiny_llama3"
MIXTRAL, V3, T5 = "mixtral_8x7b_pretrain_h100_bf16", "deepseek_v3_pretrain_h100_bf16", "t5_220m_pretrain_h100_bf16"
SCHEDULER = "optim.lr_scheduler=nemo.lightning.pytorch.optim.lr_scheduler"
DROP = "trainer.callbacks+=[nemo.lightning.pytorch.callbacks.moe_token_drop.MegatronTokenDropCallback()]"
MONITOR = "trainer.callbacks+=[lightning.pytorch.callbacks.LearningRateMonitor"
STOP = "trainer.callbacks+=[lightning.pytorch.callbacks.EarlyStopping"


@pytest.mark.parametrize(
    ("request_", "changed"),
    [
        (Request(LLAMA), False),
        (Request(LLAMA, ("trainer.max_steps=10", "optim.config.lr=1e-4", "log.ckpt.save_top_k=2")), False),
        (Request(LLAMA, ("model.config.num_layers=2",)), True),
        (Request(LLAMA, ("with=full_recompute",)), True),
        (Request(LLAMA, seq=4096), True),
        (Request(LLAMA, num_nodes=3), True),
    ],
)
def test_only_what_changes_the_model_is_built(request_, changed):
    assert validation.is_changed(request_) is changed


@pytest.fixture(scope="module")
def refusals():
    """Override -> what the rules say of it, all in one process."""
    pytest.importorskip("nemo_run")

    def of(recipe, *overrides, nodes=None):
        from superpod.nemo2 import validation as rules
        from superpod.requests import resolve

        request = Request(recipe, overrides, None, nodes)
        partial, _ = resolve.build_configuration(request)
        found = rules.violations(partial, overrides)
        if not found:
            found = rules.start_violations(partial, overrides, resolve.plan_job(partial, request))
        return " | ".join(broken.message for broken in found)

    return of


@pytest.mark.nemo
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("recipe", "overrides", "says"),
    [
        (LLAMA, ["trainer.callbacks[1].gc_interval_train=0"], "gc_interval_train should be"),
        (LLAMA, ["trainer.max_time=4h"], "trainer: "),
        (LLAMA, ["trainer.limit_val_batches=1.5"], "limit_val_batches"),
        (LLAMA, ["trainer.max_epochs=0"], "trainer.max_epochs is 0"),
        (LLAMA, ["trainer.plugins=None"], "would be trained in FP32"),
        (LLAMA, ["trainer.strategy.save_ckpt_format=zarr"], "save_ckpt_format is 'zarr'"),
        (LLAMA, ["data.rampup_batch_size=[32,32]"], "format"),
        (LLAMA, ["data.rampup_batch_size=[32,33,100000]"], "divisible"),
        (LLAMA, ["trainer.strategy.ddp.grad_reduce_in_fp32=False"], "NeMo overwrites it with True"),
        (LLAMA, ["trainer.strategy.ddp.bucket_size=40000000"], "NeMo overwrites it with 134217728"),
        (LLAMA, ["optim.config.optimizer=sgd"], "supports Adam only"),
        (
            LLAMA,
            ["trainer.strategy.pipeline_model_parallel_size=2", "trainer.callbacks[2].overlap_p2p_comm=True"],
            "overlap_p2p_comm requires",
        ),
        (T5, ["data.seq_length_dec=1024"], "data.seq_length_dec is 1024"),
        (T5, ["model.config.max_position_embeddings=256"], "have no learned embedding"),
        (T5, ["data.num_train_samples=10000"], "trainer.val_check_interval is 2000"),
        # The job's environment: NCCL's user buffers take no expandable segments.
        (LLAMA, ["trainer.strategy.ddp.nccl_ub=True"], "not supported with nccl_ub"),
        # The schedule is made, and followed to its end.
        (LLAMA, [f"{SCHEDULER}.WarmupPolicyScheduler(warmup_ratio=0.01)"], "particular number of step or ratio"),
        (LLAMA, [f"{SCHEDULER}.NoamAnnealingScheduler(d_model=0)"], "optim.lr_scheduler: "),
        (LLAMA, ["optim.lr_scheduler.frequency=0"], "frequency is 0"),
        (LLAMA, ["optim.lr_scheduler.interval=epoch"], "interval is 'epoch'"),
        # Callbacks are set up, in their order: DeepEP makes the dispatcher flex on Hopper.
        (LLAMA, [DROP], "only works with alltoall"),
        (V3, [DROP], "only works with alltoall"),
        (LLAMA, [f"{STOP}(monitor='val_los')]"], "'val_los', which is not a logged metric"),
        (LLAMA, [f"{STOP}(monitor='val_loss')]", "trainer.limit_val_batches=0"], "is val_loss"),
        (
            LLAMA,
            [f"{MONITOR}()]", "log.tensorboard=None", "trainer.logger=False"],
            "LearningRateMonitor` callback with `Trainer` that has no logger",
        ),
        (LORA, ["resume.restore_config.path=hf://meta-llama/Meta-Llama-3-8B"], "nemo://"),
        (LLAMA, ["trainer.strategy.ckpt_load_strictness=return_all"], "is 'return_all'"),
        (
            LLAMA,
            ["optim.config.use_precision_aware_optimizer=True", "optim.config.exp_avg_dtype=torch.float8_e4m3fn"],
            "exp_avg_dtype is float8_e4m3fn",
        ),
    ],
)
def test_what_nemo_would_meet_later_is_refused(refusals, recipe, overrides, says):
    assert says in refusals(recipe, *overrides)


@pytest.mark.nemo
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("recipe", "overrides"),
    [
        (LLAMA, []),
        (LLAMA, ["model.config.activation_func=torch.nn.functional.gelu"]),
        (LLAMA, ["model.config.window_size=(4096,0)"]),
        (LLAMA, ["log.ckpt.every_n_train_steps=None", "log.ckpt.train_time_interval=datetime.timedelta(hours=1)"]),
        (LLAMA, ["trainer.max_time=timedelta(hours=4)"]),
        (LLAMA, ["data.rampup_batch_size=[256,64,100000]"]),
        (LLAMA, ["trainer.plugins.grad_reduce_in_fp32=False"]),
        (LORA, ["peft.dim=16"]),
        (T5, []),
        ("bert_110m_pretrain_h100_bf16", []),
        (LLAMA, ["model.config.attention_backend=megatron.core.transformer.enums.AttnBackend.fused"]),
        (LLAMA, ["trainer.strategy.ckpt_load_strictness=log_unexpected"]),
        (LLAMA, ["log.extra_loggers+=[lightning.pytorch.loggers.CSVLogger(save_dir='csv')]"]),
        (LLAMA, [f"{SCHEDULER}.WarmupPolicyScheduler(warmup_steps=None,warmup_ratio=0.01)"]),
        (LLAMA, [f"{STOP}(monitor='grad_norm',mode='min')]"]),
        (LLAMA, ["trainer.check_val_every_n_epoch=None", "data.num_train_samples=1000"]),
        (LLAMA, [f"{MONITOR}(logging_interval='step')]", "trainer.logger=False"]),
        (
            LLAMA,
            ["resume.resume_from_path=/shared/old/step=9-last"],
        ),  # runtime/rank/rank.py: only the first attempt takes it
        (MIXTRAL, [DROP]),
        (MIXTRAL, ["model.config.moe_layer_freq=[0,1,0,1]", "model.config.num_layers=4"]),
    ],
)
def test_what_nemo_takes_is_accepted(refusals, recipe, overrides):
    assert refusals(recipe, *overrides) == ""


@pytest.mark.nemo
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # it may be the first of its process to import NeMo
def test_a_list_that_a_factory_makes_takes_no_none():
    """NeMoLogger.extra_loggers: fiddle has no default for it, and the override ended with a traceback."""
    pytest.importorskip("nemo_run")
    from superpod.errors import UserError
    from superpod.requests import resolve

    with pytest.raises(UserError, match="extra_loggers must be of type List"):
        resolve.build_configuration(Request(LLAMA, ("log.extra_loggers=None",)))


@pytest.mark.nemo
@pytest.mark.slow
def test_render_refuses_what_only_building_the_model_finds(recipes_cli, tmp_path):
    """`check` found this before, and `render` wrote a script that would have failed in the queue."""
    words = ("render", LORA, "peft.lora_A_init_method=orthogonal", "--cluster", "dgx_h100")
    env = {"XDG_CACHE_HOME": str(tmp_path)}
    done = recipes_cli(*words, env=env, timeout=300)
    assert (done.returncode, done.stdout) == (2, "")
    assert "the model cannot be built: rank 0: NotImplementedError" in done.stderr
    opted_out = recipes_cli(*words, "--no-build", env=env, timeout=300)
    assert opted_out.returncode == 0
    assert "the models were not built (--no-build)" in opted_out.stderr


@pytest.mark.nemo
@pytest.mark.long
def test_a_second_command_does_not_build_again(recipes_cli, tmp_path):
    words = ("render", TINY, "model.config.num_layers=2", "--cluster", "testbed")
    env = {"XDG_CACHE_HOME": str(tmp_path)}
    first = recipes_cli(*words, env=env, timeout=300)
    assert first.returncode == 0, first.stderr
    assert "building the models of three ranks" in first.stderr
    second = recipes_cli(*words, env=env, timeout=60)
    assert second.stdout == first.stdout
    assert "building" not in second.stderr
