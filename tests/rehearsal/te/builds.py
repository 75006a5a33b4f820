"""Builds with Transformer Engine's layers, in a process of their own: questions as JSON on stdin, answers on stdout.

No test process can do it: theirs may have NeMo with a rehearsal's patches.
"""

import json
import sys


def main():
    import superpod.rehearsal.te.entry  # noqa: F401 - before NeMo
    from superpod.recipes import build

    for question in map(json.loads, sys.stdin):
        partial = build(question["recipe"], question.get("nodes"))
        print("@" + json.dumps(answer(partial, question)), flush=True)


def answer(partial, question):
    """Parameters and layers of the first and the last stage, or how they were refused."""
    import nemo_run as run

    from superpod.recipes import overrides, registry
    from superpod.recipes.facts import environment
    from superpod.recipes.planned_job import job, of_partial
    from superpod.rehearsal.te.build import build_with_te

    recipe = registry.find(question["recipe"])
    planned = job(recipe, question.get("nodes"))
    if question.get("overrides"):
        overrides.apply(partial, question["overrides"])
        planned = of_partial(partial, recipe)
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
