"""Groups the sizes of recipes by the job that one of their ranks executes, so that each job is tested once on a GPU."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from superpod.collection.declarations import Recipe
from superpod.errors import UserError
from superpod.planner import hardware
from superpod.rehearsal.errors import RehearsalError
from superpod.rehearsal.on_gpu.case import Case
from superpod.rehearsal.on_gpu.fold import fold, predicted_gib
from superpod.requests.request import Request


@dataclass(frozen=True)
class Shape:
    """A folded job, and all sizes of recipes whose ranks execute it."""

    case: Case
    sizes: tuple[tuple[str, int], ...]
    """(recipe, number of nodes)"""
    gib: float
    """Reserved GPU memory in GiB that the planner predicts."""


@dataclass(frozen=True)
class Shapes:
    """The shapes to test, and the sizes that cannot be tested."""

    shapes: tuple[Shape, ...]
    skipped: tuple[tuple[str, int, str], ...]
    """(recipe, number of nodes, reason)"""


def find_shapes(recipes: Iterable[Recipe], gpu: str) -> Shapes:
    """Fold all declared sizes of those recipes whose GPU has the compute capability of `gpu`.

    The first shapes belong to different models, so that an interrupted run has tested as many models as possible.

    Args:
        recipes: the recipes; those for other GPUs are ignored.
        gpu: the planner's name of this machine's GPU, such as `h100`.
    """
    node = hardware.builtin().node(gpu)
    shapes: dict[str, Shape] = {}
    models: dict[str, str] = {}
    skipped_sizes = []
    for recipe in recipes:
        if hardware.node(recipe.gpu).gpu.sm != node.gpu.sm:
            continue
        for nodes in recipe.nodes:
            size = (recipe.name, nodes)
            try:
                folded_job = fold(Request(recipe.name, num_nodes=nodes).job())
                key = repr(folded_job.replace(node=node, fabric=hardware.builtin().fabric_of(node)))
                if key in shapes:
                    known_shape = shapes[key]
                    shapes[key] = Shape(known_shape.case, (*known_shape.sizes, size), known_shape.gib)
                else:
                    case = Case(recipe.name, nodes=nodes)
                    shapes[key] = Shape(case, (size,), predicted_gib(folded_job))
                    models[recipe.name] = recipe.model.name
            except (RehearsalError, UserError) as error:
                skipped_sizes.append((recipe.name, nodes, str(error)))
    return Shapes(tuple(_interleave_models(shapes.values(), models)), tuple(skipped_sizes))


def _interleave_models(shapes: Iterable[Shape], models: dict[str, str]) -> list[Shape]:
    """Sort shapes so that the n-th shape of every model precedes the (n+1)-th shape of any model.

    `models` is {name of a recipe: name of its model}.
    """
    count: Counter[str] = Counter()
    rounds: list[tuple[int, Shape]] = []
    for shape in shapes:
        model = models[shape.case.recipe]
        rounds.append((count[model], shape))
        count[model] += 1
    return [shape for _, shape in sorted(rounds, key=lambda entry: entry[0])]
