"""`plan`, `check` and `predict` agree on layouts drawn at random: illegal, does not fit, tight or fits."""

import csv
import random

import pytest

from superpod.cli import check, plan_options
from superpod.errors import UserError
from superpod.planner import memory, option_syntax, plans
from superpod.planner.layout import Layout
from superpod.planner.tables import csv_rows

MODELS = ("llama3_8b", "llama3_70b", "llama31_405b", "qwen3_30b_a3b", "deepseek_v3", "gemma2_9b", "gpt3_175b")
"""Dense and with experts; 61, 126 and 42 layers, which few pipelines divide."""
GPUS = ("a100", "h100", "h200", "b200")


def draw(rng):
    """One run: its model, GPUs and batch, and the fields of its layout as `--layout` and `--fix` take them."""
    model, gpu = rng.choice(MODELS), rng.choice(GPUS)
    layout = {
        "tp": rng.choice((1, 2, 4, 8, 8, 8, 3)),
        "pp": rng.choice((1, 1, 2, 4, 4, 8, 8, 16, 7)),
        "cp": rng.choice((1, 1, 2, 4)),
        "mbs": rng.choice((1, 1, 2, 4)),
    }
    vp = rng.choice((None, None, None, None, 1, 2, 2, 3, 4, 5, 8))
    layout |= {"vp": vp} if vp else {}
    if model in ("qwen3_30b_a3b", "deepseek_v3"):
        layout["ep"] = rng.choice((1, 2, 8, 16))
    layout["recompute"] = rng.choice(("none", "full"))
    unit = layout["tp"] * layout["pp"] * layout["cp"]
    gpus = max(8, unit) * rng.choice((1, 2, 4, 8)) if rng.random() < 0.9 else rng.choice((8, 64, 512))
    batches = rng.choice((4, 8, 16, 32, 48))
    return {"model": model, "gpu": gpu, "gpus": gpus, "batches": batches, "layout": layout}


def options(run):
    """The run as a command line has it; its global batch is so many micro-batches of every data-parallel rank."""
    layout = run["layout"]
    ranks = max(1, run["gpus"] // (layout["tp"] * layout["pp"] * layout["cp"]))
    text = ",".join(f"{key}={value}" for key, value in layout.items())
    gbs = layout["mbs"] * ranks * run["batches"]
    return plan_options.PlanOptions(run["model"], gpu=run["gpu"], gpus=run["gpus"], seq=4096, gbs=gbs, layout=text)


def by_check(run):
    judgement = check._planned(options(run))
    if judgement.broken:
        return "illegal"
    return "tight" if judgement.tight else judgement.verdict


def by_plan(run):
    """The outcome of the layout that `check` judges among those that a search with these fields fixed costs."""
    asked = options(run)
    fixed = option_syntax.fixed(asked.layout) | {"sp": run["layout"]["tp"] > 1, "sharding": "zero1"}
    fixed["etp"] = fixed["tp"]
    try:
        (result,) = plans.search(asked.job(layout=None), fixed=fixed).values()
    except UserError:
        return "illegal"
    wanted = asked.job().layout.replace(etp=None)
    found = [i for i in range(len(result)) if result.layout(i) == wanted]
    if not found:
        return "illegal"
    return ("ok", "tight", "oom")[int(result.fit[found[0]])]


def by_predict(runs, folder):
    columns = ("model", "gpu", "gpus", "seq", "tp", "pp", "vp", "cp", "ep", "mbs", "num_microbatches", "recompute")
    with (folder / "rows.csv").open("w", newline="") as file:
        table = csv.DictWriter(file, columns, restval="")
        table.writeheader()
        for run in runs:
            row = {key: run[key] for key in ("model", "gpu", "gpus")} | run["layout"]
            table.writerow(row | {"seq": 4096, "num_microbatches": run["batches"]})
    csv_rows.predict(folder / "rows.csv", folder / "out.csv", csv_rows.Form(None, False), lambda _: None)
    with (folder / "out.csv").open(newline="") as file:
        return ["tight" if row["fit"] == "tight" else row["verdict"] for row in csv.DictReader(file)]


def differences(count, seed, folder):
    rng = random.Random(seed)
    runs = [draw(rng) for _ in range(count)]
    predicted = by_predict(runs, folder)
    outcomes = [(by_check(run), by_plan(run), one) for run, one in zip(runs, predicted, strict=True)]
    assert {"illegal", "oom", "ok"} <= {one for one, _, _ in outcomes}
    return [(run, outcome) for run, outcome in zip(runs, outcomes, strict=True) if len({*outcome}) > 1]


def test_random_layouts_have_one_outcome(tmp_path):
    assert differences(80, 1, tmp_path) == []


@pytest.mark.slow
def test_two_thousand_random_layouts_have_one_outcome(tmp_path):
    assert differences(2000, 2, tmp_path) == []


def of(model, gpus, gbs, layout):
    return plan_options.PlanOptions(model, gpu="h100", gpus=gpus, gbs=gbs, layout=layout)


def test_one_chunk_on_each_rank_is_no_interleaving():
    assert option_syntax.layout(Layout(), "pp=4,vp=1") == Layout(pp=4)
    assert check._planned(of("llama3_70b", 64, 64, "tp=2,pp=4,vp=1,recompute=full")).passed


def test_what_plan_calls_tight_check_calls_tight():
    layout = "tp=8,pp=8,vp=8,cp=2,embedding_as_layer,loss_as_layer"
    judgement = check._planned(of("llama31_405b", 1024, 512, layout))
    assert (judgement.verdict, judgement.tight) == ("ok", True)
    assert judgement.reserved_gib
    assert judgement.usable_gib
    assert judgement.allocated_gib
    assert judgement.reserved_gib > judgement.usable_gib > judgement.allocated_gib
    (result,) = plans.search(of("llama31_405b", 1024, 512, layout).job(), fixed=option_syntax.fixed(layout)).values()
    (same,) = [i for i in range(len(result)) if result.layout(i) == of("llama31_405b", 1024, 512, layout).job().layout]
    assert result.fit[same] == memory.TIGHT


def test_layers_that_divide_over_ranks_and_not_over_their_chunks_are_refused_everywhere(tmp_path):
    run = {"model": "llama3_70b", "gpu": "h100", "gpus": 64, "batches": 6}
    run["layout"] = {"tp": 2, "pp": 2, "vp": 3, "cp": 1, "mbs": 1, "recompute": "full"}
    assert (by_check(run), by_plan(run), *by_predict([run], tmp_path)) == ("illegal",) * 3
