"""`recipes finetune`: fine-tune a Hugging Face model on samples and export it as a Hugging Face folder."""

from __future__ import annotations

import contextlib
import shlex
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from superpod.cli import NotDone, spellings
from superpod.cli.options.request_options import Build, Nodes, Runs
from superpod.cli.options.sample_options import TuningOptions
from superpod.cli.options.shared_options import spread
from superpod.cli.options.wandb_option import Wandb, with_wandb
from superpod.errors import UserError

if TYPE_CHECKING:
    from superpod.launch.finetuning.session import Outcome


@spread(TuningOptions, "samples")
def finetune(
    name: Annotated[
        str,
        typer.Argument(help="SFT, LoRA or DoRA recipe, from `recipes list`.", callback=spellings.normalize_name),
    ],
    overrides: Annotated[
        list[str] | None, typer.Argument(help="Changes to the recipe, such as optim.config.lr=1e-4.")
    ] = None,
    *,
    model: Annotated[
        str | None, typer.Option(help="Hugging Face folder, or ORG/NAME in this machine's Hugging Face cache.")
    ] = None,
    start: Annotated[
        Path | None,
        typer.Option("--from", help="NeMo checkpoint or run with the initial weights.", show_default="--model"),
    ] = None,
    samples: TuningOptions,
    evaluate: Annotated[
        bool, typer.Option("--evaluate/--no-evaluate", help="Evaluate the exported model with transformers.")
    ] = True,
    wandb: Wandb = "",
    out: Annotated[
        Path | None, typer.Option(help="Folder for the exported model.", show_default="hf in the run folder")
    ] = None,
    resume: Annotated[str | None, typer.Option(help="Run folder to resume, or `last`.")] = None,
    num_nodes: Nodes = None,
    gpus: Annotated[
        int | None, typer.Option("--gpus", help="Number of GPUs; for part of a node, the layout is planned.")
    ] = None,
    build: Build = True,
    runs: Runs = Path("runs"),
) -> None:
    """Fine-tune a model on this machine: import it, train, and export the best checkpoint.

    On a machine without GPUs, this is a rehearsal: a shrunk model is trained on CPUs.
    """
    from superpod.cli.options.size_options import SizeOptions, print_notes
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
            raise UserError("--resume keeps the model and data of the run", "leave out the options that set them")
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
    """Print the report of a run, and raise NotDone if it is not done or its exported model is wrong."""
    from superpod.cli.runs.report import print_report

    run, stopped = outcome.run, outcome.stopped
    with contextlib.suppress(BrokenPipeError):  # keep the exit code of the training
        print_report(run)
        if outcome.export_error:
            print(f"WRONG: {outcome.export_error}", file=sys.stderr)
        elif stopped:
            print(f"to continue: recipes finetune {run.recipe} --resume {shlex.quote(str(run.path))}")
    if outcome.export_error:
        raise NotDone(1)
    if stopped:
        raise NotDone(stopped.exit_code)
