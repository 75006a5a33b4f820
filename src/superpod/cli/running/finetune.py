"""`recipes finetune`: fine-tune a Hugging Face model on samples and export it as a Hugging Face folder."""

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
    from superpod.cli.running import finetune_session as session
    from superpod.launch import finetune as tuning
    from superpod.launch import finetune_overrides, preflight
    from superpod.requests.request import Request
    from superpod.weights.transfer import conversion

    if out and resume is None:  # a resumed run may find the incomplete export of an earlier attempt
        conversion.require_new_output(out, "--out ")
    finetune_overrides.refuse_reserved(overrides or ())
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
    more_steps = finetune_overrides.read_steps(changes) is not None
    session.run_session(task, request, folder, out, runs, more_steps=more_steps, evaluate=evaluate, build=build)
