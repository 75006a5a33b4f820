"""What the processes of a proof do: resolve sizes of recipes, and build the models of their pipeline ranks.

Runs in processes of its own, with Transformer Engine's layers (`te/entry.py`): `start` prepares one.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import importlib
import logging
import signal
import sys
import warnings
from collections.abc import Iterator
from functools import partial as with_first
from typing import TYPE_CHECKING, Any, NamedTuple
from unittest import mock

from superpod.collection import registry
from superpod.collection.facts import environment
from superpod.collection.recipe_job import job
from superpod.collection.registry import Recipe
from superpod.errors import UserError
from superpod.planner.layout import Layout
from superpod.rehearsal.proof import resolved
from superpod.rehearsal.proof.proof_store import Outcome, Resolution, digest

if TYPE_CHECKING:
    from nemo_run import Partial

FROM_THE_WORLD = ("DATA_PARALLEL", "default_pg", "EXPERT_DATA_PARALLEL")
"""Process groups, by parts of Megatron's names, whose size follows from the number of GPUs, not from the layout."""
SETS_UP = ("fake_ranks", "_app_state", "micro_batches")
"""Functions around the constructors that may measure them: Megatron's grid, NeMo's state of it, and the micro-batches
of a step, whose schedule runs for each size as it is resolved."""
ONE_OR_SEVERAL = (
    "initialize_ub",  # a group for each copy of the model (TE 2.9.0 module/base.py)
    "fuse_userbuffers_forward_linear",  # nothing to hide on one GPU (ops/fused/userbuffers_forward_linear.py)
    "fuse_userbuffers_backward_linear",
    "reduce_and_update_fp8_tensors",  # scales are reduced over several ranks (quantization.py)
)
"""Functions that ask of a size only whether it is 1: the digest has that (`resolved.py`)."""
WITHOUT_EFFECT = ("_Linear.forward",)
"""Functions that use the size only of a group that they were given: one without asks that of all ranks, and leaves it
(TE 2.9.0 module/linear.py, a row-parallel layer with sequence parallelism)."""
NEEDS_GPU_PACKAGE = ("mamba_ssm", "mamba-ssm", "causal_conv1d", "causal-conv1d", "flashfftconv", "subquadratic")
"""Packages that exist only as CUDA kernels; an error that names one says that a model cannot be built here."""


class SizeKey(NamedTuple):
    """A size of a recipe, as a process can be told of it."""

    recipe: str
    nodes: int
    layout: Layout

    @classmethod
    def of(cls, recipe: Recipe, nodes: int) -> SizeKey:
        """A recipe at so many nodes."""
        return cls(recipe.name, nodes, recipe.layout(nodes))

    def find(self) -> Recipe:
        """The recipe, laid out as here."""
        return dataclasses.replace(registry.find(self.recipe), layouts={self.nodes: self.layout})


def start() -> None:
    """Prepare this process: Transformer Engine's layers, then NeMo, without its warnings; Ctrl-C is the parent's."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    with contextlib.redirect_stdout(sys.stderr):
        for name in ("superpod.rehearsal.te.entry", "superpod.nemo2.build.partial"):  # in this order: NeMo comes last
            importlib.import_module(name)
    gc.freeze()  # a million objects of NeMo's, which every collection would walk
    gc.set_threshold(200_000, 20, 20)


def resolve_all(sizes: list[SizeKey]) -> list[Resolution]:
    """Resolve each."""
    return [_outcome(with_first(_resolve, size)) for size in sizes]  # type: ignore[return-value]


def build_all(sizes: list[SizeKey]) -> list[Outcome]:
    """Build the first, a middle and the last pipeline rank of each."""
    return [_outcome(with_first(_build, size)) for size in sizes]  # type: ignore[return-value]


def _outcome(work: Any) -> Resolution | Outcome:
    try:
        return work()
    except Exception as error:  # whatever Megatron, NeMo or Transformer Engine raises is the result
        text = f"{type(error).__name__}: {error}".strip().replace("\n", " ")[:500]
        kernels = isinstance(error, ImportError) and any(name in text for name in NEEDS_GPU_PACKAGE)
        missing = kernels or (isinstance(error, UserError) and "no GPU generation" in text)
        return {"missing": text} if missing else {"error": text}


def _resolve(size: SizeKey) -> Resolution:
    recipe = size.find()
    return {"digest": resolved.digest(resolved.resolved(recipe, size.nodes, _partial(recipe, size.nodes)))}


def _build(size: SizeKey) -> Outcome:
    from superpod.rehearsal.te.build import build_with_te

    recipe, nodes = size.find(), size.nodes
    world, partial = nodes * recipe.gpus_per_node, _partial(recipe, nodes)
    variables = {v.name: v.value for v in environment.variables(job(recipe, nodes))}
    ranks = [stage * (world // size.layout.pp) for stage in resolved.stages(size.layout)]
    with _measured() as groups:
        builds = [
            build_with_te(
                partial, rank, world, resolved.generation(recipe), variables, vocabulary=recipe.model.shape.vocab
            )
            for rank in ranks
        ]
    layers = sorted(set[str]().union(*(build.layers for build in builds)))
    made = [[b.tensors, sorted(b.layers), sorted(b.attention), sorted(b.communication)] for b in builds]
    outcome: Outcome = {
        "parameters": [build.parameters for build in builds],
        "layers": layers,
        "built": digest(made),
    }
    return outcome | {"world": sorted(groups)} if groups else outcome


def _partial(recipe: Recipe, nodes: int) -> Partial:
    from superpod.nemo2.build import partial

    return partial.build(recipe, nodes)


@contextlib.contextmanager
def _measured() -> Iterator[set[str]]:
    """The groups of `FROM_THE_WORLD` whose size a constructor takes within it.

    A digest leaves out the data-parallel size, so that one build stands for all worlds. That holds only while no
    constructor measures such a group: this watches every one.
    """
    import torch.distributed as dist

    measured: set[str] = set()
    original = dist.ProcessGroup.size

    def size(group: Any) -> int:
        name = str(group.group_desc)
        if any(part in name for part in FROM_THE_WORLD) and not _sets_up():
            measured.add(name)
        return original(group)

    with mock.patch.object(dist.ProcessGroup, "size", size):
        yield measured


def _sets_up() -> bool:
    """Whether one of `SETS_UP`, `ONE_OR_SEVERAL` or `WITHOUT_EFFECT` is among the callers."""
    frame = sys._getframe(2)
    while frame is not None:
        if frame.f_code.co_name in (*SETS_UP, *ONE_OR_SEVERAL) or frame.f_code.co_qualname in WITHOUT_EFFECT:
            return True
        frame = frame.f_back
    return False
