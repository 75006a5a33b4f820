"""Local runs on GPUs find what those on a cluster find in their environment."""

from types import SimpleNamespace
from typing import Any, cast

import pytest

from superpod.collection.facts import environment
from superpod.errors import UserError
from superpod.launch import local
from superpod.rehearsal import Change
from tests.slurm.jobs import planned


def run_of(rehearsed: bool = False, overrides: tuple[str, ...] = (), **job: Any) -> local.LocalRun:
    request = SimpleNamespace(overrides=overrides)
    resolved: Any = SimpleNamespace(job=planned(**job), request=request)
    changes = [Change("trainer.accelerator", "gpu", "cpu", "no GPU")] if rehearsed else []
    return local.LocalRun(resolved, cast(Any, None), 8, {}, changes)


@pytest.fixture(autouse=True)
def shell(monkeypatch):
    """A shell that sets nothing of all this."""
    for name in (*(row[0] for row in environment.TABLE), *(v.name for p in environment.PURPOSES.values() for v in p)):
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


def test_a_local_run_has_all_that_its_recipe_needs():
    run = run_of(gpu="a100", tp=2, sp=True)
    needed = {v.name: v.value for v in environment.variables(run.resolved.job)}
    assert local._run_environment(run) == needed
    assert needed["UB_SKIPMC"] == needed["CUDA_DEVICE_MAX_CONNECTIONS"] == "1"


def test_a_rehearsal_on_cpus_has_none():
    assert local._run_environment(run_of(rehearsed=True)) == {}


def test_what_the_shell_says_wins(shell):
    shell.setenv("NCCL_DEBUG", "INFO")
    assert local._run_environment(run_of())["NCCL_DEBUG"] == "INFO"


def test_a_shell_that_contradicts_cuda_graphs_is_refused(shell):
    shell.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    assert local._run_environment(run_of())["PYTORCH_CUDA_ALLOC_CONF"] == "expandable_segments:True"
    with pytest.raises(UserError, match=r"cuda_graphs\.py:1062") as refused:
        local._run_environment(run_of(options={"cuda_graphs": True}))
    assert "leave it unset" in refused.value.hint


def test_a_shell_without_ipc_is_refused(shell):
    shell.setenv("UB_SKIPMC", "0")
    with pytest.raises(UserError, match="UB_SKIPMC is '0'"):
        local._run_environment(run_of(gpu="a100", tp=2, sp=True))


def test_a_purpose_reaches_the_ranks_and_the_shell_still_wins(shell):
    assert local._run_environment(run_of(overrides=("with=nccl_low_memory",)))["NCCL_BUFFSIZE"] == "1048576"
    shell.setenv("NCCL_BUFFSIZE", "2097152")
    assert local._run_environment(run_of(overrides=("with=nccl_low_memory",)))["NCCL_BUFFSIZE"] == "2097152"
    assert local._run_environment(run_of(rehearsed=True, overrides=("with=nccl_debug",))) == {}
