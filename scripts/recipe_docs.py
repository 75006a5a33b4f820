"""Write the tables of docs/recipes.md: models, counterparts of NeMo's recipes, and published runs."""

from __future__ import annotations

import re
import tomllib
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from superpod.collection import registry
from superpod.collection.facts import proof_level
from superpod.collection.recipe_job import job
from superpod.collection.registry import Model, Recipe
from superpod.planner import predict
from superpod.planner.formats import option_syntax
from superpod.planner.layout import Layout

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "recipes.md"
NEMO_PAGE = ROOT / "docs" / "nemo_recipes.md"
"""Page with a row for every recipe of NeMo."""

OTHER_NAMES = {
    "llama4_e16": "llama4_scout",
    "llama4_e128": "llama4_maverick",
    "phi3_mini_4k_instruct": "phi3_mini",
}
"""NeMo's name -> our name, if they differ."""
NOT_OURS = {"hyena_base": "what NeMo's three Hyena recipes are made from; it names no size of its own"}
"""Recipes of NeMo without a counterpart -> the reason."""


def counterpart(name: str) -> str:
    """Return our name for a recipe file of NeMo, such as `llama4_scout` for `llama4_e16`; "" = no counterpart."""
    model, _, context = name.rpartition("_")
    if name in OTHER_NAMES or name in registry.models():
        return OTHER_NAMES.get(name, name)
    return name if context in ("16k", "64k", "128k") and model in registry.models() else ""


def coverage(nemo_recipes: Iterable[str]) -> dict[str, str]:
    """Return NeMo's recipe, such as `llama3_8b/pretrain` -> our recipe in BF16 on H100, or "" if there is none."""
    ours = {}
    for name in nemo_recipes:
        file, _, task = name.partition("/")
        candidate = f"{counterpart(file)}_{'pretrain' if task == 'pretrain' else 'sft'}_h100_bf16"
        ours[name] = candidate if candidate in registry.recipes() else ""
    return ours


def judged_recipes() -> list[str]:
    """Return the recipes of NeMo that have a row in docs/nemo_recipes.md."""
    return re.findall(r"^\| (\w+/\w+) \|", NEMO_PAGE.read_text(), re.MULTILINE)


def nemo_names() -> str:
    """Return a list of NeMo's recipes that have a different name here, or no counterpart, as Markdown."""
    ours = coverage(judged_recipes())
    covered = sum(1 for name in ours.values() if name)
    lines = [f"{covered} of the {len(ours)} recipes that NeMo ships have one here, by the same name except:", ""]
    lines += [f"- `{theirs}` is `{name}`" for theirs, name in OTHER_NAMES.items()]
    lines += [f"- `{theirs}` has none: {why}" for theirs, why in NOT_OURS.items()]
    return "\n".join(lines) + "\n"


def counts() -> str:
    """Return a sentence with the number of recipes and sizes."""
    every = registry.recipes().values()
    return f"{len(every):,} recipes at {sum(len(recipe.nodes) for recipe in every):,} sizes.\n"


def model_rows() -> str:
    """Return a table with a row per model: its first recipe on H100 in BF16, at its smallest size."""
    lines = [
        "| model | | recipes | the first on H100s, in BF16 | nodes | layout | MBS / GBS | step, s | GiB | MFU, % |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for model in _models():
        recipes = _model_recipes(model)
        shown = next(recipe for recipe in recipes if recipe.gpu == "h100" and recipe.precision == "bf16")
        layout, plan = shown.layout(), predict.one(job(shown))
        figures = f"{plan.step_time_s:.2f} | {plan.reserved_gib_max:.0f} | {100 * (plan.mfu or 0):.0f}"
        batch = f"{layout.mbs} / {layout.gbs}"
        first = f"{shown.task} | {shown.nodes[0]} | {_format_layout(layout)}"
        lines.append(f"| {model.name} | {model.title} | {len(recipes)} | {first} | {batch} | {figures} |")
    return "\n".join(lines) + "\n"


def exceptions() -> str:
    """Return a list of models that cannot be rehearsed without a GPU, and of sizes that fail to start, by reason."""
    models_of: dict[str, list[str]] = defaultdict(list)
    for model in _models():
        if model.unproven:
            models_of[f"not rehearsed without a GPU: {model.unproven}"].append(model.name)
        broken = Counter(why for recipe in _model_recipes(model) for why in proof_level.lookup(recipe).broken.values())
        for why, sizes in broken.items():
            models_of[f"{sizes} sizes are known not to start: {why}"].append(model.name)
    return "".join(f"- {', '.join(models)}: {reason}\n" for reason, models in models_of.items())


def _models() -> list[Model]:
    """Return all models except those for tests."""
    return [model for model in registry.models().values() if model.family != "tiny"]


def _model_recipes(model: Model) -> list[Recipe]:
    return [recipe for recipe in registry.recipes().values() if recipe.model is model]


def _format_layout(layout: Layout) -> str:
    """Format degrees and recomputation of a layout for a table."""
    words = {"full": f"recompute {layout.recompute_method} {layout.recompute_layers}", "none": ""}
    recompute = words.get(layout.recompute, f"recompute {' '.join(layout.recompute_modules)}")
    return ", ".join(filter(None, [layout.short(), recompute]))


def published_rows() -> str:
    """Return a table with a row per published run of our recipes: its layout and ours, planned and measured."""
    lines = [
        "| recipe | GPUs | published layout | ours | planned, published | planned, ours | measured | of |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, cases in tomllib.loads((registry.LAYOUTS.parent / "published.toml").read_text()).items():
        recipe = registry.find(name)
        for case in cases:
            theirs = Layout.from_mapping(option_syntax.parse_layout(case["layout"], name), name)
            nodes = case["gpus"] // recipe.gpus_per_node
            nearest = min(recipe.nodes, key=lambda n, to=nodes: abs(n - to))
            ours = replace(recipe.layout(nearest), gbs=theirs.gbs)
            same = replace(ours, sharding=theirs.sharding) == theirs
            mine = "the same" if same else f"{_format_layout(ours)}, MBS {ours.mbs}"
            planned = [_predict_throughput(recipe, case["gpus"], layout) for layout in (theirs, ours)]
            if nodes not in recipe.nodes and planned[1] == "illegal":
                mine, planned[1] = "none at this size", "-"
            measured = f"{case['tokens_per_s_per_gpu']:,.0f} | {case['release']}"
            cells = (name, case["gpus"], f"{_format_layout(theirs)}, MBS {theirs.mbs}", mine, *planned, measured)
            lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines) + "\n"


def _predict_throughput(recipe: Recipe, gpus: int, layout: Layout) -> str:
    """Format the predicted tokens/s/GPU of a recipe with a layout, or the verdict if it is illegal."""
    plan = predict.one(job(recipe).replace(gpus=gpus, layout=layout))
    if plan.tokens_per_s_per_gpu is None:
        return plan.verdict
    fit = " (too large)" if plan.verdict == "oom" else " (tight)" if plan.tight else ""
    return f"{plan.tokens_per_s_per_gpu:,.0f}{fit}"


BLOCKS = {
    "counts": counts,
    "models": model_rows,
    "exceptions": exceptions,
    "published": published_rows,
    "nemo": nemo_names,
}
"""Block of the page, between `<!-- NAME -->` and `<!-- end -->` -> function that returns its content."""


def page() -> str:
    """Return docs/recipes.md with all blocks regenerated."""
    text = PAGE.read_text()
    for name, render in BLOCKS.items():
        before, start, rest = text.partition(f"<!-- {name} -->\n")
        _, end, after = rest.partition("<!-- end -->")
        if not start or not end:
            raise SystemExit(f"{PAGE} has no block {name}")
        text = f"{before}{start}{render()}{end}{after}"
    return text


if __name__ == "__main__":
    PAGE.write_text(page())
