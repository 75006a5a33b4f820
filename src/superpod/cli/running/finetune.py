"""`recipes finetune`: fine-tune a Hugging Face model, and export the result as a Hugging Face folder."""

from __future__ import annotations

import contextlib
import shlex
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from superpod.cli import RunNotDone, spellings
from superpod.cli.options.request_options import Build, Resume, Runs
from superpod.cli.options.sample_options import TuningOptions
from superpod.cli.options.shared_options import spread
from superpod.cli.options.size_options import Gpus, Nodes, SizeOptions, print_notes
from superpod.cli.options.wandb_option import Wandb, with_wandb
from superpod.cli.runs.report import print_report
from superpod.errors import UserError

if TYPE_CHECKING:
    from superpod.launch.finetuning.session import Outcome


@spread(TuningOptions, "samples")
def finetune(
    name: Annotated[
        str,
        typer.Argument(help="SFT, LoRA or DoRA recipe, from `recipes list`.", callback=spellings.normalize_name),
    ],
    overrides: Annotated[list[str] | None, typer.Argument(help="Overrides, such as optim.config.lr=1e-4.")] = None,
    *,
    model: Annotated[str | None, typer.Option(help="Hugging Face folder, or ORG/NAME in the local cache.")] = None,
    start: Annotated[
        Path | None,
        typer.Option("--from", help="NeMo checkpoint or run folder with the initial weights.", show_default="--model"),
    ] = None,
    samples: TuningOptions,
    evaluate: Annotated[bool, typer.Option("--evaluate/--no-evaluate", help="Evaluate the exported model.")] = True,
    wandb: Wandb = "",
    out: Annotated[Path | None, typer.Option(help="Folder of the export.", show_default="hf in the run folder")] = None,
    resume: Resume = None,
    num_nodes: Nodes = None,
    gpus: Gpus = None,
    build: Build = True,
    runs: Runs = Path("runs"),
) -> None:
    """Import a model, fine-tune it on this machine, and export the best checkpoint.

    On a machine without GPUs, this is a rehearsal: a smaller model is trained on CPUs.
    """
    from superpod.launch import preflight
    from superpod.launch.finetuning import finetune as tuning
    from superpod.launch.finetuning import session, tuning_overrides
    from superpod.requests.request import Request
    from superpod.weights.transfer import conversion

    if out and resume is None:  # a resumed run may find the incomplete export of an earlier attempt
        conversion.require_new_output(out, "--out ")
    tuning_overrides.refuse_reserved(overrides or ())
    changes = tuple(samples.with_steps(with_wandb(overrides, wandb)))
    task = samples.task(model or "")
    folder = None
    if resume is not None:
        if start or replace(task, steps=None) != tuning.Task("", ()):
            raise UserError("--resume keeps the model and the data of the run", "leave out the options that set them")
        folder = session.run_to_resume(runs, name, resume, changes, out)
        task, request = tuning.Task.from_run(folder), Request.from_run(folder, changes)
    else:
        if not model or not samples.data:
            raise UserError("finetune needs --model and --data, or --resume", "see `recipes finetune --help`")
        Request(name).check()
        task = session.with_start(replace(task, model=str(tuning.model_folder(model))), name, start)
        request = SizeOptions(num_nodes, gpus).request(name, changes)
    request = replace(request, overrides=tuning.sync_seq_lengths(request.overrides))
    request.check()
    print_notes(request.notes())
    request = request.with_resolved_size()
    tuning.check(name, task, request.overrides, request.size(), folder is not None and tuning.is_packed(folder))
    preflight.require_writable(folder.path if folder else runs)
    more_steps = tuning_overrides.read_steps(changes) is not None
    _finish(session.run_session(task, request, folder, out, runs, more_steps, evaluate, build))


def _finish(outcome: Outcome) -> None:
    """Print the report of a run. Raises RunNotDone if it is not done, or its exported model is wrong."""
    run, stopped = outcome.run, outcome.stopped
    with contextlib.suppress(BrokenPipeError):  # keep the exit code of the training
        print_report(run)
        if outcome.export_error:
            print(f"WRONG: {outcome.export_error}", file=sys.stderr)
        elif stopped:
            print(f"to resume: recipes finetune {run.recipe} --resume {shlex.quote(str(run.path))}")
    if outcome.export_error:
        raise RunNotDone(1)
    if stopped:
        raise RunNotDone(stopped.exit_code)
