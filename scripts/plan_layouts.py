"""Plan every recipe's layout: `python scripts/plan_layouts.py [MODEL...] [--published step_time.csv]`.

Writes recipes/layouts/MODEL.toml anew. Per model and task: search GPUs of each memory size, and each kind of precision;
take the fewest layouts that are each within 3 % of the fastest wherever they stand, which is less than the planner
errs, one for all sizes of a recipe where there is one; put recipes that come out alike under one head. Where a measured
run of the same case was published, its layout stays unless the fastest is better by more than twice the planner's
error; --published also writes those cases to recipes/published.toml. Read the diff before committing: this plans,
people review.
"""

from __future__ import annotations

import argparse
import csv
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields, replace
from functools import cache
from pathlib import Path
from typing import Any

from superpod.errors import UserError
from superpod.planner import hardware, memory, models, predict
from superpod.planner.layout import Layout
from superpod.planner.planned_job import PlannedJob
from superpod.planner.search import Space, search
from superpod.planner.tables import published
from superpod.recipes import registry
from superpod.recipes.planned_job import decided

PRECISIONS = {
    "a100": ("bf16", "fp16"),
    **dict.fromkeys(("h100", "h200"), ("bf16", "fp8ds", "fp8cs", "fp8bw")),
    **dict.fromkeys(("b200", "gb200", "b300", "gb300"), ("bf16", "fp8cs", "mxfp8")),
}
SEARCHED = dict.fromkeys(("h100", "h200", "b200", "b300"), ("bf16", "fp8cs"))
"""What is searched: a precision of each kind, a GPU of each size of memory. The others choose from what is found."""
SIZED = {"a100": "h100", "h100": "h100", "h200": "h200"} | dict.fromkeys(("b200", "gb200", "b300", "gb300"), "b200")
"""The GPU whose memory says how few GPUs a model takes."""
AS_FAST = 1.03
"""Layouts within so much of the fastest are as good: less than the planner errs (docs/planner.md)."""
PUBLISHED = {"dense": 1.0916, "moe": 1.1604}
"""Twice the planner's error on tuned runs (docs/planner.md): a published layout within so much of the fastest stays."""
HEADROOM = 0.95
"""Of what a rank may take, the most that a recipe does: for unlike experts, longer lists of buckets, a newer NCCL."""
TASKS = ["pretrain", "sft", "lora", "dora"]
MOST_STAGES = 32
"""Pipelines deeper than that are planned well and run badly: every stage waits for the slowest."""
MOST_GPUS = 2048
TOKENS = 2**22
"""Tokens of a global batch, pretraining: 4 million, as Llama 2 and 3 were trained."""
BATCHES = {
    "llama31_405b": 2048,
    "deepseek_v3": 15_360,
    "deepseek_v2": 2304,
    "deepseek_v2_lite": 4608,
    "nemotron4_340b": 2304,
    **dict.fromkeys(("nemotronh_4b", "nemotronh_8b", "nemotronh_47b", "nemotronh_56b"), 768),
    **dict.fromkeys(("nemotron_nano_9b_v2", "nemotron_nano_12b_v2"), 768),
    **dict.fromkeys(("bert_110m", "bert_340m"), 256),
    **dict.fromkeys(("t5_220m", "t5_3b", "t5_11b"), 2048),
}
"""Global batches of pretraining that their papers or NeMo's recipes give."""
FINETUNE_BATCH = 32
"""Packed samples: NVIDIA's published fine-tuning runs (NeMo performance summary)."""
LONG = {
    **dict.fromkeys(("llama3_8b", "llama3_70b", "llama31_8b", "llama31_70b"), (16, 64, 128)),
    **dict.fromkeys(("mixtral_8x7b", "mixtral_8x22b"), (16, 64)),
    **dict.fromkeys(("nemotron3_22b", "nemotron4_15b"), (16, 64)),
}
"""Thousands of tokens of the long-context recipes: NeMo's own, and what is between."""
RETRIEVES = ("e5_340m", "llama_embedding_1b", "llama_embedding_3b", "llama_reranker_1b")
"""Models that are only fine-tuned."""


@dataclass(frozen=True)
class Case:
    """One recipe to be: a model, a task at a length, a GPU and a precision."""

    model: str
    task: str
    context_k: int
    gpu: str
    precision: str

    @property
    def table(self) -> str:
        """The recipe's name without its model."""
        return f"{f'{self.context_k}k_' if self.context_k else ''}{self.task}_{self.gpu}_{self.precision}"

    @property
    def seq(self) -> int:
        """Tokens of a sample."""
        return registry.sequence(registry.models()[self.model], self.task, self.context_k)

    @property
    def gbs(self) -> int:
        """Samples of a global batch."""
        if self.task != "pretrain":
            return FINETUNE_BATCH
        return BATCHES.get(self.model, 0) if self.model in BATCHES and not self.context_k else TOKENS // self.seq

    def job(self, gpus: int, layout: Layout | None = None) -> PlannedJob:
        """Its run."""
        facts = hardware.builtin()
        node = facts.node(self.gpu)
        layout = layout or Layout(gbs=self.gbs, sharding=self.sharding)
        shape = registry.shape_for(registry.models()[self.model], self.task)
        return PlannedJob(
            model=shape,
            node=node,
            fabric=facts.fabric_of(node),
            gpus=gpus,
            seq=self.seq,
            precision=self.precision,
            layout=layout,
            task="lora" if self.task == "dora" else self.task,  # type: ignore[arg-type]
            options=decided(self.task, self.precision, self.sharding, shape),
        )

    @property
    def sharding(self) -> str:
        """Adapters are too small to be worth sharding."""
        return "none" if self.task in ("lora", "dora") else "zero1"


def cases(name: str) -> list[list[Case]]:
    """The recipes of a model, in groups of one task and length."""
    model = registry.models()[name]
    tasks = [("pretrain", 0), *(("pretrain", k) for k in LONG.get(name, ())), ("sft", 0), ("lora", 0), ("dora", 0)]
    if model.family == "ssm":
        tasks = [each for each in tasks if each[0] in ("pretrain", "sft")]
    if name in RETRIEVES or name.startswith("bert"):
        tasks = [("sft", 0)] if name in RETRIEVES else [("pretrain", 0)]
    plain_only = model.unproven and not name.startswith("nemotron")
    return [
        [
            Case(name, task, k, gpu, precision)
            for gpu, precisions in PRECISIONS.items()
            for precision in precisions
            if precision == "bf16" or not (plain_only or task == "dora")
        ]
        for task, k in tasks
    ]


def plan(group: list[Case], measured: dict[tuple[str, int], Layout]) -> dict[Case, dict[int, Layout]]:
    """The layouts of a group of cases at each of their sizes, in GPUs."""
    sizes = {gpu: _sizes(group, gpu, measured) for gpu in dict.fromkeys(c.gpu for c in group)}
    pool, fastest = _pool(group, sizes)
    pool |= {replace(layout, gbs=group[0].gbs) for layout in measured.values()}
    allowed: dict[tuple[Case, int], set[Layout]] = {}
    for case in group:
        for gpus in sizes[case.gpu]:
            seconds = _seconds(case, gpus, pool) or dict(_found(case, gpus))
            if not seconds:
                continue
            least = min([*seconds.values(), fastest.get((case, gpus), 1e9)])
            allowed[case, gpus] = {layout for layout, s in seconds.items() if s <= AS_FAST * least}
            kept = measured.get((case.table, gpus))
            own = _seconds(case, gpus, {replace(kept, gbs=case.gbs)}, headroom=1.0) if kept else {}
            for layout, s in own.items():  # it ran: it needs no room for surprises
                if s <= PUBLISHED["moe" if _is_moe(case) else "dense"] * least:
                    allowed[case, gpus] = {layout}
    everywhere = {}
    for case in {case for case, _ in allowed}:
        everywhere[case] = set.intersection(*(layouts for (of, _), layouts in allowed.items() if of == case))
    whole = _fewest({case: layouts for case, layouts in everywhere.items() if layouts})
    parts = _fewest({place: layouts for place, layouts in allowed.items() if place[0] not in whole}, whole.values())
    found: dict[Case, dict[int, Layout]] = defaultdict(dict)
    for case, gpus in allowed:
        found[case][gpus] = whole[case] if case in whole else parts[case, gpus]
    return {case: found[case] for case in group if case in found}


def _is_moe(case: Case) -> bool:
    return models.find(case.model).is_moe


def _sizes(group: list[Case], gpu: str, measured: dict[tuple[str, int], Layout]) -> list[int]:
    """GPUs: the fewest that a case of this GPU fits, and twice and four times that; pretraining eight times, too."""
    first = next(c for c in group if c.gpu == SIZED[gpu])
    for gpus in (2**i for i in range(3, 12)):
        if _found(first, gpus):
            times = (1, 2, 4, 8) if first.task == "pretrain" else (1, 2, 4)
            ours = {gpus * t for t in times if gpus * t <= max(MOST_GPUS, gpus)}
            theirs = [n for table, n in measured if table in {c.table for c in group if c.gpu == gpu} and n >= gpus]
            return sorted(ours | set(sorted(theirs)[:1]))
    print(f"  nothing fits: {first.model} {first.table}", file=sys.stderr)
    return []


@cache
def _found(case: Case, gpus: int) -> tuple[tuple[Layout, float], ...]:
    """The layouts that fit and are as fast as the fastest, with their seconds; the fastest first."""
    longest = max(2 * case.seq // 4096, 1)
    space = Space(
        tp=(1, 2, 4, 8),
        cp=tuple(2**i for i in range(7) if 2**i <= longest),
        mbs=(1, 2, 4),
        sharding=(case.sharding,),
        deepest_vp=8,
        fixed={"pp": 1} if case.model.startswith("t5") else {},  # of two halves: no pipeline in 0.15.3
    )
    try:
        job = case.job(gpus)
        found = search(job, space, memory_cap_gib=HEADROOM * memory.limit(job) / 2**30)
    except UserError:
        return ()
    best = found.ranked[found.fields["pp"][found.ranked] <= MOST_STAGES][:400]
    if not len(best):
        return ()
    least = float(found.seconds[best[0]])
    within = [int(i) for i in best if found.seconds[i] <= AS_FAST * least]
    return tuple((found.layout(i), float(found.seconds[i])) for i in within)


def _pool(group: list[Case], sizes: dict[str, list[int]]) -> tuple[set[Layout], dict[tuple[Case, int], float]]:
    """What may be chosen from: of each search the simplest of the fast ones; and each search's least seconds."""
    pool: set[Layout] = set()
    fastest = {}
    for case in group:
        ends = sorted({*sizes[case.gpu][:1], *sizes[case.gpu][-1:]})
        for gpus in ends if case.precision in SEARCHED.get(case.gpu, ()) else ():
            if found := _found(case, gpus):
                fastest[case, gpus] = found[0][1]
                pool |= {layout for layout, _ in sorted(found, key=lambda each: (_features(each[0]), each[1]))[:12]}
    return pool, fastest


def _features(layout: Layout) -> int:
    """What a reader has to understand in it."""
    odd = 4 * (layout.chunks is not None) + 2 * (layout.recompute == "full")
    odd += 2 * (layout.tp > 1 and not layout.sp)  # sequence parallelism sends no more, and holds less
    return odd + sum(getattr(layout, f.name) != f.default for f in fields(layout))


def _seconds(case: Case, gpus: int, pool: set[Layout], headroom: float = HEADROOM) -> dict[Layout, float]:
    """Step time of each layout that is legal and fits with its margin."""
    layouts = list(pool)
    found = predict.many([case.job(gpus, layout) for layout in layouts])
    return {
        layout: p.step_time_s
        for layout, p in zip(layouts, found, strict=True)
        if p.verdict == "ok" and (p.reserved_gib_max or 0) <= headroom * p.limit_gib and p.step_time_s
    }


def _fewest(allowed: dict[Any, set[Layout]], known: Iterable[Layout] = ()) -> dict[Any, Layout]:
    """One of the allowed layouts for each place, as few different ones as greed finds; `known` are there anyway."""
    left, chosen = dict(allowed), {}
    there = set(known)
    while left:
        counts = Counter(layout for layouts in left.values() for layout in layouts)
        counts = {layout: n for layout, n in counts.items() if layout in there} or counts
        layout = min(counts, key=lambda each: (-counts[each] / (3 + _features(each)), repr(each)))
        for place in [place for place, layouts in left.items() if layout in layouts]:
            chosen[place] = layout
            del left[place]
    return chosen


def write(name: str, planned: list[dict[Case, dict[int, Layout]]], measured: dict[tuple[str, int], Layout]) -> Path:
    """The layouts of a model as its file, tables that are alike under one head; of tasks not planned, those it has."""
    path = registry.LAYOUTS / f"{name}.toml"
    tasks = {case.task for group in planned for case in group}
    text = "# By scripts/plan_layouts.py: within 3 % of the fastest that leaves 5 % of memory, as few as that takes.\n"
    for block in path.read_text().split("\n\n")[1:] if path.is_file() else ():
        head = registry.TABLE.fullmatch(f"\n{block}".partition("\n[")[2].partition("]")[0])
        if head and head["task"] not in tasks:
            text += f"\n{block.rstrip()}\n"
    for group in planned:
        alike: dict[str, list[Case]] = defaultdict(list)
        for case, layouts in group.items():
            alike[_body(case, layouts)].append(case)
        for body, cases_alike in alike.items():
            text += f"\n{''.join(_remarks(cases_alike, group, measured))}[{cases_alike[0].table}]\n"
            if len(cases_alike) > 1:
                text += f"also = [{_wrapped([case.table for case in cases_alike[1:]])}]\n"
            text += body
    path.write_text(text)
    return path


def _remarks(head: list[Case], group: dict[Case, dict[int, Layout]], measured: Any) -> Iterator[str]:
    for case in head:
        for gpus, layout in sorted(group[case].items()):
            if kept := measured.get((case.table, gpus)):
                same = replace(kept, gbs=case.gbs) == layout
                verdict = "as published" if same else f"published: {kept.short()}"
                source = MEASURED[case.model, case.table, gpus]["release"]
                yield f"# {case.gpu} {case.precision} on {gpus} GPUs: {verdict}, {source}.\n"


def _wrapped(names: list[str]) -> str:
    one = ", ".join(f'"{name}"' for name in names)
    return one if len(one) < 110 else "\n" + "".join(f'    "{name}",\n' for name in names)


def _body(case: Case, layouts: dict[int, Layout]) -> str:
    per_node = hardware.builtin().node(case.gpu).gpus
    nodes = {max(gpus // per_node, 1): layout for gpus, layout in sorted(layouts.items())}
    usual = Counter(nodes.values()).most_common(1)[0][0]
    lines = [f"nodes = {sorted(nodes)}", *(f"{key} = {text}" for key, text in _values(usual).items())]
    for size, layout in nodes.items():
        if layout != usual:
            inner = ", ".join(f"{key} = {text}" for key, text in _values(layout).items() if key != "gbs")
            lines.append(f"at.{size} = {{ {inner} }}" if inner else f"at.{size} = {{}}")
    return "\n".join(lines) + "\n"


def _values(layout: Layout) -> dict[str, str]:
    given = {f.name: getattr(layout, f.name) for f in fields(layout) if getattr(layout, f.name) != f.default}
    given["gbs"] = layout.gbs
    return {key: _toml(value) for key, value in given.items()}


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return f'"{value}"'
    if isinstance(value, tuple):
        return f"[{', '.join(_toml(each) for each in value)}]"
    return str(value)


MEASURED: dict[tuple[str, str, int], dict[str, Any]] = {}
"""Published runs of our cases by model, table and GPUs: what recipes/published.toml holds of them."""


def measured_layouts(path: Path) -> dict[str, dict[tuple[str, int], Layout]]:
    """Published runs of our cases: model -> (table, GPUs) -> layout; of several, the fastest per GPU."""
    best: dict[tuple[str, str, int], tuple[float, Layout]] = {}
    for row in csv.DictReader(path.open()):
        found = _published(row)
        if found is None:
            continue
        key, speed, layout = found
        if speed > best.get(key, (0.0, layout))[0]:
            best[key] = speed, layout
            MEASURED[key] = {
                "gbs": layout.gbs,
                "layout": layout,
                "tokens_per_s_per_gpu": round(speed, 1),
                "release": row["release"] or "measured",
                "source": row["source"],
            }
    result: dict[str, dict[tuple[str, int], Layout]] = defaultdict(dict)
    for (model, table, gpus), (_, layout) in best.items():
        result[model][table, gpus] = layout
    return result


def _published(row: dict[str, str]) -> tuple[tuple[str, str, int], float, Layout] | None:
    model = registry.models().get(row["model"])
    if model is None or row["layers"] or row["fsdp"] not in ("", "0", "1"):
        return None
    try:
        job = published.job(row)
    except UserError:
        return None
    gpu, task = job.node.gpu.name, job.task
    if gpu not in PRECISIONS or job.precision not in PRECISIONS[gpu] or job.options.framework != "megatron":
        return None
    case = Case(row["model"], task, 0, gpu, job.precision)
    if case.seq != job.seq or job.gpus % 8 or job.layout.sharding in ("zero2", "zero3"):
        return None
    layout = replace(job.layout, sharding=case.sharding, etp=job.layout.etp if job.model.is_moe else None)
    speed = row["tokens_per_s_per_gpu"] or job.tokens / float(row["step_time_s"] or 1e9) / job.gpus
    return (row["model"], case.table, job.gpus), float(speed), layout


def write_published() -> None:
    """The published runs of our cases, with their sources."""
    text = "# Measured runs of our cases that others published, of several the fastest; by scripts/plan_layouts.py.\n"
    for (model, table, gpus), facts in sorted(MEASURED.items()):
        layout = ", ".join(f"{key} = {value}" for key, value in _values(facts["layout"]).items())
        text += f'\n[["{model}_{table}"]]\ngpus = {gpus}\nlayout = {{ {layout} }}\n'
        text += "".join(f"{key} = {_toml(facts[key])}\n" for key in ("tokens_per_s_per_gpu", "release", "source"))
    (registry.LAYOUTS.parent / "published.toml").write_text(text)


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*")
    parser.add_argument("--published", type=Path)
    parser.add_argument("--tasks", nargs="*", choices=TASKS, default=TASKS, help="others stay as they are")
    given = parser.parse_args()
    measured = measured_layouts(given.published) if given.published else {}
    if measured:
        write_published()
    for name in given.models or [m for m in registry.models() if not m.startswith("tiny_")]:
        mine = measured.get(name, {})
        planned = []
        for group in (group for group in cases(name) if group[0].task in given.tasks):
            tables = {case.table for case in group}
            planned.append(plan(group, {key: layout for key, layout in mine.items() if key[0] in tables}))
        _found.cache_clear()
        path = write(name, planned, mine)
        print(f"{path.name}: {sum(map(len, planned))} recipes, {path.read_text().count('[')} heads", flush=True)


if __name__ == "__main__":
    main()
