"""Local runs on GPUs set the same variables as runs on a cluster."""

from types import SimpleNamespace
from typing import Any, cast

import pytest

from superpod.collection.facts import environment
from superpod.errors import UserError
from superpod.launch import local
from superpod.rehearsal import Change
from tests.slurm.jobs import planned


def local_run(rehearsed: bool = False, overrides: tuple[str, ...] = (), **job: Any) -> local.LocalRun:
    request = SimpleNamespace(overrides=overrides)
    resolved: Any = SimpleNamespace(job=planned(**job), request=request)
    changes = [Change("trainer.accelerator", "gpu", "cpu", "no GPU")] if rehearsed else []
    return local.LocalRun(resolved, cast(Any, None), 8, {}, changes)


@pytest.fixture(autouse=True)
def shell(monkeypatch):
    """A shell that sets nothing of all this."""
    for name in (*(row[0] for row in environment.TABLE), *(v.name for p in environment.OPTIONS.values() for v in p)):
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


def test_local_run_sets_variables_of_its_recipe():
    run = local_run(gpu="a100", tp=2, sp=True)
    needed = {v.name: v.value for v in environment.variables(run.resolved.job)}
    assert local._run_environment(run) == needed
    assert needed["UB_SKIPMC"] == needed["CUDA_DEVICE_MAX_CONNECTIONS"] == "1"


def test_rehearsal_sets_no_gpu_variables():
    assert local._run_environment(local_run(rehearsed=True)) == {}


def test_shell_takes_precedence(shell):
    shell.setenv("NCCL_DEBUG", "INFO")
    assert local._run_environment(local_run())["NCCL_DEBUG"] == "INFO"


def test_shell_contradicting_cuda_graphs_is_refused(shell):
    shell.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    assert local._run_environment(local_run())["PYTORCH_CUDA_ALLOC_CONF"] == "expandable_segments:True"
    with pytest.raises(UserError, match=r"cuda_graphs\.py:1062") as refused:
        local._run_environment(local_run(options={"cuda_graphs": True}))
    assert "unset it" in refused.value.hint


def test_shell_disabling_ipc_is_refused(shell):
    shell.setenv("UB_SKIPMC", "0")
    with pytest.raises(UserError, match="UB_SKIPMC is '0'"):
        local._run_environment(local_run(gpu="a100", tp=2, sp=True))


def test_option_variables_reach_ranks_below_shell(shell):
    assert local._run_environment(local_run(overrides=("with=nccl_low_memory",)))["NCCL_BUFFSIZE"] == "1048576"
    shell.setenv("NCCL_BUFFSIZE", "2097152")
    assert local._run_environment(local_run(overrides=("with=nccl_low_memory",)))["NCCL_BUFFSIZE"] == "2097152"
    assert local._run_environment(local_run(rehearsed=True, overrides=("with=nccl_debug",))) == {}
