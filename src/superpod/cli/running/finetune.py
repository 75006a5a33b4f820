"""`recipes finetune`: a Hugging Face folder and a file of samples in, a Hugging Face folder out."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from superpod.cli import spellings
from superpod.cli.options.request_options import Build, Nodes, Runs
from superpod.cli.options.sample_options import TuningOptions
from superpod.cli.options.shared_options import spread
from superpod.cli.options.wandb_option import Wandb, with_wandb
from superpod.errors import UserError


@spread(TuningOptions, "samples")
def finetune(
    name: Annotated[
        str,
        typer.Argument(help="A recipe of sft, lora or dora, from `recipes list`.", callback=spellings.model_or_recipe),
    ],
    overrides: Annotated[list[str] | None, typer.Argument(help="Changes, such as optim.config.lr=1e-4.")] = None,
    *,
    model: Annotated[str | None, typer.Option(help="Hugging Face folder, or ORG/NAME in this machine's cache.")] = None,
    start: Annotated[
        Path | None,
        typer.Option("--from", help="NeMo checkpoint, or run, with the weights to start from.", show_default="--model"),
    ] = None,
    samples: TuningOptions,
    evaluate: Annotated[
        bool, typer.Option("--evaluate/--no-evaluate", help="Measure the written folder with transformers.")
    ] = True,
    wandb: Wandb = "",
    out: Annotated[Path | None, typer.Option(help="Folder to write.", show_default="hf in the run folder")] = None,
    resume: Annotated[str | None, typer.Option(help="Continue this run folder, or the `last` one.")] = None,
    num_nodes: Nodes = None,
    gpus: Annotated[
        int | None, typer.Option("--gpus", help="Number of GPUs; fewer than a node has are planned.")
    ] = None,
    build: Build = True,
    runs: Runs = Path("runs"),
) -> None:
    """Fine-tune a model on this machine: import, training, best checkpoint, export. Without a GPU, a rehearsal."""
    from superpod.cli.options.size_options import SizeOptions, say
    from superpod.cli.running import finetune_session as session
    from superpod.launch import finetune as tuning
    from superpod.launch import finetune_overrides, preflight
    from superpod.requests.request import Request
    from superpod.weights.transfer import huggingface

    if out and resume is None:  # what an export of a run that goes on has left there is the run's own
        huggingface.must_be_new(out, "--out ")
    finetune_overrides.refuse_own(overrides or ())
    changes = tuple(samples.with_steps(with_wandb(overrides, wandb)))
    task = samples.task(model or "")
    if resume is not None and (start or replace(task, steps=None) != tuning.Task("", ())):
        raise UserError("--resume keeps the run's model and data", "leave out the options that set them")
    folder = session.run_to_resume(runs, name, resume, changes, out) if resume is not None else None
    if folder:
        task, request = tuning.Task.from_run(folder), Request.from_run(folder, changes)
    else:
        if not model or not samples.data:
            raise UserError("finetune needs --model and --data", "or --resume RUN")
        Request(name).check()
        task = session.started(replace(task, model=str(tuning.model_folder(model))), name, start)
        request = SizeOptions(num_nodes, gpus).request(name, changes)
    request = replace(request, overrides=tuning.with_both_lengths(request.overrides))
    request.check()
    say(request.notes())
    request = request.decided()
    tuning.check(name, task, request.overrides, request.size(), folder is not None and tuning.is_packed(folder))
    preflight.require_writable(folder.path if folder else runs)
    more_steps = finetune_overrides.read_steps(changes) is not None
    session.go(task, request, folder, out, runs, more_steps=more_steps, evaluate=evaluate, build=build)
