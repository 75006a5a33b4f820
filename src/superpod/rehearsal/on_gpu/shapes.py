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
    """A folded job, and all sizes of recipes that fold to it."""

    case: Case
    sizes: tuple[tuple[str, int], ...]
    """(recipe, number of nodes)"""
    gib: float
    """Memory in GiB that the planner expects."""


@dataclass(frozen=True)
class Shapes:
    """The shapes to test, and the sizes that cannot be tested."""

    shapes: tuple[Shape, ...]
    skipped: tuple[tuple[str, int, str], ...]
    """(recipe, number of nodes, reason)"""


def find_shapes(recipes: Iterable[Recipe], gpu: str) -> Shapes:
    """Fold all declared sizes of the recipes for GPUs with the compute capability of `gpu`.

    The first shapes belong to different models, so that an interrupted run has tested as many models as possible.

    Args:
        recipes: the recipes.
        gpu: the planner's name of this machine's GPU.
    """
    node = hardware.builtin().node(gpu)
    shapes: dict[str, Shape] = {}
    models: dict[str, str] = {}
    skipped_sizes = []
    for recipe in recipes:
        if hardware.node(recipe.gpu).gpu.sm != node.gpu.sm:
            continue
        for nodes in recipe.nodes:
            own_size = ((recipe.name, nodes),)
            try:
                folded_job = fold(Request(recipe.name, num_nodes=nodes).job()).job
                key = repr(folded_job.replace(node=node, fabric=hardware.builtin().fabric_of(node)))
                if key in shapes:
                    known_shape = shapes[key]
                    shapes[key] = Shape(known_shape.case, known_shape.sizes + own_size, known_shape.gib)
                else:
                    case = Case(recipe.name, nodes=nodes)
                    shapes[key] = Shape(case, own_size, predicted_gib(folded_job))
                    models[recipe.name] = recipe.model.name
            except (RehearsalError, UserError) as error:
                skipped_sizes.append((recipe.name, nodes, str(error)))
    return Shapes(tuple(_interleave_models(shapes.values(), models)), tuple(skipped_sizes))


def _interleave_models(shapes: Iterable[Shape], models: dict[str, str]) -> list[Shape]:
    """Sort shapes so that the n-th shape of every model comes before the next one of any model."""
    count: Counter[str] = Counter()
    rounds: list[tuple[int, Shape]] = []
    for shape in shapes:
        model = models[shape.case.recipe]
        rounds.append((count[model], shape))
        count[model] += 1
    return [shape for _, shape in sorted(rounds, key=lambda entry: entry[0])]
