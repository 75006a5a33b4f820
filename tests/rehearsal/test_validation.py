"""What every command that leads to a job refuses: values that no object takes, and models that cannot be built."""

import pytest

from superpod.lifecycle.request import Request
from superpod.rehearsal import validation

LLAMA, LORA, TINY = "llama3_8b_pretrain_h100_bf16", "llama31_8b_lora_h100_bf16", "tiny_llama3"


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
        from superpod.lifecycle import resolve
        from superpod.recipes import rules

        partial, _ = resolve.configure(Request(recipe, overrides, None, nodes))
        found = rules.violations(partial, overrides) or rules.start_violations(partial, overrides)
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
        (LLAMA, ["optim.config.optimizer=sgd"], "takes Adam only"),
        (
            LLAMA,
            ["trainer.strategy.pipeline_model_parallel_size=2", "trainer.callbacks[2].overlap_p2p_comm=True"],
            "overlap_p2p_comm is on",
        ),
        ("t5_220m_pretrain_h100_bf16", ["data.seq_length_dec=1024"], "data.seq_length_dec is 1024"),
        ("t5_220m_pretrain_h100_bf16", ["model.config.max_position_embeddings=256"], "have no learned embedding"),
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
        ("t5_220m_pretrain_h100_bf16", []),
    ],
)
def test_what_nemo_takes_is_accepted(refusals, recipe, overrides):
    assert refusals(recipe, *overrides) == ""


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
    assert "the models are not built here (--no-build)" in opted_out.stderr


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
