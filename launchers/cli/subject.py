"""What a planning verb is about, from the words of a command line: a recipe, or a model on its GPUs."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from superpod.planner.errors import UserError, did_you_mean

if TYPE_CHECKING:
    from superpod.planner.hardware import Hardware
    from superpod.planner.job import Job, Options
    from superpod.planner.layout import Layout
    from superpod.planner.models import Model

Name = Annotated[
    str, typer.Argument(help="A recipe, a model's name, a Hugging Face config.json, or layers=..,hidden=..")
]
Gpu = Annotated[str | None, typer.Option("--gpu", help="a100, h100, h200, b200, gb200, ..., or one of --hardware.")]
Gpus = Annotated[int | None, typer.Option("--gpus", help="How many GPUs.")]
Nodes = Annotated[int | None, typer.Option("--nodes", help="How many nodes, instead of --gpus.")]
Seq = Annotated[int | None, typer.Option("--seq", help="Sequence length, tokens. Default of a model: 8192.")]
Gbs = Annotated[int | None, typer.Option("--gbs", help="Global batch, samples. Default of a model: 512.")]
Precision = Annotated[str | None, typer.Option("--precision", help="bf16, fp8cs, mxfp8, ...")]
LayoutText = Annotated[str | None, typer.Option("--layout", help="Such as tp=4,pp=2,sp,mbs=2,recompute=full.")]
Task = Annotated[str | None, typer.Option("--task", help="pretrain, sft or lora.")]
OptionTexts = Annotated[list[str] | None, typer.Option("--option", help="Such as moments=bf16 or offload=1.")]
HardwareFile = Annotated[Path | None, typer.Option("--hardware", help="TOML with your own GPUs, nodes and fabrics.")]
Fabric = Annotated[str | None, typer.Option("--fabric", help="The network between nodes; default: its SuperPOD's.")]
AsJson = Annotated[bool, typer.Option("--json", help="For programs.")]

SEQ, GBS = 8192, 512


def job(
    name: str,
    *,
    gpu: str | None = None,
    gpus: int | None = None,
    nodes: int | None = None,
    seq: int | None = None,
    gbs: int | None = None,
    precision: str | None = None,
    layout: str | None = None,
    task: str | None = None,
    options: list[str] | None = None,
    hardware_file: Path | None = None,
    fabric: str | None = None,
) -> Job:
    """The run that the words describe: a recipe's, changed where they say so, or a model's own.

    Raises:
        UserError: when a name is unknown, a number is out of range, or a model's GPUs are not said.
    """
    from superpod.planner import hardware
    from superpod.recipes.registry import recipes

    facts = hardware.load(hardware_file) if hardware_file else hardware.builtin()
    found = _of_recipe(name, nodes, gpus, facts) if name in recipes() else _of_model(name, gpu, gpus, nodes, facts)
    if gpu is not None and name in recipes():
        found = found.replace(node=facts.node(gpu), fabric=facts.fabric_of(facts.node(gpu)))
    if fabric is not None:
        found = found.replace(fabric=facts.fabric(fabric))
    if precision is not None:
        found = found.replace(precision=hardware.precision(precision))
    if seq is not None:
        found = found.replace(seq=_positive("--seq", seq))
    if gbs is not None:
        found = found.replace(layout=found.layout.replace(gbs=_positive("--gbs", gbs)))
    if task is not None:
        found = found.replace(task=_one_of("--task", task, ("pretrain", "sft", "lora")))
    if options:
        found = found.replace(options=_options(found.options, options))
    return found.replace(layout=_layout(found.layout, layout)) if layout else found


def model(text: str) -> Model:
    """A model by name, by the path of a config.json, or by its shape: `layers=32,hidden=4096,heads=32,vocab=32000`."""
    from superpod.planner import huggingface, models

    if len(text) > 4000:
        raise UserError("a model is a name, a path or a short shape, and this has 4,000 letters and more")
    if "=" in text and not Path(text).exists():
        return models.Model.from_shape(**pairs(text, "the shape"))
    if text.endswith(".json") or Path(text).is_dir():
        return huggingface.from_config(text)
    return models.find(text)


def pairs(text: str, what: str) -> dict[str, Any]:
    """`tp=4,sp,recompute=full` as a mapping: numbers, true and false, words; a bare word is true; + joins a list."""
    found: dict[str, Any] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        key, equals, value = (piece.strip() for piece in part.partition("="))
        if key in found:
            raise UserError(f"{what} says {key} twice: {text!r}")
        found[key] = _value(value) if equals else True
    return found


def _value(text: str) -> Any:
    low = text.lower()
    if low in ("true", "false"):
        return low == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def _of_recipe(name: str, nodes: int | None, gpus: int | None, facts: Hardware) -> Job:
    from superpod.recipes.job import job as recipe_job
    from superpod.recipes.registry import find

    recipe = find(name)
    if nodes is not None and gpus is not None and gpus != nodes * recipe.gpus_per_node:
        raise UserError(f"--gpus {gpus} and --nodes {nodes} of {recipe.gpus_per_node} GPUs contradict each other")
    if nodes is None and gpus is not None:
        if gpus % recipe.gpus_per_node:
            raise UserError(f"{gpus} GPUs are no whole nodes: {name} has {recipe.gpus_per_node} GPUs a node")
        nodes = gpus // recipe.gpus_per_node
    if nodes is None or nodes in recipe.layouts:
        return recipe_job(recipe, nodes, facts=facts)
    smallest = recipe_job(recipe, None, facts=facts)  # a size it is not laid out for: its layout all the same
    return smallest.replace(gpus=_positive("--nodes", nodes) * recipe.gpus_per_node)


def _of_model(name: str, gpu: str | None, gpus: int | None, nodes: int | None, facts: Hardware) -> Job:
    from superpod.planner.job import Job
    from superpod.planner.layout import Layout
    from superpod.recipes.registry import recipes

    try:
        shape = model(name)
    except UserError as unknown:
        near = did_you_mean(name, list(recipes()))
        raise UserError(str(unknown), near or unknown.hint) from unknown
    if gpu is None:
        raise UserError(f"{name} is a model: say on which GPU", "--gpu h100 --gpus 64, for example")
    node = facts.node(gpu)
    if gpus is not None and nodes is not None and gpus != nodes * node.gpus:
        raise UserError(f"--gpus {gpus} and --nodes {nodes} of {node.gpus} GPUs contradict each other", "give one")
    if gpus is None and nodes is None:
        raise UserError(f"{name} is a model: say on how many GPUs", f"--gpus {8 * node.gpus}, or --nodes 8")
    world = _positive("--gpus", gpus) if gpus is not None else _positive("--nodes", nodes or 0) * node.gpus
    return Job(shape, node, facts.fabric_of(node), world, SEQ, "bf16", Layout(gbs=GBS))


def layout_values(text: str, what: str) -> dict[str, Any]:
    """Fields of `Layout` of a text such as `tp=4,sp,recompute_modules=layernorm+mlp`."""
    values = pairs(text, what)
    for key in ("recompute_modules", "chunks"):
        if key in values:
            values[key] = tuple(_value(each) for each in str(values[key]).split("+"))
    return values


def _layout(base: Layout, text: str) -> Layout:
    from superpod.planner.layout import Layout

    values = layout_values(text, "--layout")
    kept = {f.name: getattr(base, f.name) for f in fields(base) if getattr(base, f.name) is not None}
    if "tp" in values and "sp" not in values:
        kept["sp"] = values["tp"] != 1
    found = Layout.from_mapping(kept | values, "--layout")
    if wrong := found.below_one():
        raise UserError(f"--layout: {wrong[0].message}")
    return found


def _options(base: Options, texts: list[str]) -> Options:
    values = pairs(",".join(texts), "--option")
    known = {f.name: getattr(base, f.name) for f in fields(base)}
    for key, value in values.items():
        if key not in known:
            raise UserError(f"no option is called {key!r}", did_you_mean(key, list(known)) or ", ".join(known))
        if isinstance(known[key], float) and isinstance(value, int) and not isinstance(value, bool):
            values[key] = float(value)
        elif known[key] is not None and type(values[key]) is not type(known[key]):
            raise UserError(f"--option {key} is like {known[key]!r}, not {value!r}")
    return replace(base, **values)


def _positive(what: str, value: int) -> int:
    if not 1 <= value < 2**31:
        raise UserError(f"{what} is {value}; it is 1 or more")
    return value


def _one_of(what: str, value: str, choices: tuple[str, ...]) -> Any:
    if value not in choices:
        raise UserError(f"{what} is {value!r}", did_you_mean(value, list(choices)) or f"one of {', '.join(choices)}")
    return value
