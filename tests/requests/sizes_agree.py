"""sizes_agree.py CACHE [NUMBER]: what each consumer makes of drawn sizes, sequences and batches; ends with 1 where two
differ. NeMo is imported once, in this process of its own; CACHE is the cache of resolved runs.
"""

import os
import sys
from typing import Any

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from superpod.cli.options.plan_options import PlanOptions, job_title
from superpod.errors import UserError
from superpod.planner.planned_job import PlannedJob
from superpod.rehearsal import configuration_check, rehearsal_run
from superpod.requests import resolve
from superpod.requests.request import Request
from superpod.slurm.profiles import profiles
from superpod.slurm.submission import submit

NAMES = (
    "llama3_8b_pretrain_h100_bf16",
    "llama3_8b_lora_h100_bf16",
    "qwen3_30b_a3b_pretrain_h100_bf16",
    "gpt3_175b_pretrain_h100_bf16",
    "tiny_llama3",
)
SIZES = {"num_nodes": [1, 2, 3, 4, 8, 16], "seq": [512, 2048, 4096, 16384], "gbs": [64, 256, 1024]}
"""Values of each option; None beside them."""
TOKENS = [2**20, 2**22, 4_000_000]

drawn = st.fixed_dictionaries(
    {
        "name": st.sampled_from(NAMES),
        **{key: st.one_of(st.none(), st.sampled_from(values)) for key, values in SIZES.items()},
        "batch_tokens": st.one_of(st.none(), st.none(), st.sampled_from(TOKENS)),
        "by_override": st.sampled_from(["", "data.seq_length", "model.config.seq_length"]),
    }
)
seen = {"taken": 0, "refused": 0}


def view(job: PlannedJob) -> dict[str, Any]:
    """What the consumers must agree on."""
    return {"gpus": job.gpus, "seq": job.seq, "layout": job.layout, "positions": job.model.positions}


def check(case: dict[str, Any]) -> None:
    """Ask every consumer."""
    name, path, seq = case["name"], case["by_override"], case["seq"]
    sizes = {key: case[key] for key in ("num_nodes", "gbs", "batch_tokens")}
    overrides = (f"{path}={seq}",) if path and seq else ()
    request = Request(name, overrides, seq=None if overrides else seq, **sizes)
    try:
        request.check()
        request.require_legal_layout()
    except UserError as refused:
        if not refused.hint:
            raise AssertionError(f"no next move after: {refused}") from refused
        refuse_everywhere(request)
        seen["refused"] += 1
        return
    seen["taken"] += 1
    wanted = view(request.job())
    decided = request.with_resolved_size()
    built = resolve.resolve(decided)
    assert view(built.job) == wanted, ("resolve", view(built.job), wanted)
    assert view(Request.from_facts(name, decided.facts()).job()) == wanted, "resumed"
    assert view(rehearsal_run._find_job(decided)[1]) == wanted, "rehearse"
    assert_shown(request, wanted)
    assert configuration_check.check(decided, build=False).title == job_title(built.job), "check"
    if not overrides:
        tokens = case["batch_tokens"]
        options = PlanOptions(name, nodes=case["num_nodes"], seq=seq, gbs=case["gbs"])
        options = options if tokens is None else PlanOptions(**{**vars(options), "batch_tokens": str(tokens)})
        assert view(options.job()) == wanted, "explain, cost, memory"
    assert_rendered(decided, wanted)


def refuse_everywhere(request: Request) -> None:
    """A request refused by one consumer is refused by all, including NeMo's."""
    try:
        resolve.resolve(request)
    except UserError:
        return
    raise AssertionError(f"{request} is refused, and it resolves")


def assert_shown(request: Request, wanted: dict[str, Any]) -> None:
    """`show` and `export`: the fields themselves."""
    from superpod.nemo2.build.layout import read_layout

    partial, _ = resolve.build_configuration(request)
    assert partial.data.seq_length == partial.model.config.seq_length == wanted["seq"]
    assert partial.trainer.num_nodes * partial.trainer.devices == wanted["gpus"]
    assert read_layout(partial) == wanted["layout"], ("show", read_layout(partial))


def assert_rendered(request: Request, wanted: dict[str, Any]) -> None:
    """`render`, plan.json and the exported file that ranks run."""
    from superpod.nemo2.build.layout import read_layout

    run = resolve.resolve_cached(request)
    query = run.plan["query"]
    layout = wanted["layout"]
    assert (query["gpus"], query["seq"], query["gbs"]) == (wanted["gpus"], wanted["seq"], layout.gbs), query
    script = submit.script(submit.Submission(run, profiles.load("dgx_h100")))
    assert f"#SBATCH --nodes={run.nodes}\n" in script
    names: dict[str, Any] = {}
    exec(compile(run.source, "recipe.py", "exec"), names)
    exported = names["recipe"]()
    assert exported.data.seq_length == exported.model.config.seq_length == wanted["seq"]
    assert read_layout(exported) == layout, ("export", read_layout(exported))


def main(cache: str, number: str = "25") -> None:
    os.environ["XDG_CACHE_HOME"] = cache
    quick = settings(
        max_examples=int(number),
        deadline=None,
        derandomize=True,
        phases=[Phase.generate],
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large],
    )
    quick(given(drawn)(check))()
    print(seen)


if __name__ == "__main__":
    main(*sys.argv[1:])
