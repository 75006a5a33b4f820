"""Test `recipes prove --on-gpu` without a GPU: what it refuses, and how it shows results."""

import pytest

from superpod.cli.recipes import prove_on_gpu

NAME = "llama32_1b_pretrain_h100_bf16"


@pytest.fixture
def nvidia_smi(tmp_path, monkeypatch):
    """Return a function that puts a stand-in for nvidia-smi, which prints `text`, first on the PATH."""

    def install(text):
        script = tmp_path / "nvidia-smi"
        script.write_text(f"#!/bin/sh\nprintf '%s' '{text}'\n")
        script.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")

    return install


def test_needs_a_gpu(recipes_cli, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    done = recipes_cli("prove", NAME, "--on-gpu", str(tmp_path / "results"))
    assert done.returncode == 2
    assert "this machine has no NVIDIA GPU" in done.stderr
    assert not (tmp_path / "results").exists()


@pytest.mark.parametrize(
    ("listed", "message"),
    [("", "this machine has no NVIDIA GPU"), ("NVIDIA Z999, 81559, 580.1\n", "no data for NVIDIA Z999")],
)
def test_refuses_a_machine_without_a_known_gpu(nvidia_smi, recipes_cli, tmp_path, listed, message):
    nvidia_smi(listed)
    done = recipes_cli("prove", NAME, "--on-gpu", str(tmp_path / "results"))
    assert done.returncode == 2
    assert message in done.stderr


def test_refuses_recipes_for_other_gpus(nvidia_smi, recipes_cli, tmp_path):
    nvidia_smi("NVIDIA A100-SXM4-80GB, 81920, 580.1")
    done = recipes_cli("prove", NAME, "--on-gpu", str(tmp_path / "results"))
    assert done.returncode == 2
    assert "none is for a100 or a similar GPU" in done.stderr


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--on-gpu", "FILE"], "is not a folder"),
        (["--on-gpu", "DIR", "--nodes", "2"], "--on-gpu tests all declared sizes"),
        (["--on-gpu", "DIR", "--gpus", "4"], "--on-gpu tests all declared sizes"),
        (["--minutes", "5"], "--minutes requires --on-gpu"),
    ],
)
def test_refuses_options_that_do_not_fit_together(recipes_cli, tmp_path, options, message):
    (tmp_path / "FILE").touch()
    options = [str(tmp_path / option) if option.isupper() else option for option in options]
    done = recipes_cli("prove", NAME, *options)
    assert done.returncode == 2
    assert message in done.stderr


def test_finds_the_planners_name_of_the_gpu(nvidia_smi):
    nvidia_smi("NVIDIA H100 80GB HBM3, 81559, 580.1\n" * 2)
    assert prove_on_gpu.find_gpu() == "h100"


def test_results_are_grouped_by_error():
    def result(name, error="", gib=10.0):
        case = {"recipe": name, "steps": 1}
        return {
            "case": case,
            "error": error,
            "losses": [1.0],
            "allocated_gib": [gib],
            "predicted": {"allocated_gib": 11},
        }

    text = prove_on_gpu.describe_results([result("a"), result("b", "RuntimeError: no kernel"), result("c", gib=11)])
    assert text.splitlines() == [
        "2 of 3 shapes passed",
        "allocated memory: the median error of the planner is 5.0 %",
        "1x RuntimeError: no kernel",
        "    b",
    ]


def test_says_that_nothing_was_tested():
    assert prove_on_gpu.describe_results([]) == "no shape was tested"


@pytest.mark.nemo
def test_refuses_a_torch_without_cuda_before_anything_is_written(nvidia_smi, recipes_cli, tmp_path):
    nvidia_smi("NVIDIA H100 80GB HBM3, 81559, 580.1\n")
    done = recipes_cli("prove", NAME, "--on-gpu", str(tmp_path / "results"))
    assert done.returncode == 2
    assert "needs PyTorch with CUDA" in done.stderr
    assert not (tmp_path / "results").exists()
