"""`recipes fit`: show which models a set of GPUs can train, and how fast."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from superpod.cli import spellings, tables
from superpod.cli.options.plan_options import TASKS, PlanOptions
from superpod.cli.options.request_options import AsJson
from superpod.errors import UserError, did_you_mean

if TYPE_CHECKING:
    from superpod.planner.fastest_fit import Fit
    from superpod.planner.models import ModelShape

Task = Literal["pretrain", "sft", "lora"]
DEFAULT_GPUS = 8
"""Number of GPUs if only `--gpu` is given: one DGX node."""


def fit(
    words: Annotated[
        list[str] | None,
        typer.Argument(help="Show only models whose names contain all WORDS.", callback=spellings.normalize_words),
    ] = None,
    gpu: Annotated[str | None, typer.Option("--gpu", help="GPU type, such as h100. Default: this machine's.")] = None,
    gpus: Annotated[int | None, typer.Option("--gpus", help="Number of GPUs. Default: those of this machine.")] = None,
    task: Annotated[Task | None, typer.Option("--task", help="Show only this training task.")] = None,
    seq: Annotated[int, typer.Option("--seq", help="Sequence length in tokens.")] = 4096,
    gbs: Annotated[int, typer.Option("--gbs", help="Global batch size in samples.")] = 128,
    precision: Annotated[
        str, typer.Option("--precision", help="Training precision: bf16, fp8cs, mxfp8, ..., or auto to try all.")
    ] = "bf16",
    as_json: AsJson = False,
) -> None:
    """Show which models a set of GPUs can train: tokens/s/GPU of the best layout per task, or the missing memory."""
    from superpod.planner import fastest_fit, models

    if gpu:
        count = DEFAULT_GPUS if gpus is None else gpus
    else:
        gpu, count = detect_gpus(gpus)
    search_words = words or []
    known_names = {name: name for name in models.names()} | models.aliases()
    names = dict.fromkeys(
        model for name, model in known_names.items() if all(word.lower() in name for word in search_words)
    )
    if not names:
        hint = did_you_mean(search_words[0], list(known_names)) or "`recipes fit` without arguments shows all models"
        raise UserError(f"no model name contains {' and '.join(search_words)}", hint)
    is_auto = precision == "auto"
    rows: list[tuple[ModelShape, dict[str, Fit]]] = []
    for name in names:
        options = PlanOptions(name, gpu=gpu, gpus=count, seq=seq, gbs=gbs, precision=None if is_auto else precision)
        jobs = {one: options.model_job(task=one) for one in ([task] if task else TASKS)}
        fits = {one: fastest_fit.find_fit(job, auto=is_auto) for one, job in jobs.items()}
        rows.append((next(iter(jobs.values())).model, fits))
    rows.sort(key=lambda row: -row[0].total_parameters())
    if as_json:
        tables.print_json(
            [
                {"model": model.name, "gpu": gpu, "gpus": count} | {one: asdict(fit) for one, fit in fits.items()}
                for model, fits in rows
            ]
        )
        return
    tables.print_wrapped(f"{count:,} x {gpu}, seq {seq:,}, gbs {gbs:,}, {precision}: tokens/s/GPU of the best layout")
    tables.print_folded_table(
        ["model", "parameters", *rows[0][1]],
        [
            [m.name, tables.format_count(m.total_parameters()), *(_cell(f, is_auto) for f in fits.values())]
            for m, fits in rows
        ],
    )
    tables.print_wrapped("the batch size and sequence length are the same; `recipes plan MODEL` shows the layouts")


def _cell(fit: Fit, with_precision: bool) -> str:
    """Return tokens/s/GPU, the missing memory, or "-" if no layout is legal."""
    if fit.layout is None:
        return "-" if fit.refused else f"{fit.short_gib:,.0f} GiB short"
    rate = f"{fit.tokens_per_s_per_gpu:,.0f}"
    if with_precision:
        rate += f" {fit.precision}"
    return f"{rate}, tight" if fit.tight else rate


def detect_gpus(gpus: int | None = None, hint: str = "add --gpu h100 --gpus 8, for example") -> tuple[str, int]:
    """Return the type and the number of GPUs of this machine, according to nvidia-smi.

    Args:
        gpus: number of GPUs to return instead; None = all GPUs of this machine.
        hint: next step in the error message if there is no GPU.

    Raises:
        UserError: the machine has no GPU, or the planner has no data for it.
    """
    from superpod.launch import doctor
    from superpod.planner.hardware import match_gpu

    local_gpus = doctor.list_gpus()
    if not local_gpus:
        raise UserError("this machine has no NVIDIA GPU", hint)
    gpu = match_gpu(local_gpus[0].name)
    if not gpu:
        raise UserError(
            f"the planner has no data for {local_gpus[0].name}",
            "describe the GPU in a TOML file for `recipes plan --hardware`",
        )
    return gpu, gpus or len(local_gpus)
