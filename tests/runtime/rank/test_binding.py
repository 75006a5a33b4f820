"""CPU and NUMA binding of ranks: a fake nvidia-smi and a sysfs of files; the binding is real."""

import os
import subprocess
import sys

import pytest

from superpod.runtime.rank import binding

ADDRESSES = ("0000:0f:00.0", "0000:1b:00.0")


@pytest.fixture
def gpus(tmp_path, monkeypatch):
    """Two GPUs: the first beside this process's first CPU, the second beside its last, which `nvidia-smi` lists."""
    allowed = sorted(os.sched_getaffinity(0))
    near = (allowed[0], allowed[-1])
    for number, address in enumerate(ADDRESSES):
        folder = tmp_path / "devices" / address
        folder.mkdir(parents=True)
        (folder / "local_cpulist").write_text(f"{near[number]},{900 + number}-{910 + number}\n")
        (folder / "numa_node").write_text(f"{number}\n")
    rows = "".join(f"{i}, GPU-{i}abc, 0000{address.upper()}\n" for i, address in enumerate(ADDRESSES))
    smi = tmp_path / "bin" / "nvidia-smi"
    smi.parent.mkdir()
    smi.write_text("#!/bin/sh\ncat <<END\n" + rows + "END\n")
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", f"{smi.parent}:/usr/bin:/bin")
    return near, tmp_path / "devices"


def bound(sysfs, **environ):
    """What `bind` says, and the CPUs of a process of its own afterwards."""
    code = f"""
import os, pathlib
from superpod.runtime.rank import binding
print(binding.bind({environ}, pathlib.Path({str(sysfs)!r})))
print(sorted(os.sched_getaffinity(0)))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    words, cpus = done.stdout.splitlines()
    return words, eval(cpus)


@pytest.mark.parametrize("local", [0, 1])
def test_a_rank_runs_beside_its_gpu(gpus, local):
    near, sysfs = gpus
    words, cpus = bound(sysfs, SUPERPOD_CPU_BIND="gpu", LOCAL_RANK=str(local))
    assert cpus == [near[local]]
    assert words == f"bound to CPUs {near[local]}, NUMA node {local} of GPU {ADDRESSES[local]}"


@pytest.mark.parametrize("visible", ["1,0", "GPU-1abc,GPU-0abc", "1"])
def test_the_gpus_that_the_job_has_in_cudas_order(gpus, visible):
    near, sysfs = gpus
    words, cpus = bound(sysfs, SUPERPOD_CPU_BIND="gpu", LOCAL_RANK="0", CUDA_VISIBLE_DEVICES=visible)
    assert cpus == [near[1]]
    assert ADDRESSES[1] in words


def test_not_wanted_or_without_a_gpu_nothing_is_bound(gpus, monkeypatch):
    _, sysfs = gpus
    everywhere = sorted(os.sched_getaffinity(0))
    assert bound(sysfs, LOCAL_RANK="0") == ("", everywhere)
    assert bound(sysfs, SUPERPOD_CPU_BIND="slurm", LOCAL_RANK="0") == ("", everywhere)
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    assert bound(sysfs, SUPERPOD_CPU_BIND="gpu", LOCAL_RANK="0") == ("", everywhere)


def test_a_node_that_does_not_say_or_other_cpus_leave_the_rank_as_it_is(gpus):
    _, sysfs = gpus
    everywhere = sorted(os.sched_getaffinity(0))
    (sysfs / ADDRESSES[0] / "local_cpulist").write_text("800-803\n")
    words, cpus = bound(sysfs, SUPERPOD_CPU_BIND="gpu", LOCAL_RANK="0")
    assert cpus == everywhere
    assert words.startswith("not bound to CPUs: Slurm allocated ")
    (sysfs / ADDRESSES[0] / "numa_node").unlink()
    words, cpus = bound(sysfs, SUPERPOD_CPU_BIND="gpu", LOCAL_RANK="0")
    assert cpus == everywhere
    assert "No such file" in words


@pytest.mark.parametrize("text", ["", "0", "0-3", "0-3,8", "0-55,112-167"])
def test_cpu_lists_of_the_kernel(text):
    assert binding.format_cpus(binding.parse_cpus(text)) == text
