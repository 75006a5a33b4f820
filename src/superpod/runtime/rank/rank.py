"""Run one rank of a Slurm job: `srun ... python rank.py recipe.py`, one task per GPU.

It sets PyTorch's environment variables, redirects the output to the log, and trains the recipe.
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
    sys.path.insert(1, str(Path(__file__).resolve().parents[3]))  # the folder that contains superpod/


def main(recipe: Path, before: Callable[[], object] = lambda: None, change: Callable[[Any], Any] = lambda p: p) -> None:
    """Train the exported recipe in the file `recipe` as this rank.

    Rehearsals (`rehearsal/rank.py`) pass `before`, which is called before NeMo is imported, and `change`, which returns
    the `run.Partial` to train for that of the recipe.
    """
    os.environ.update(torch_variables(os.environ))
    from superpod.runtime.rank import binding, capture, nsys

    # First, since it replaces the process: the steps below must run only once.
    nsys.exec_under_nsys()
    attempt = Path(os.environ["SUPERPOD_RUN_DIR"]) / "attempts" / os.environ["SUPERPOD_ATTEMPT"]
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # Slurm may not propagate the limit of the script
    # Before NeMo is imported, so that a failing import is in the log.
    capture.capture_output(attempt)
    os.environ.update(capture.flight_recorder(attempt, os.environ))
    shield_children()
    message = binding.bind(os.environ)  # before torch is imported, whose threads inherit the CPUs
    if message:
        print(message, flush=True)
    if os.environ["RANK"] == "0":
        _check_versions(attempt)
    before()
    partial = change(load(recipe).recipe())
    attach(partial, Path(os.environ["SUPERPOD_RUN_DIR"]), attempt)
    if os.environ["RANK"] == "0":
        _require_layout(partial, attempt)

    import fiddle as fdl

    fdl.build(partial)()
    _finish()


def torch_variables(slurm: Mapping[str, str]) -> dict[str, str]:
    """Return torchrun's environment variables for this rank, from Slurm's environment variables.

    TORCHELASTIC_RUN_ID makes Lightning use them instead of its Slurm plug-in, which would requeue the job on a signal.
    """
    return {
        "RANK": slurm["SLURM_PROCID"],
        "LOCAL_RANK": slurm["SLURM_LOCALID"],
        "GROUP_RANK": slurm["SLURM_NODEID"],
        "WORLD_SIZE": slurm["SLURM_NTASKS"],
        "LOCAL_WORLD_SIZE": str(int(slurm["SLURM_NTASKS"]) // int(slurm["SLURM_NNODES"])),
        "TORCHELASTIC_RUN_ID": slurm["SLURM_JOB_ID"],
        "SLURM_JOB_NAME": "interactive",  # the name with which Lightning does not detect Slurm
    }


def _check_versions(attempt: Path) -> None:
    """Print the installed versions, exit if the run does not permit them, and write the attempt's env.json."""
    from superpod.common.json_files import read_json
    from superpod.runtime.runs.run_folder import Attempt
    from superpod.runtime.runs.versions import SHOWN_PACKAGES, installed_versions, refusal, requirements_of

    facts = read_json(attempt.parents[1] / "run.json") or {}
    versions = installed_versions(need.package for need in requirements_of(facts))
    print("versions: " + ", ".join(f"{name} {versions.get(name, 'missing')}" for name in SHOWN_PACKAGES), flush=True)
    reason = refusal(versions, facts, os.environ)
    if reason:
        sys.exit(f"refused: {reason}")
    Attempt(attempt).write_env(os.environ)


def _require_layout(partial: Any, attempt: Path) -> None:
    """Exit if the checkpoint of the attempt cannot be loaded with the layout of the recipe."""
    from superpod.runtime.checkpoints import resume, resume_layout

    for checkpoint in (attempt / resume.FOLDER).glob("*-last"):
        problem = resume_layout.layout_problem(checkpoint.resolve(), partial.trainer.strategy)
        if problem:
            sys.exit(f"refused: {'; '.join(problem)}")


def shield_children() -> None:
    """Block SIGUSR1, SIGUSR2 and SIGTERM in data workers and checkpoint writers.

    Slurm sends these to all processes of the job, but only the rank may handle them: it saves a checkpoint, writes its
    stacks, and kills its children.
    """
    own_signals = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM)
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # until the training can save a checkpoint
    os.register_at_fork(after_in_child=lambda: signal.pthread_sigmask(signal.SIG_BLOCK, own_signals) and None)
    from multiprocessing import popen_spawn_posix, resource_tracker

    launch = popen_spawn_posix.Popen._launch  # pyright: ignore[reportAttributeAccessIssue]

    # For spawned children, block the signals during the launch: exec keeps the mask, but at_fork hooks do not run.
    def launch_shielded(self: popen_spawn_posix.Popen, process: BaseProcess) -> None:
        resource_tracker.ensure_running()  # its start would unblock SIGTERM
        old_mask = signal.pthread_sigmask(signal.SIG_BLOCK, own_signals)
        try:
            launch(self, process)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, old_mask)

    popen_spawn_posix.Popen._launch = launch_shielded  # pyright: ignore[reportAttributeAccessIssue]


def load(path: Path) -> ModuleType:
    """Import the file of an exported recipe; the module's function `recipe()` returns the `run.Partial`.

    Raises ImportError if the file is not a Python file.
    """
    spec = importlib.util.spec_from_file_location("exported_recipe", path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    # Spawned data workers find the functions of the recipe through the name of their module.
    sys.modules["exported_recipe"] = module
    spec.loader.exec_module(module)
    return module


def attach(partial: Any, run: Path, attempt: Path, profile: str = "") -> None:
    """Set the folders in a recipe's `run.Partial`: checkpoints of the run, logs and metrics of the attempt.

    `profile` is the requested profile (requests/profile_request.py); "" = the value in run.json.
    """
    import nemo_run

    from superpod.runtime import RunCallback
    from superpod.runtime.checkpoints import resume
    from superpod.runtime.rank import profiled, rank_monitor, wandb_id

    partial.log.explicit_log_dir = str(attempt / "nemo")
    partial.log.ckpt.dirpath = str(run / "checkpoints")
    if not partial.log.log_global_rank_0_only:
        partial.log.log_local_rank_0_only = True  # one file per node; `logs/` has the output of all ranks
    wandb_id.set_run_id(partial.log, run)
    _set_resume_folder(partial, attempt / resume.FOLDER)
    _protect_indices(partial, run)
    callbacks = partial.trainer.callbacks or []
    callbacks = profiled.select_ranks(callbacks, run, profile)
    is_monitored = rank_monitor.prepare(callbacks, run)
    run_callback = nemo_run.Config(RunCallback, run_dir=str(run), attempt=attempt.name, monitored=is_monitored)
    partial.trainer.callbacks = [*callbacks, run_callback]


def _set_resume_folder(partial: Any, folder: Path) -> None:
    """Make NeMo resume from the checkpoint that is linked in `folder`, or start at step 1 if the folder is empty.

    This uses NeMo's search instead of `resume_from_path`, with which NeMo 2.7.3 would look for the tokenizer elsewhere
    and lose the list of checkpoints to keep (`AutoResume`, `ModelCheckpoint.on_train_start`).
    """
    partial.resume.resume_from_directory = str(folder)
    if any(folder.glob("*-last")):
        partial.resume.resume_from_path = None  # the recipe has the path from which the run started


def _protect_indices(partial: Any, run: Path) -> None:
    """Store Megatron's sample indices in the run folder if other users can write to the index cache of the data.

    Megatron loads them with `allow_pickle`, which can execute code (megatron-core 0.15.3, datasets/gpt_dataset.py).
    """
    from superpod.runtime.runs import owner

    cache = getattr(partial.data, "index_mapping_dir", None)
    if cache and not owner.may_cache(Path(cache)):
        partial.data.index_mapping_dir = str(run / "index_cache")


def _finish() -> None:
    """Kill the children of this rank, which block SIGTERM, and flush the output."""
    for child in multiprocessing.active_children():
        child.kill()
    sys.stdout.flush()
    sys.stderr.flush()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
