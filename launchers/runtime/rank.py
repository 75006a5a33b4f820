"""One rank of a Slurm job: `srun ... python rank.py recipe.py`, one task per GPU.

Gives the process the names that PyTorch expects, its own log, and its run folder, then runs the recipe.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import multiprocessing
import os
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

if __name__ == "__main__":
    sys.path.insert(1, str(Path(__file__).resolve().parents[3]))

KNOWN_BAD = (
    ("nemo_toolkit", "2.7.", "megatron-core", "0.16", "NeMo 2.7 passes arguments that Megatron-Core 0.16 has dropped"),
    ("nemo_run", "0.11.", "leptonai", "0.4", "NeMo-Run 0.11 does not import with leptonai 0.47; 0.27.3 does"),
)
"""Pairs that are known not to work: package, version, package, version, why."""

SHOWN = ("torch", "nemo_toolkit", "megatron-core", "transformer-engine", "nemo_run", "lightning")


def main(recipe: Path) -> None:
    """Run the recipe file as this rank. Ends the process."""
    os.environ.update(names(os.environ))
    from superpod.launchers.runtime.capture import capture_output

    link = Path(os.environ["SUPERPOD_RUN_DIR"]) / "links" / os.environ["SUPERPOD_LINK"]
    capture_output(link)
    shield_children()
    if os.environ["RANK"] == "0":
        _announce(link)
    if os.environ.get("SUPERPOD_REHEARSE"):
        from superpod.launchers import rehearsal

        rehearsal.install()  # before NeMo is imported
    partial = load(recipe).recipe()
    if os.environ.get("SUPERPOD_REHEARSE"):
        partial = rehearsed(partial)
    attach(partial, Path(os.environ["SUPERPOD_RUN_DIR"]), link)

    import fiddle as fdl

    fdl.build(partial)()
    _leave()


def names(slurm: Mapping[str, str]) -> dict[str, str]:
    """PyTorch's variables from Slurm's.

    TORCHELASTIC_RUN_ID makes Lightning read them; its own Slurm plug-in would requeue the job by itself on a signal.
    """
    return {
        "RANK": slurm["SLURM_PROCID"],
        "LOCAL_RANK": slurm["SLURM_LOCALID"],
        "GROUP_RANK": slurm["SLURM_NODEID"],
        "WORLD_SIZE": slurm["SLURM_NTASKS"],
        "LOCAL_WORLD_SIZE": str(int(slurm["SLURM_NTASKS"]) // int(slurm["SLURM_NNODES"])),
        "TORCHELASTIC_RUN_ID": slurm["SLURM_JOB_ID"],
        "SLURM_JOB_NAME": "interactive",  # the one name under which Lightning does not look for Slurm
    }


def bad_pair(version: Mapping[str, str]) -> str:
    """Why these installed versions cannot work together; '' when nothing is known against them."""
    for one, this, other, that, why in KNOWN_BAD:
        if version.get(one, "").startswith(this) and version.get(other, "").startswith(that):
            return f"{one} {version[one]} with {other} {version[other]}: {why}"
    return ""


def installed() -> dict[str, str]:
    """Versions of what matters, as far as it is installed."""
    found = {}
    for name in {*SHOWN, *(pair[2] for pair in KNOWN_BAD)}:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _announce(link: Path) -> None:
    from superpod.launchers.rundir import Link

    found = installed()
    print("versions: " + ", ".join(f"{name} {found.get(name, 'missing')}" for name in SHOWN), flush=True)
    if why := bad_pair(found):
        sys.exit(f"refused: {why}")
    Link(link).write_env(os.environ)


def shield_children() -> None:
    """Let signals of Slurm, which reach every process of the job, pass by data workers and checkpoint writers.

    They inherit a blocked SIGUSR1 and SIGTERM; the rank alone saves and ends them.
    """
    ours = (signal.SIGUSR1, signal.SIGTERM)
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # until the training can save
    os.register_at_fork(after_in_child=lambda: signal.pthread_sigmask(signal.SIG_BLOCK, ours) and None)
    from multiprocessing import popen_spawn_posix, resource_tracker

    launch = popen_spawn_posix.Popen._launch  # pyright: ignore[reportAttributeAccessIssue]

    def shielded(self: Any, process: Any) -> None:
        resource_tracker.ensure_running()  # starting it would unblock SIGTERM again
        before = signal.pthread_sigmask(signal.SIG_BLOCK, ours)
        try:
            launch(self, process)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    popen_spawn_posix.Popen._launch = shielded  # pyright: ignore[reportAttributeAccessIssue]


def load(path: Path) -> ModuleType:
    """The exported recipe as a module: it has `recipe()`, which returns the `run.Partial`."""
    spec = importlib.util.spec_from_file_location("exported_recipe", path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is no Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules["exported_recipe"] = module
    spec.loader.exec_module(module)
    return module


def rehearsed(partial: Any) -> Any:
    """The same recipe for CPUs, where a testbed's GPUs are only declared; needs this project beside NeMo."""
    from superpod.launchers import rehearsal

    nodes, devices = partial.trainer.num_nodes, partial.trainer.devices
    partial, changes = rehearsal.rehearse(partial, devices=nodes * devices)
    partial.trainer.num_nodes, partial.trainer.devices = nodes, devices
    if os.environ["RANK"] == "0":
        print("".join(f"{c.path or 'recipe'}: {c.old} -> {c.new}  ({c.reason})\n" for c in changes), flush=True)
    return partial


def attach(partial: Any, run: Path, link: Path) -> None:
    """Have the recipe write into its run folder: checkpoints shared by all links, logs of its own, metrics."""
    import nemo_run

    from superpod.launchers.runtime import RunCallback, rank_monitor

    partial.log.explicit_log_dir = str(link / "nemo")
    partial.log.ckpt.dirpath = str(run / "checkpoints")
    partial.resume.resume_from_directory = str(run / "checkpoints")
    callbacks = partial.trainer.callbacks or []
    monitored = rank_monitor.prepare(callbacks, run)
    ours = nemo_run.Config(RunCallback, run_dir=str(run), link=link.name, monitored=monitored)
    partial.trainer.callbacks = [*callbacks, ours]


def _leave() -> None:
    """End, and with it the helpers that ignore a polite signal."""
    for child in multiprocessing.active_children():
        child.kill()
    sys.stdout.flush()
    sys.stderr.flush()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
