"""`recipes fit`: which models these GPUs can train, and how fast."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from superpod.cli import spellings, tables
from superpod.cli.options.plan_options import PlanOptions
from superpod.cli.options.request_options import AsJson
from superpod.errors import UserError, did_you_mean

if TYPE_CHECKING:
    from superpod.planner.fitting import Fit
    from superpod.planner.models import ModelShape

TASKS = ("pretrain", "sft", "lora")
Task = Literal["pretrain", "sft", "lora"]
MANY = 8
"""GPUs where `--gpus` does not say how many: those of a DGX node."""


def fit(
    words: Annotated[
        list[str] | None, typer.Argument(help="Only models whose names contain all of these.", callback=spellings.words)
    ] = None,
    gpu: Annotated[str | None, typer.Option("--gpu", help="Such as h100; default: this machine's.")] = None,
    gpus: Annotated[int | None, typer.Option("--gpus", help="Their number; default: this machine's.")] = None,
    task: Annotated[Task | None, typer.Option("--task", help="Only this task.")] = None,
    seq: Annotated[int, typer.Option("--seq", help="Sequence length, tokens.")] = 4096,
    gbs: Annotated[int, typer.Option("--gbs", help="Global batch, samples.")] = 128,
    precision: Annotated[str, typer.Option("--precision", help="bf16, fp8cs, mxfp8, ...")] = "bf16",
    as_json: AsJson = False,
) -> None:
    """Show which models these GPUs can train, for each task: the best layout's tokens/s/GPU, or what is missing."""
    from superpod.planner import fitting, models

    kind, count = (gpu, MANY if gpus is None else gpus) if gpu else _of_this_machine(gpus)
    wanted = words or []
    known = {name: name for name in models.names()} | models.aliases()
    names = dict.fromkeys(model for name, model in known.items() if all(word.lower() in name for word in wanted))
    if not names:
        hint = did_you_mean(wanted[0], list(known)) or "`recipes fit` alone shows all"
        raise UserError(f"no model's name contains {' and '.join(wanted)}", hint)
    rows: list[tuple[ModelShape, dict[str, Fit]]] = []
    for name in names:
        options = PlanOptions(name, gpu=kind, gpus=count, seq=seq, gbs=gbs, precision=precision)
        jobs = {one: options.job_of_model(task=one) for one in ([task] if task else TASKS)}
        rows.append((next(iter(jobs.values())).model, {one: fitting.of(job) for one, job in jobs.items()}))
    rows.sort(key=lambda row: -row[0].total_parameters())
    if as_json:
        print(json.dumps([{"model": m.name, "gpu": kind, "gpus": count} | _facts(fits) for m, fits in rows], indent=1))
        return
    tables.say(f"{count:,} x {kind}, seq {seq:,}, gbs {gbs:,}, {precision}: tokens/s/GPU of the best layout")
    tables.show_folded(
        ["model", "parameters", *rows[0][1]],
        [[m.name, tables.amount(m.total_parameters()), *map(_cell, fits.values())] for m, fits in rows],
    )
    tables.say("`recipes plan MODEL` with the same options shows the layouts; batch and sequence are the same for all")


def _facts(fits: dict[str, Fit]) -> dict[str, object]:
    return {task: asdict(fit) for task, fit in fits.items()}


def _cell(fit: Fit) -> str:
    if fit.layout is not None:
        return f"{fit.tokens_per_s_per_gpu:,.0f}" + ", tight" * fit.tight
    return "-" if fit.refused else f"{fit.short_gib:,.0f} GiB short"


def _of_this_machine(gpus: int | None) -> tuple[str, int]:
    """Kind and number of this machine's GPUs, as nvidia-smi lists them.

    Raises:
        UserError: there is none, or the planner has no figures for it.
    """
    from superpod.launch import doctor
    from superpod.slurm.profiles.profile_values import match_gpu

    listed = doctor.list_gpus()
    if not listed:
        raise UserError("this machine has no NVIDIA GPU", "--gpu h100 --gpus 8, for example")
    kind = match_gpu(listed[0].name)
    if not kind:
        raise UserError(
            f"the planner has no figures for {listed[0].name}", "--hardware of `recipes plan` takes your own GPU"
        )
    return kind, gpus or len(listed)
