"""Test `recipes prove --on-gpu` without a GPU: what it refuses, and how it shows results."""

import pytest

from superpod.cli.running import prove_on_gpu

NAME = "llama32_1b_pretrain_h100_bf16"


@pytest.fixture
def nvidia_smi(tmp_path, monkeypatch):
    """Return a function that puts a stand-in for nvidia-smi, which prints `text`, on an otherwise empty PATH."""

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
    assert "there is no nvidia-smi" in done.stderr
    assert not (tmp_path / "results").exists()


@pytest.mark.parametrize(
    ("listed", "message"), [("", "nvidia-smi lists none"), ("NVIDIA Z999\n", "the planner does not know the GPU")]
)
def test_refuses_a_machine_without_a_known_gpu(nvidia_smi, recipes_cli, tmp_path, listed, message):
    nvidia_smi(listed)
    done = recipes_cli("prove", NAME, "--on-gpu", str(tmp_path / "results"))
    assert done.returncode == 2
    assert message in done.stderr


def test_refuses_recipes_for_other_gpus(nvidia_smi, recipes_cli, tmp_path):
    nvidia_smi("NVIDIA A100-SXM4-80GB")
    done = recipes_cli("prove", NAME, "--on-gpu", str(tmp_path / "results"))
    assert done.returncode == 2
    assert "none of them is for GPUs like a100" in done.stderr


def test_finds_the_planners_name_of_the_gpu(nvidia_smi):
    nvidia_smi("NVIDIA H100 80GB HBM3\nNVIDIA H100 80GB HBM3\n")
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
        "allocated memory: the planner's error is 5.0 % in the median",
        "1x RuntimeError: no kernel",
        "    b",
    ]
