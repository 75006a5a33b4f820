"""The verbs of `recipes`. Each parses, calls and prints; what it calls imports NeMo only if it must."""

from __future__ import annotations

import typer

from superpod.cli import (
    budget,
    ckpt,
    clusters,
    copying,
    data,
    doctor,
    finetune,
    generate,
    judge,
    plan,
    prove,
    rehearse,
    run,
    show,
    slurm,
    tuning,
    watching,
)

app = typer.Typer(
    help="NeMo 2.0 / Megatron-Core training recipes: read, rehearse and run them.",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
)
app.command("list")(show.list_)
app.command("show")(show.show)
app.command("export")(copying.export)
app.command("diff")(copying.diff)
app.command("tune")(tuning.tune)
app.command("prove")(prove.prove)
app.command("plan")(plan.plan)
app.command("check")(judge.check)
app.command("memory")(judge.memory)
app.command("explain")(judge.explain)
app.command("scale")(budget.scale)
app.command("cost")(budget.cost)
app.command("predict")(judge.predict)
app.command("run", context_settings={"ignore_unknown_options": False})(run.run)
app.command("finetune", context_settings={"ignore_unknown_options": False})(finetune.finetune)
app.command("generate")(generate.generate)
app.command("perplexity")(generate.perplexity)
app.command("rehearse")(rehearse.rehearse)
app.command("render")(slurm.render)
app.command("submit")(slurm.submit)
app.command("status")(watching.status)
app.command("logs")(watching.logs)
app.command("cancel")(watching.cancel)
app.command("history")(watching.history)
app.add_typer(clusters.app, name="cluster", help="A cluster's profile and its health.")
app.command("report")(run.report)
app.command("doctor")(doctor.doctor)
app.add_typer(ckpt.app, name="ckpt", help="Checkpoints: list, verify, prune, convert.")
app.add_typer(data.app, name="data", help="Make training data: tokenizer, .bin and .idx files, blends.")
