"""Resolves sizes of recipes and builds the models of their pipeline ranks, in the processes of a proof.

The processes use Transformer Engine's layers (`te/import_te.py`); `start` prepares a process.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import importlib
import logging
import signal
import sys
import warnings
from collections.abc import Iterator
from typing import Any, NamedTuple
from unittest import mock

from superpod.collection import registry
from superpod.collection.facts import environment
from superpod.collection.recipe_job import job
from superpod.collection.registry import Recipe
from superpod.planner.layout import Layout
from superpod.rehearsal.proof import resolved
from superpod.rehearsal.proof.proof_store import Outcome, Resolution, digest
from superpod.rehearsal.te.device import UnknownGenerationError

DEPENDS_ON_WORLD_SIZE = ("DATA_PARALLEL", "default_pg", "EXPERT_DATA_PARALLEL")
"""Substrings of the names of process groups whose size depends on the number of GPUs, not only on the layout."""
SETUP_FUNCTIONS = ("fake_ranks", "_app_state", "micro_batches")
"""Functions other than constructors that may read these sizes: for Megatron's grid of ranks, NeMo's AppState, and the
number of micro-batches, with which the schedule of each size is run."""
ONE_OR_SEVERAL = (
    "initialize_ub",  # a group for each copy of the model (TE 2.9.0 module/base.py)
    "fuse_userbuffers_forward_linear",  # nothing to overlap on one GPU (ops/fused/userbuffers_forward_linear.py)
    "fuse_userbuffers_backward_linear",
    "reduce_and_update_fp8_tensors",  # scales are reduced over several ranks (quantization.py)
)
"""Functions that distinguish only between 1 and larger sizes. The digest includes this difference (`resolved.py`)."""
WITHOUT_EFFECT = ("_Linear.forward",)
"""Functions that read the size of the default group if no group is passed, but do not use it (TE 2.9.0
module/linear.py, a row-parallel layer with sequence parallelism)."""
GPU_PACKAGES = ("mamba_ssm", "mamba-ssm", "causal_conv1d", "causal-conv1d", "flashfftconv", "subquadratic")
"""Packages of CUDA kernels; an import error with one of these names means that a model cannot be built here."""


class SizeKey(NamedTuple):
    """A recipe on a number of nodes, in a form that can be sent to another process."""

    recipe: str
    nodes: int
    layout: Layout

    @classmethod
    def from_recipe(cls, recipe: Recipe, nodes: int) -> SizeKey:
        """Return the key of a recipe at a number of nodes."""
        return cls(recipe.name, nodes, recipe.layout(nodes))

    def find(self) -> Recipe:
        """Return the recipe with this layout."""
        return dataclasses.replace(registry.find(self.recipe), layouts={self.nodes: self.layout})


def start() -> None:
    """Import Transformer Engine's layers and NeMo in this process, and ignore Ctrl-C, which the parent handles."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends Ctrl-C to all processes
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    with contextlib.redirect_stdout(sys.stderr):
        for name in ("superpod.rehearsal.te.import_te", "superpod.nemo2.build.partial"):  # NeMo last
            importlib.import_module(name)
    gc.freeze()  # excludes a million objects of NeMo from garbage collection
    gc.set_threshold(200_000, 20, 20)


def resolve_all(sizes: list[SizeKey]) -> list[Resolution]:
    """Resolve the configuration of each size; an error of Megatron or NeMo is part of the result."""
    return [_run(functools.partial(_resolve_size, size)) for size in sizes]  # type: ignore[return-value]


def build_all(sizes: list[SizeKey]) -> list[Outcome]:
    """Build the first, a middle and the last pipeline rank of each size; an error is part of the result."""
    return [_run(functools.partial(_build_size, size)) for size in sizes]  # type: ignore[return-value]


def _run(work: Any) -> Resolution | Outcome:
    """Return the result of `work`, or its exception as `error`, or as `missing` if a GPU machine would not raise it."""
    try:
        return work()
    except Exception as error:  # all exceptions of Megatron, NeMo and Transformer Engine are results
        text = f"{type(error).__name__}: {error}".strip().replace("\n", " ")[:500]
        needs_package = isinstance(error, ImportError) and any(name in text for name in GPU_PACKAGES)
        if needs_package or isinstance(error, UnknownGenerationError):
            return {"missing": text}
        return {"error": text}


def _resolve_size(size: SizeKey) -> Resolution:
    from superpod.nemo2.build import partial

    recipe = size.find()
    inputs = resolved.resolve(recipe, size.nodes, partial.build(recipe, size.nodes))
    return {"digest": resolved.digest(inputs)}


def _build_size(size: SizeKey) -> Outcome:
    from superpod.nemo2.build import partial
    from superpod.rehearsal.te.build import build_with_te

    recipe, nodes = size.find(), size.nodes
    world, configuration = nodes * recipe.gpus_per_node, partial.build(recipe, nodes)
    variables = {v.name: v.value for v in environment.variables(job(recipe, nodes))}
    generation, vocabulary = resolved.generation(recipe), recipe.model.shape.vocab
    builds = []
    with _record_measured_groups() as groups:
        for stage in resolved.stages(size.layout):
            rank = stage * (world // size.layout.pp)
            builds.append(build_with_te(configuration, rank, world, generation, variables, vocabulary=vocabulary))

    build_facts = [[b.tensors, sorted(b.layers), sorted(b.attention), sorted(b.communication)] for b in builds]
    outcome: Outcome = {
        "parameters": [build.parameters for build in builds],
        "layers": sorted(set[str]().union(*(build.layers for build in builds))),
        "built": digest(build_facts),
    }
    if groups:
        outcome["world"] = sorted(groups)
    return outcome


@contextlib.contextmanager
def _record_measured_groups() -> Iterator[set[str]]:
    """Yield a set that collects the groups of `DEPENDS_ON_WORLD_SIZE` whose size a constructor reads in the block.

    One build is valid for all data-parallel sizes only if no constructor reads the size of such a group.
    """
    import torch.distributed as dist

    measured: set[str] = set()
    original = dist.ProcessGroup.size

    def size(group: Any) -> int:
        name = str(group.group_desc)
        if any(part in name for part in DEPENDS_ON_WORLD_SIZE) and not _is_called_by_exempt_function():
            measured.add(name)
        return original(group)

    with mock.patch.object(dist.ProcessGroup, "size", size):
        yield measured


def _is_called_by_exempt_function() -> bool:
    """Return whether one of `SETUP_FUNCTIONS`, `ONE_OR_SEVERAL` and `WITHOUT_EFFECT` is on the call stack."""
    frame = sys._getframe(2)
    while frame is not None:
        if frame.f_code.co_name in (*SETUP_FUNCTIONS, *ONE_OR_SEVERAL) or frame.f_code.co_qualname in WITHOUT_EFFECT:
            return True
        frame = frame.f_back
    return False
