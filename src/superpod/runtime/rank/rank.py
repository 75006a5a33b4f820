"""One rank of a Slurm job: `srun ... python rank.py recipe.py`, one task per GPU.

Gives the process the names that PyTorch expects, its own log, and its run folder, then runs the recipe.
"""

from __future__ import annotations

import importlib.util
import multiprocessing
import os
import resource
import signal
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from multiprocessing.process import BaseProcess

if __name__ == "__main__":
    sys.path.insert(1, str(Path(__file__).resolve().parents[3]))  # the folder that holds superpod/


def main(recipe: Path, before: Callable[[], object] = lambda: None, change: Callable[[Any], Any] = lambda p: p) -> None:
    """Run the recipe file as this rank. Ends the process.

    `before` is called before anything imports NeMo, `change` with the recipe before it runs; a rehearsal
    (`rehearsal/rank.py`) uses both.
    """
    os.environ.update(names(os.environ))
    from superpod.runtime.rank import binding, capture, nsys

    nsys.take_over()
    attempt = Path(os.environ["SUPERPOD_RUN_DIR"]) / "attempts" / os.environ["SUPERPOD_ATTEMPT"]
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # where Slurm does not pass on the script's own limit
    capture.capture_output(attempt)
    os.environ.update(capture.flight_recorder(attempt, os.environ))
    shield_children()
    if place := binding.bind(os.environ):  # before torch is imported: its threads inherit the CPUs
        print(place, flush=True)
    if os.environ["RANK"] == "0":
        _announce(attempt)
    before()
    partial = change(load(recipe).recipe())
    attach(partial, Path(os.environ["SUPERPOD_RUN_DIR"]), attempt)
    if os.environ["RANK"] == "0":
        _require_layout(partial, attempt)

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


def _announce(attempt: Path) -> None:
    from superpod.common.files import read_json
    from superpod.runtime.runs.run_folder import Attempt
    from superpod.runtime.runs.versions import SHOWN, installed, needed, refusal

    facts = read_json(attempt.parents[1] / "run.json") or {}
    versions = installed(need.package for need in needed(facts))
    print("versions: " + ", ".join(f"{name} {versions.get(name, 'missing')}" for name in SHOWN), flush=True)
    if reason := refusal(versions, facts, os.environ):
        sys.exit(f"refused: {reason}")
    Attempt(attempt).write_env(os.environ)


def _require_layout(partial: Any, attempt: Path) -> None:
    """End the job where the checkpoint cannot be loaded under the recipe's layout, before it joins the others."""
    from superpod.runtime.checkpoints import resume, resume_layout

    for checkpoint in (attempt / resume.FOLDER).glob("*-last"):
        if problem := resume_layout.layout_problem(checkpoint.resolve(), partial.trainer.strategy):
            sys.exit(f"refused: {'; '.join(problem)}")


def shield_children() -> None:
    """Keep Slurm's signals, which reach every process of the job, from data workers and checkpoint writers.

    These inherit a blocked SIGUSR1, SIGUSR2 and SIGTERM; the rank alone saves, shows its stacks, and ends them.
    """
    ours = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM)
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # until the training can save
    os.register_at_fork(after_in_child=lambda: signal.pthread_sigmask(signal.SIG_BLOCK, ours) and None)
    from multiprocessing import popen_spawn_posix, resource_tracker

    launch = popen_spawn_posix.Popen._launch  # pyright: ignore[reportAttributeAccessIssue]

    # Blocked around the start of a spawned child too: exec keeps the mask, and at_fork hooks do not run there.
    def shielded(self: popen_spawn_posix.Popen, process: BaseProcess) -> None:
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


def attach(partial: Any, run: Path, attempt: Path, profile: str = "") -> None:
    """Make the recipe write into its run folder: checkpoints shared by all attempts, logs and metrics of this one.

    `profile` is what is to be profiled, where run.json does not say it yet.
    """
    import nemo_run

    from superpod.runtime import RunCallback
    from superpod.runtime.checkpoints import resume
    from superpod.runtime.rank import profiled, rank_monitor, wandb_id

    partial.log.explicit_log_dir = str(attempt / "nemo")
    partial.log.ckpt.dirpath = str(run / "checkpoints")
    if not partial.log.log_global_rank_0_only:
        partial.log.log_local_rank_0_only = True  # a file per node, not per rank; `logs/` has what every rank prints
    wandb_id.keep(partial.log, run)
    _resume(partial, attempt / resume.FOLDER)
    _keep_indices(partial, run)
    callbacks = partial.trainer.callbacks or []
    callbacks = profiled.keep(callbacks, run, profile)
    monitored = rank_monitor.prepare(callbacks, run)
    ours = nemo_run.Config(RunCallback, run_dir=str(run), attempt=attempt.name, monitored=monitored)
    partial.trainer.callbacks = [*callbacks, ours]


def _resume(partial: Any, folder: Path) -> None:
    """Have NeMo resume from the one checkpoint that is linked in `folder`; from none where it is empty.

    NeMo's own search in there, and not `resume_from_path`: with that one it looks elsewhere for the tokenizer, and does
    not take up the list of checkpoints that it keeps (`AutoResume`, `ModelCheckpoint.on_train_start`, 2.7.3).
    """
    partial.resume.resume_from_directory = str(folder)
    if any(folder.glob("*-last")):
        partial.resume.resume_from_path = None  # a path in the recipe is where the run began, not where it is


def _keep_indices(partial: Any, run: Path) -> None:
    """Keep Megatron's sample indices in the run where other users may write to those of the data.

    It loads them with `allow_pickle`, which executes what a file says (megatron-core 0.15.3 datasets/gpt_dataset.py).
    """
    from superpod.runtime.runs import owner

    cache = getattr(partial.data, "index_mapping_dir", None)
    if cache and not owner.may_cache(Path(cache)):
        partial.data.index_mapping_dir = str(run / "index_cache")


def _leave() -> None:
    """Flush the output, and kill the children, which block SIGTERM."""
    for child in multiprocessing.active_children():
        child.kill()
    sys.stdout.flush()
    sys.stderr.flush()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
