"""consumers.py CACHE FILE: what each consumer of a resolved run sees of planted overrides, as JSON in FILE.

NeMo is imported once, in this process of its own; CACHE is the cache of resolved runs.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

from superpod import rehearsal
from superpod.requests import resolve
from superpod.requests.request import Request
from superpod.slurm.preflight import preflight
from superpod.slurm.profiles import profiles
from superpod.slurm.profiles.live_cluster import LiveCluster
from superpod.slurm.script import cluster_variables
from superpod.slurm.submission import submit

RECIPE = "llama32_1b_pretrain_h100_bf16"
"""Data parallelism only, so that ranks get no CUDA_DEVICE_MAX_CONNECTIONS."""
PLANTED = {
    "with=fsdp": "sharding",
    "trainer.strategy.tensor_model_parallel_size=8": "tp",
    "data.global_batch_size=256": "gbs",
    "trainer.num_nodes=2": "gbs",
}
"""An override, and the field of the layout to look at."""


def main(cache: str, file: str) -> None:
    os.environ["XDG_CACHE_HOME"] = cache
    Path(file).write_text(json.dumps({text: seen(text, field) for text, field in PLANTED.items()}))


def seen(override: str, field: str) -> dict[str, Any]:
    """The field by consumer, and whether the cache returns the same run."""
    from superpod.nemo2.build.layout import read_layout

    request, cluster = Request(RECIPE, (override,)), profiles.load("dgx_h100")
    built, fresh, cached = resolve.resolve(request), resolve.resolve_cached(request), resolve.resolve_cached(request)
    submission = submit.Submission(cached, cluster)
    script = submit.script(submission)
    variables = {v.name: v.value for v in cluster_variables.variables(cluster, cached.job)}
    names: dict[str, Any] = {}
    exec(compile(cached.source, "recipe.py", "exec"), names)
    ranks = built.nodes * built.gpus_per_node
    return {
        "plan.json": cached.plan["layouts"][0]["layout"][field],
        "preflight": getattr(preflight.Case(submission, LiveCluster()).run.job.layout, field),
        "export": getattr(read_layout(names["recipe"]()), field),
        "rehearsal": getattr(read_layout(rehearsal.rehearse(built.partial, devices=ranks)[0]), field),
        "resolved": getattr(built.layout, field),
        "environment": variables.get("CUDA_DEVICE_MAX_CONNECTIONS"),
        "script": _exported(script, "CUDA_DEVICE_MAX_CONNECTIONS"),
        "nodes": [built.nodes, cached.job.gpus // cached.gpus_per_node, f"#SBATCH --nodes={built.nodes}\n" in script],
        "cached": cached == fresh and (built.job, built.lines) == (cached.job, cached.lines),
    }


def _exported(script: str, name: str) -> str | None:
    return next(
        (line.split("=")[1].split()[0] for line in script.splitlines() if line.startswith(f"export {name}=")), None
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
