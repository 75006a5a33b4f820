"""What NeMo, Lightning and Megatron do with a configuration before the first rank starts, done here without ranks.

Every object of the configuration is constructed, so that its own checks run: data module, logger, resumption, each
callback and Lightning's trainer. Then they are connected as `llm.pretrain` connects them, NeMo's own validation runs,
and a field that an override has set, and that the libraries write over, is named: it would be lost without a message.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import os
from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest import mock

from superpod.planner.rules import Broken
from superpod.recipes.rules import built
from superpod.recipes.rules.reading import Reader
from superpod.recipes.signatures import parameter_of

if TYPE_CHECKING:
    import nemo_run as run

NO_CLUSTER = (OSError, ImportError)
"""Errors of a file or a package that this machine lacks: no mistake of the configuration."""
HARMLESS = ("trainer.strategy.pipeline_dtype",)
"""Fields that NeMo clears where they mean nothing: a type of what pipeline stages send, where there is one stage."""
SOURCES = {
    "model.config": "the precision plugin (trainer.plugins) or the overlap callback (trainer.callbacks[i])",
    "optim.config": "the precision plugin (trainer.plugins) or the overlap callback (trainer.callbacks[i])",
    "trainer.strategy.ddp": "the precision plugin (trainer.plugins) or the overlap callback (trainer.callbacks[i])",
    "trainer.strategy": "the degree of parallelism that it belongs to",
}
"""Part of a configuration -> what else sets its fields when a run starts."""


@dataclass(frozen=True)
class Objects:
    """The constructed parts of a configuration."""

    model: Any
    data: Any
    trainer: Any
    optim: Any

    def of(self, part: str) -> Any:
        """The object that a part of the configuration became."""
        strategy = self.trainer.strategy
        return {
            "model.config": getattr(self.model, "config", None),
            "optim.config": getattr(self.optim, "config", None),
            "trainer.strategy.ddp": getattr(strategy, "ddp_config", None),
            "trainer.strategy": strategy,
        }[part]


def violations(r: Reader) -> Iterator[Broken]:
    """What the libraries refuse before the first step, and what they write over."""
    if r["model.config"] is None or r["trainer.strategy"] is None:
        return
    with _quiet():
        objects, problem = _constructed(r)
        if problem is None and objects is not None:
            problem = _refusal("data", lambda: _check_batches(r, objects.data))
        if problem is not None or objects is None:
            yield from filter(None, [problem])
            return
        paths = list(_overridden_fields(r))
        before = {path: _read(objects, path) for path in paths}
        problem = _refusal("the recipe", lambda: _connect(r, objects))
        if problem is not None:
            yield problem
            return
        for path in paths:
            if (after := _read(objects, path)) != before[path]:
                part = _part(path)
                yield Broken(
                    "written_over",
                    f"{path} is {_short(before[path])}, and NeMo writes {_short(after)} over it when the run starts",
                    f"it follows from {SOURCES[part]}: change it there",
                )


# -- constructing ----------------------------------------------------------------------------------------------------


def _constructed(r: Reader) -> tuple[Objects | None, Broken | None]:
    """The objects, or the first refusal; (None, None) where this machine cannot construct what the others need."""
    import fiddle as fdl

    parts = _without_cluster(r.partial)
    made: dict[str, Any] = {"data": SimpleNamespace(**parts["data"].__arguments__)}  # where its files are not here
    for name, part in parts.items():
        problem = _refusal(name, lambda name=name, part=part: made.update({name: fdl.build(part)}))
        if problem is not None:
            return None, problem
    if "model" not in made or "trainer" not in made:
        return None, None
    return Objects(made["model"], made["data"], made["trainer"], made.get("optim")), None


def _without_cluster(partial: run.Partial) -> dict[str, Any]:
    """The parts in the order in which they are constructed, without what needs a GPU, a network or other files."""
    import fiddle as fdl

    whole = copy.deepcopy(partial)
    trainer = whole.trainer
    parts: dict[str, Any] = {}
    for number, callback in enumerate(trainer.callbacks or []):
        parts[f"trainer.callbacks[{number}]"] = callback
    for name in ("log", "resume", "optim"):
        part = getattr(whole, name, None)
        if part is not None:
            parts[name] = part
    if hasattr(parts.get("optim"), "config"):
        parts["optim"].config = built.without_gpu_software(parts["optim"].config)
    data = whole.data
    if parameter_of(fdl.get_callable(data), "tokenizer"):  # without one, NeMo downloads GPT-2's
        data.tokenizer = SimpleNamespace(vocab_size=2**16, eos_id=0)
    parts["data"] = data
    model = whole.model
    if hasattr(model, "tokenizer"):
        model.tokenizer = None
    model.config = built.without_gpu_software(model.config)
    parts["model"] = model
    # Lightning looks for GPUs as it is constructed; one CPU stands in, and `_connect` gives the sizes.
    trainer.accelerator, trainer.devices, trainer.num_nodes = "cpu", 1, 1
    parts["trainer"] = trainer
    return parts


def _refusal(path: str, act: Any) -> Broken | None:
    """What calling `act` raises, as the configuration's mistake; None = nothing, or this machine's lack."""
    try:
        act()
    except NO_CLUSTER:
        return None
    except Exception as error:  # each library has exceptions of its own
        line = built.first_line(error)
        if built.is_of_this_machine(line):
            return None
        return Broken("started", f"{path}: {type(error).__name__}: {line}", f"look at the overrides of {path}")
    return None


# -- starting --------------------------------------------------------------------------------------------------------


def _check_batches(r: Reader, data: Any) -> None:
    """Have Megatron compute the micro-batches of every size that the global batch takes while it ramps up."""
    from megatron.core.num_microbatches_calculator import _build_num_microbatches_calculator

    ramp = r["data.rampup_batch_size"]
    ranks = (r["trainer.devices"] or 1) * (r["trainer.num_nodes"] or 1)
    degrees = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size")
    for degree in degrees:
        ranks //= max(1, r[f"trainer.strategy.{degree}"] or 1)
    if ramp is None or ranks < 1:
        return
    calculator = _build_num_microbatches_calculator(
        1, ramp, data.global_batch_size, data.micro_batch_size, ranks, False
    )
    start, increment, samples = (int(number) for number in ramp)
    for number in range((data.global_batch_size - start) // increment + 1):
        steps = max(1, (data.global_batch_size - start) // increment)
        calculator.update(int(samples * number / steps) + 1, consistency_check=True)


def _connect(r: Reader, objects: Objects) -> None:
    """NeMo's own validation, and what it writes into the configurations, in the order of `llm.pretrain`."""
    from nemo.collections.llm import api

    strategy = objects.trainer.strategy
    devices, nodes = r["trainer.devices"], r["trainer.num_nodes"]
    sizes = SimpleNamespace(strategy=strategy, num_devices=devices, num_nodes=nodes)
    api._validate_config(objects.model, objects.data, sizes)  # pyright: ignore[reportArgumentType]
    if objects.optim is not None:
        objects.optim.connect(objects.model)
    strategy.connect(objects.model)
    trainer = SimpleNamespace(strategy=strategy, model=objects.model)
    with _data_parallel(r):
        for callback in objects.trainer.callbacks:
            if type(callback).__name__ != "MegatronCommOverlapCallback":
                continue
            with mock.patch.object(callback, "_check_num_cuda_device_max_connections"):
                callback.setup(trainer, objects.model, "fit")
    config = objects.model.config
    if config.overlap_p2p_comm and strategy.pipeline_model_parallel_size > 1 and not _is_interleaved(strategy):
        # core/pipeline_parallel/schedules.py, forward_backward_pipelining_without_interleaving, at the first step
        raise ValueError("overlap_p2p_comm is on, and only the interleaved schedule overlaps: it needs virtual stages")


def _is_interleaved(strategy: Any) -> bool:
    return (strategy.virtual_pipeline_model_parallel_size or 1) > 1


@contextlib.contextmanager
def _data_parallel(r: Reader) -> Iterator[None]:
    """NeMo's record of the data-parallel size, which its overlap callback reads."""
    from nemo.utils import AppState

    state = AppState()
    before = dict(vars(state))
    ranks = r["trainer.devices"] * r["trainer.num_nodes"]
    for degree in ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size"):
        ranks //= r[f"trainer.strategy.{degree}"] or 1
    state.data_parallel_size = ranks
    try:
        yield
    finally:
        vars(state).clear()
        vars(state).update(before)


# -- comparing -------------------------------------------------------------------------------------------------------


def _overridden_fields(r: Reader) -> Iterator[str]:
    """Paths of single fields that overrides set in a part whose object is known."""
    paths = dict.fromkeys(text.partition("=")[0].rstrip(" +-*/|&") for text in r.overrides if "=" in text)
    for path in paths:
        if _part(path) and path not in HARMLESS and path.count(".") == _part(path).count(".") + 1:
            yield path


def _part(path: str) -> str:
    """The longest part of `SOURCES` that holds a field; "" = none."""
    return next((part for part in sorted(SOURCES, key=len, reverse=True) if path.startswith(f"{part}.")), "")


def _read(objects: Objects, path: str) -> Any:
    return getattr(objects.of(_part(path)), path.rpartition(".")[2], None)


def _short(value: Any) -> str:
    return str(getattr(value, "__name__", repr(value)))[:80]


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without what the libraries log, warn about, and set for the whole process as they are constructed."""
    import gc
    import warnings

    import torch

    level, collects, exact = logging.root.manager.disable, gc.isenabled(), torch.are_deterministic_algorithms_enabled()
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings(), mock.patch.dict(os.environ):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(level)
        torch.use_deterministic_algorithms(exact)  # Lightning's trainer and NeMo's callback set these for the process
        if collects:
            gc.enable()
