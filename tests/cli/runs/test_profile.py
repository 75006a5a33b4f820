"""`recipes profile show` of files, of runs and beside plans; `--profile` of run and submit before NeMo is imported."""

import json
import os
import shutil

import pytest

from superpod.runtime.runs.run_folder import RunFolder
from tests.profiles import synthetic_profiles as synthetic

NAME = "llama3_8b_pretrain_h100_bf16"


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("it's a [b]profile")
    synthetic.write(folder)
    return folder


def profiled_run(folder, source, rank=0, **facts):
    run = RunFolder.create(folder, "tiny_llama3", facts={"profile": "torch:10-12:0,2", **facts}, recipe_lines=["a = 1"])
    device = run.path / "profile" / f"rank-{rank}" / "device"
    device.mkdir(parents=True)
    shutil.copy(source, device / f"rank-{rank}.json")
    return run


@pytest.mark.parametrize("name", ["synthetic.json", "synthetic.sqlite"])
def test_show_compares_a_profile_with_a_recipes_plan(recipes_cli, files, name):
    done = recipes_cli("profile", "show", name, NAME, "--nodes", 2, cwd=files)
    assert (done.returncode, done.stderr) == (0, "")
    for words in (
        "SYNTHETIC GPU",
        "3 steps of 1.00 ms",
        "0.38   38.0%",
        "0.15   14.9%",
        "1.00  100.0%",
        "not measured",
        "products (TC)   nvjet_tst",
        "planned: llama3_8b_pretrain_h100_bf16, 16 x h100",
        "1. keep the GPU fed",
    ):
        assert words in done.stdout, done.stdout


def test_json_has_all_figures_and_adds_up(recipes_cli, files):
    done = recipes_cli("profile", "show", "synthetic.json.gz", NAME, "--json", cwd=files)
    summary = json.loads(done.stdout)
    sums = summary["sums"]
    assert sum(sums["classes"].values()) == pytest.approx(sums["seconds"], rel=1e-9)
    assert {kind: round(seconds * 1e6) for kind, seconds in sums["classes"].items()} == synthetic.CLASSES_US
    assert (summary["rank"], summary["on_gpu"], len(summary["changes"]), len(summary["bounds"])) == (3, True, 3, 8)
    measured = sum(row["measured_s"] for row in summary["planned"]["rows"])
    assert measured == pytest.approx(sums["seconds"] / 3, rel=1e-9)


def test_a_run_is_compared_with_its_own_plan(recipes_cli, files, tmp_path):
    run = profiled_run(tmp_path / "runs", files / "synthetic.json", 2)
    plan = {"query": {"gpu": "h100"}, "layouts": [{"terms_s": {"compute": 0.0005, "tp": 0.0001}}]}
    (run.path / "plan.json").write_text(json.dumps(plan))
    for words in ([run.path], ["last"], [tmp_path / "runs", "--rank", 2]):
        done = recipes_cli("profile", "show", *words, cwd=tmp_path)
        assert (done.returncode, "planned: tiny_llama3" in done.stdout) == (0, True), done.stderr
    other = recipes_cli("profile", "show", files / "synthetic.json", "--run", run.path)
    assert "tensor-parallel communication, exposed" in other.stdout
    none = recipes_cli("profile", "show", run.path, "--rank", 1)
    assert (none.returncode, "no profile of rank 1" in none.stderr) == (2, True)


@pytest.mark.parametrize(
    ("words", "answer"),
    [
        (["gone.json"], "cannot be read: No such file"),
        (["."], "run folder"),
        (["synthetic.json", "llama3_8b_pretrian_h100_bf16"], "llama3_8b_pretrain_h100_bf16"),
        (["synthetic.json", NAME, "--run", "last"], "compared with one plan"),
        (["synthetic.json", "--nodes", "2"], "--nodes 2 requires a recipe"),
        (["synthetic.json", "--rank", "0"], "is the file of one rank"),
        (["synthetic.json", "--gpu", "7"], "has kernels of GPU 0"),
        (["synthetic.sqlite", "--gpu", "7"], "has GPU 0"),
        (["synthetic.json", NAME, "--nodes", "100000000"], "next:"),
        (["/dev/full"], "error:"),
        (["last"], "error:"),
    ],
)
def test_user_errors_are_refused(recipes_cli, files, words, answer):
    done = recipes_cli("profile", "show", *words, cwd=files)
    assert done.returncode == 2, done.stdout + done.stderr
    assert answer in done.stderr
    assert "Traceback" not in done.stderr


def test_a_run_without_a_profile_is_refused_with_the_requested_steps(recipes_cli, tmp_path):
    run = RunFolder.create(tmp_path, "tiny_llama3", facts={"profile": "torch:10-12:0"}, recipe_lines=["a = 1"])
    done = recipes_cli("profile", "show", run.path)
    assert (done.returncode, "torch:10-12:0" in done.stderr) == (2, True)
    other = RunFolder.create(tmp_path, "tiny_llama3", facts={}, recipe_lines=["a = 1"])
    assert "was not profiled" in recipes_cli("profile", "show", other.path).stderr
    (run.path / "profile").mkdir()
    (run.path / "profile" / "ranks.nsys-rep").touch()
    assert "nsys export --type sqlite" in recipes_cli("profile", "show", run.path).stderr


def test_looking_imports_neither_torch_nor_nemo(recipes_cli, files):
    done = recipes_cli("profile", "show", "synthetic.json", NAME, cwd=files, python=["-X", "importtime"])
    modules = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert not modules & {"torch", "nemo", "nemo_run", "megatron", "bokeh", "lightning"}
    assert "superpod.profiles.profile_torch" in modules


@pytest.mark.parametrize(
    ("words", "answer"),
    [
        (["--profile", "torsh"], "did you mean torch?"),
        (["--profile", "nsys"], "which this machine lacks|nsys is not on PATH"),
        (["--profile-ranks", "1"], "--profile-ranks 1 requires --profile"),
        (["--profile", "torch", "--profile-steps", "12-10"], "--profile-steps"),
    ],
)
def test_run_refuses_before_it_imports_nemo(refusal, words, answer):
    said_why = refusal("run", "tiny_llama3", *words)
    assert any(part in said_why for part in answer.split("|")), said_why


def test_submit_refuses_nsys_on_a_cluster_without_gpus(refusal):
    assert "which testbed lacks" in refusal(
        "submit", "tiny_llama3", "--cluster", "testbed", "--profile", "nsys", "--dry-run"
    )
    late = refusal("submit", "tiny_llama3", "--cluster", "dgx_h100", "--profile", "torch", "--resume", os.curdir)
    assert "--profile conflicts with --resume" in late
