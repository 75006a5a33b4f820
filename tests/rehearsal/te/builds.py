"""Builds with Transformer Engine's layers, in a process of their own: questions as JSON on stdin, answers on stdout.

No test process can do it: theirs may have NeMo with a rehearsal's patches.
"""

import collections
import contextlib
import dataclasses
import json
import random
import sys
import tempfile
from pathlib import Path
from unittest import mock


def main():
    import superpod.rehearsal.te.import_te  # noqa: F401 - before NeMo

    for question in map(json.loads, sys.stdin):
        with planted(question.get("defect")):
            if "prove" in question:
                reply = prove(**question["prove"])
            elif "schedules" in question:
                reply = schedules(question["schedules"])
            else:
                reply = answer(question)
        print("@" + json.dumps(reply), flush=True)


@contextlib.contextmanager
def planted(defect):
    """A defect of a stand-in or of the planner within the block: the gate's tests must become red by it."""
    from megatron.core.extensions import transformer_engine
    from megatron.core.pipeline_parallel import p2p_communication
    from megatron.core.transformer.moe import token_dispatcher

    from superpod.rehearsal.comparison import communication
    from superpod.rehearsal.proof import pipeline_schedule, proof
    from superpod.rehearsal.te.compiled import enumerations, extension, kernels

    fused, compiled_part = enumerations.NVTE_Fused_Attn_Backend(1), sys.modules[extension.NAME]
    dispatcher, layer = token_dispatcher.MoETokenDispatcher, transformer_engine.TELayerNormColumnParallelLinear
    defects = {
        "experts dispatch over no group": (dispatcher, "__init__", _after(dispatcher.__init__, "ep_group", None)),
        "split layers have no group": (layer, "__init__", _after(layer.__init__, "tp_group", None)),
        "nothing is gathered or scattered": (communication, "GATHERS", ()),
        "stages exchange nothing": (p2p_communication, "_batched_p2p_ops", lambda **_: []),
        "a GEMM takes any FP8 shape": (kernels, "FP8_ALIGNMENT", 1),
        "every attention has a fused kernel": (compiled_part, "get_fused_attn_backend", lambda *_: fused),
        "the planner refuses nothing": (proof, "find_refused", lambda planned: []),
    }
    with contextlib.ExitStack() as stack:
        if defect is not None:
            stack.enter_context(mock.patch.dict(pipeline_schedule.RESULTS, clear=True))
            stack.enter_context(mock.patch.object(*defects[defect]))
        yield


def _after(init, name, value):
    """A constructor that then sets an attribute."""

    def changed(self, *args, **kwargs):
        init(self, *args, **kwargs)
        setattr(self, name, value)

    return changed


def schedules(count):
    """Random schedules whose shortened form does not end as all their micro-batches do: [] = none."""
    import torch
    from megatron.core.transformer import TransformerConfig

    from superpod.rehearsal.proof import meta_build, pipeline_schedule
    from superpod.rehearsal.te import build, cuda, device

    draw = random.Random(10)
    differing, ends = [], collections.Counter()
    cuda.disable_generators()
    for _ in range(count):
        pp, vp = draw.choice((1, 2, 3, 4)), draw.choice((None, 2, 3))
        vp = vp if pp > 1 else None
        steps, group = draw.randint(1, 40), draw.choice((None, *range(1, 9)))
        rank, layers = draw.randrange(pp), pp * (vp or 1)
        overlap = draw.random() < 0.3
        with device.generation("sm90"), cuda.use_meta_device(), build._suppress_output():
            sizes = {"pipeline_model_parallel_size": pp, "virtual_pipeline_model_parallel_size": vp}
            config = TransformerConfig(
                num_layers=layers,
                hidden_size=8,
                num_attention_heads=1,
                pipeline_dtype=torch.bfloat16,
                microbatch_group_size_per_vp_stage=group,
                overlap_p2p_comm=overlap,
                batch_p2p_comm=not overlap,
                **sizes,
            )
            with meta_build.fake_ranks(rank, pp, **sizes):
                batch = pipeline_schedule.Batch(1, steps)
                pipeline_schedule.RESULTS.clear()
                short = _end(lambda: pipeline_schedule.run(config, None, batch))  # noqa: B023
                whole = _end(lambda: pipeline_schedule._run(config, None, steps, vp or 1))  # noqa: B023
        ends[str(whole)[:60]] += 1
        if short != whole:
            differing.append([pp, vp, steps, group, overlap, short, whole])
    return {"differing": differing, "ends": ends}


def _end(work):
    try:
        return sorted(work())
    except Exception as refused:
        return f"{type(refused).__name__}: {refused}"


def prove(names, layout=None):
    """The failures of a proof of these recipes in this process; `layout`: changes of the smallest size's."""
    from superpod.collection import registry
    from superpod.collection.facts import proof_level
    from superpod.rehearsal.proof import proof, proof_pool, proof_store
    from tests.rehearsal.proof.proof_stub import InThisProcess

    recipes = [registry.find(name) for name in names]
    if layout is not None:
        recipes = [dataclasses.replace(r, layouts={r.nodes[0]: r.layout().replace(**layout)}) for r in recipes]
    with mock.patch.object(proof_pool, "Workers", InThisProcess), tempfile.TemporaryDirectory() as folder:
        done = proof.prove(recipes, cache_file=Path(folder) / "proof.json")
    return {
        "failures": [dataclasses.astuple(failure) for failure in done.failures],
        "differences": proof_store.differences(proof_level.read(), done.digests),
        "built": done.built_now,
        "different": done.built,
        "sizes": done.sizes,
    }


def answer(question):
    """Parameters and layers of the first and the last stage, or how they were refused."""
    import nemo_run as run

    from superpod.collection import registry
    from superpod.collection.facts import environment
    from superpod.nemo2 import overrides
    from superpod.nemo2.validation.configured_job import job, job_from_partial
    from superpod.recipes import build
    from superpod.rehearsal.te.build import build_with_te

    partial = build(question["recipe"], question.get("nodes"))
    recipe = registry.find(question["recipe"])
    planned = job(recipe, question.get("nodes"))
    if question.get("overrides"):
        overrides.apply(partial, question["overrides"])
        planned = job_from_partial(partial, recipe)
    variables = {variable.name: variable.value for variable in environment.variables(planned)}
    for name in question.get("without", ()):
        variables.pop(name)
    assert isinstance(partial, run.Partial)
    for path, value in question.get("set", {}).items():
        setattr(_owner(partial, path), path.rpartition(".")[2], value)
    for path in question.get("unset", ()):
        delattr(_owner(partial, path), path.rpartition(".")[2])
    generation = question.get("generation") or GENERATIONS[recipe.gpu]
    per_stage = planned.gpus // planned.layout.pp
    packed = question.get("packed", False)
    stages = sorted({0, planned.layout.pp - 1})
    try:
        built = [
            build_with_te(partial, stage * per_stage, planned.gpus, generation, variables, packed=packed)
            for stage in stages
        ]
    except Exception as refused:
        return {"refused": f"{type(refused).__name__}: {refused}"}
    counted = [sum(chunk.total for chunk in planned.model.chunk_parameters(planned.split, stage)) for stage in stages]
    attention = sorted(set().union(*(rank.attention for rank in built)))
    layers = sorted(set().union(*(rank.layers for rank in built)))
    return {
        "parameters": [sum(rank.parameters) for rank in built],
        "planned": counted,
        "layers": layers,
        "attention": attention,
    }


def _owner(partial, path):
    node = partial
    for name in path.split(".")[:-1]:
        node = getattr(node, name)
    return node


GENERATIONS = {
    "a100": "sm80",
    "h100": "sm90",
    "h200": "sm90",
    "b200": "sm100",
    "gb200": "sm100",
    "b300": "sm103",
    "gb300": "sm103",
}

if __name__ == "__main__":
    main()
