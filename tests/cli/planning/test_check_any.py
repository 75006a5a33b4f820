"""`recipes check` of changed recipes, Python files and NeMo's own recipes."""

import json

import pytest

from tests.cli.planning.small_plans import printed

RECIPE = "llama3_8b_pretrain_h100_bf16"

HEAD = "import nemo_run as run\nfrom nemo.collections import llm\n\n\ndef recipe():\n"


def written(folder, body, name="my own.py"):
    path = folder / name
    path.write_text(body)
    return path


def refused(cli, *words):
    """Return the stderr of a refused command, without a traceback."""
    done = cli("check", *words, timeout=300)
    assert done.returncode == 2, done.stdout + done.stderr
    assert "Traceback" not in done.stdout + done.stderr
    return done.stderr


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ("def recipe(:\n", "my own.py:1: invalid Python"),
        ("a = 1\n", "has no function recipe()"),
    ],
)
def test_an_invalid_file_is_refused_without_executing_it(recipes_cli, tmp_path, body, says):
    assert says in refused(recipes_cli, written(tmp_path, body))


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["nofile.py"], "nofile.py does not exist"),
        (["nemo:llama3_9b"], "did you mean llama3_8b"),
        (["nemo:llama3_8b/sftt"], "nemo:llama3_8b/finetune"),
        ([RECIPE, "optim.config.lr=30"], "optim.config.lr is 30"),
        (
            [RECIPE, "trainer.max_steps=10", "--precision", "fp8cs"],
            "--precision cannot be combined with overrides or a file",
        ),
        ([RECIPE, "trainer.num_nodes=16", "--nodes", "2"], "--nodes 2"),
        ([RECIPE, "data.seq_length=4096", "model.config.seq_length=2048"], "both set the sequence length"),
        ([RECIPE, "trainer.max_steps=10", "--gpu", "h1000"], "h1000"),
        ([RECIPE, "max_steps"], "is not an override"),
    ],
)
@pytest.mark.nemo
def test_user_errors_are_refused_before_nemo_is_imported(recipes_cli, words, says):
    done = recipes_cli("check", *words, timeout=60, python=("-X", "importtime"))
    assert done.returncode == 2
    assert says in done.stderr
    assert "nemo_run" not in done.stderr
    assert "torch" not in done.stderr


BROKEN = [
    (HEAD + "    return {}\n", "recipe() must return a run.Partial, not dict"),
    (HEAD + "    import os\n    os._exit(0)\n", "exited with code 0 before the check was complete"),
    (HEAD + "    return run.Partial(llm.import_ckpt)\n", "not of import_ckpt"),
    (HEAD + "    raise KeyError('mine')\n", "my own.py:6: KeyError: 'mine'"),
    (HEAD + "    raise SystemExit(0)\n", "SystemExit"),
    (HEAD + "    raise ValueError('\\x1b[31mred')\n", "my own.py:6: ValueError: ?[31mred"),
    ("from superpod import recipes\ndef recipe():\n    recipes.build('llama9')\n", "my own.py:3: there is no recipe"),
    ("import not_installed_here\n" + HEAD + "    return 1\n", "my own.py:1: ModuleNotFoundError"),
]
"""Text of a recipe file and part of the message. Each case imports NeMo, which takes 15 s."""


@pytest.mark.nemo
@pytest.mark.parametrize(
    ("body", "says"),
    [pytest.param(*case, marks=pytest.mark.slow if i < 2 else pytest.mark.long) for i, case in enumerate(BROKEN)],
)
def test_an_error_in_a_file_is_reported_with_its_line(recipes_cli, tmp_path, body, says):
    assert says in refused(recipes_cli, written(tmp_path, body))


def test_a_file_that_hangs_is_stopped(tmp_path, monkeypatch):
    from superpod.errors import UserError
    from superpod.rehearsal import configuration_check
    from superpod.requests.request import Request

    path = written(tmp_path, "def recipe():\n    while True:\n        pass\n")
    with pytest.raises(UserError, match="took more than 1 s"):
        configuration_check.check_in_subprocess(Request(str(path)), limit_s=1)


@pytest.mark.nemo
@pytest.mark.slow
def test_a_changed_recipe_is_planned_and_built(recipes_cli):
    report = json.loads(printed(recipes_cli, "check", RECIPE, "trainer.max_steps=100", "--json"))
    assert report["passed"]
    assert report["warnings"] == []  # the recipe's warm-up is fitted to so few steps
    assert sum(report["built"]["0"]) == 4_015_263_744  # TP 2
    too_much = printed(recipes_cli, "check", RECIPE, "data.micro_batch_size=8", "--no-build", code=2)
    assert "does not fit" in too_much
    other_gpu = printed(recipes_cli, "check", RECIPE, "trainer.plugins.fp8=hybrid", "--gpu", "a100", code=2)
    assert "does not support fp8ds" in other_gpu


@pytest.mark.nemo
@pytest.mark.long
def test_an_edited_export_is_checked(recipes_cli, tmp_path):
    path = tmp_path / "edited.py"
    assert recipes_cli("export", "tiny_llama3", "--to", path).returncode == 0
    text = path.read_text()
    path.write_text(text.replace("num_layers=4", "num_layers=6"))
    whole = json.loads(printed(recipes_cli, "check", path, "--json"))
    assert whole["passed"]
    assert whole["built"]["0"]
    path.write_text(text.replace('optimizer="adam"', 'optimizer="adamw"').replace("'adam'", "'adamw'"))
    assert "'adamw'; it must be one of adam, sgd" in printed(recipes_cli, "check", path, code=2)


@pytest.mark.nemo
@pytest.mark.slow
def test_nemos_own_recipes_are_checked(recipes_cli):
    assert "llama32_1b pretrain, 8 x h100 bf16" in printed(recipes_cli, "check", "nemo:llama32_1b")
    broken = printed(recipes_cli, "check", "nemo:deepseek_v2_lite", code=2)
    assert "sequence parallelism (sp) requires tensor parallelism, but tp is 1" in broken


@pytest.mark.nemo
@pytest.mark.slow
def test_render_refuses_a_recipe_that_does_not_fit(recipes_cli):
    words = ("render", RECIPE, "data.micro_batch_size=16", "--cluster", "dgx_h100")
    done = recipes_cli(*words, timeout=300)
    assert (done.returncode, done.stdout) == (2, "")
    assert "exceeds the memory of " in done.stderr
    assert "next: " in done.stderr


@pytest.mark.nemo
@pytest.mark.long
def test_a_folder_called_nemo_in_the_working_directory_is_not_imported(recipes_cli, tmp_path):
    (tmp_path / "nemo").mkdir()
    (tmp_path / "nemo" / "__init__.py").write_text("open('executed', 'w')\n")
    done = recipes_cli("check", RECIPE, "trainer.max_steps=10", "--no-build", cwd=tmp_path, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert not (tmp_path / "executed").exists()


@pytest.mark.nemo
@pytest.mark.long
def test_a_model_known_not_to_train_is_refused_with_overrides_too(recipes_cli):
    output = printed(recipes_cli, "check", "gemma3_1b_pretrain_h100_bf16", "trainer.max_steps=9", "--no-build", code=2)
    assert "cannot train" in output


def test_a_parameter_count_other_than_planned_is_a_warning():
    from superpod.rehearsal import configuration_check

    job = planned()
    built = configuration_check.CheckReport(RECIPE, built={0: [4_015_263_744]})
    assert list(configuration_check._compare_parameters(built, job, "pretrain")) == []
    built.built[0] = [6_028_529_664]
    (warning,) = configuration_check._compare_parameters(built, job, "pretrain")
    assert "6,028,529,664" in warning.message
    assert "4,015,263,744" in warning.message


def test_unplanned_unfused_attention_is_a_warning():
    from dataclasses import replace

    from superpod.rehearsal import configuration_check

    job = planned()
    assert list(configuration_check._check_attention(job, {"flash"})) == []
    (warning,) = configuration_check._check_attention(job, {"fused", "unfused"})
    assert "8,192 x 8,192 scores" in warning.message
    priced = job.replace(options=replace(job.options, attention="unfused"))
    assert list(configuration_check._check_attention(priced, {"unfused"})) == []


def planned():
    from superpod.collection import recipe_job
    from superpod.collection.registry import find

    return recipe_job.job(find(RECIPE))


def test_only_the_end_of_a_long_log_is_kept():
    import os

    from superpod.rehearsal import configuration_check

    out, into = os.pipe()
    kept = bytearray()
    with os.fdopen(into, "wb") as pipe:
        pipe.write(b"x" * 60_000)
    configuration_check.LOG_BYTES, before = 1000, configuration_check.LOG_BYTES
    try:
        configuration_check._keep_end(os.fdopen(out, "rb"), kept)
    finally:
        configuration_check.LOG_BYTES = before
    assert len(kept) == 1000


@pytest.mark.nemo
@pytest.mark.slow
def test_a_misspelt_field_of_the_strategy_is_refused_in_a_file(recipes_cli, tmp_path):
    body = HEAD + (
        "    from superpod import recipes\n"
        f"    partial = recipes.build({RECIPE!r}, 2)\n"
        "    partial.trainer.strategy.sequence_paralel = True\n"
        "    return partial\n"
    )
    output = refused(recipes_cli, written(tmp_path, body), "--no-build")
    assert "MegatronStrategy has no argument 'sequence_paralel'" in output
    assert "sequence_parallel" in output
