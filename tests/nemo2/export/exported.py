"""exported.py FOLDER: export recipes to FOLDER, run the files without this project, and write the results as JSON.

`answers()` does this for pytest, once per session, in a process of its own that imports NeMo once.
"""

import atexit
import enum
import json
import os
import pathlib
import re
import runpy
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from superpod.common import package_files
from superpod.errors import UserError

COMPLETE = package_files.included_folder("recipes") / "complete"
SCOPE = "SUPERPOD_EXPORT"
"""Environment variable: which recipes are exported, at 0.2 to 0.4 s each.

`family` (the default): the first of each family and task, and of each GPU and precision. `model` (`make test-long`):
also the first of each model and task. `every`: all of them.
"""

DIFFS = (
    ("tiny_llama3", "tiny_llama3"),
    ("tiny_llama3", "tiny_llama3_fp32"),
    ("llama3_8b_pretrain_h100_bf16", "nemo:llama3_8b"),
    ("nemo:llama3_8b", "nemo:llama3_8b.finetune_recipe"),
    ("tiny_llama3", "nemo:llama3_9b"),
    ("tiny_llama3", "nemo:llama3_8b.train_recipe"),
    ("tiny_llama3", "nemo:llama33_nemotron_super_49b"),
    ("tiny_llama3", "nemo:llama3_8b.run_cli"),
)


def chosen() -> list[str]:
    """Return the names of the exported recipes; see `SCOPE`."""
    from superpod.collection.registry import recipes

    scope = os.environ.get(SCOPE, "family")
    if scope == "every":
        return list(recipes())
    first: dict[tuple[str, ...], str] = {}
    for name, recipe in recipes().items():
        first.setdefault((recipe.model.family, recipe.task), name)
        first.setdefault((recipe.gpu, recipe.precision), name)
        if scope == "model":
            first.setdefault((recipe.model.name, recipe.task), name)
    shown = {*complete_files(), *GPU_RECIPES, "llama31_nemotron_ultra_253b_pretrain_a100_bf16"}
    return [name for name in recipes() if name in shown | set(first.values())]


def complete_files() -> list[str]:
    """The names of the recipes that recipes/complete/ has as exported files."""
    return sorted(path.stem for path in COMPLETE.glob("*.py"))


def answers() -> dict[str, Any]:
    """Return the output of `main`, and the folder of the exported files as `folder`."""
    folder, failed = _answer()
    assert not failed, failed
    return json.loads((folder / "answer.json").read_text()) | {"folder": folder}


@cache
def _answer() -> tuple[Path, str]:
    folder = tempfile.TemporaryDirectory(prefix="exported-")
    atexit.register(folder.cleanup)
    command = [sys.executable, "-W", "ignore", __file__, folder.name]
    done = subprocess.run(command, capture_output=True, text=True, timeout=4 * 3600)
    return Path(folder.name), done.stderr[-4000:] if done.returncode else ""


def main(folder: Path) -> None:
    answer = {
        "wrong": {name: lines for name in chosen() if (lines := exported(name, folder))},
        "nemo": {name: exported(f"nemo:{name}", folder) for name in ("llama3_8b.finetune_recipe", "deepseek_v3")},
        "started": {name: started(folder / f"{name}.py") for name in ("tiny_llama3", "llama3_70b_pretrain_h100_bf16")},
        "environment": {name: environment_of(name) for name in ("tiny_llama3", *GPU_RECIPES)},
        "executor": executor(folder / f"{GPU_RECIPES[0]}.py"),
        "data": data_line(),
        "edited": edited(folder / "llama3_70b_pretrain_h100_bf16.py"),
        "values": values(folder),
        "refused": [refused(value) for value in (lambda: None, UserError, object(), Inner())],
        "diffs": {" ".join(pair): differing(*pair) for pair in DIFFS},
        "fields": fields(),
    }
    changed(folder)
    (folder / "answer.json").write_text(json.dumps(answer))


def exported(name: str, folder: Path) -> list[str]:
    """Return the lines in which a recipe and its exported file differ; the file runs without superpod."""
    from superpod.collection import registry
    from superpod.collection.facts import environment
    from superpod.nemo2.export import diff, recipe_source
    from superpod.nemo2.export.flatten import flatten
    from superpod.nemo2.export.heading import heading
    from superpod.nemo2.validation.configured_job import job_from_partial
    from superpod.rehearsal.script import block_project_imports

    partial: Any = diff.load(name)
    top, variables = name, []
    if not name.startswith(diff.NEMO):
        recipe = registry.find(name)
        top = heading(recipe, partial, f"recipes export {name}")
        variables = environment.variables(job_from_partial(partial, recipe))
    file = folder / f"{name.replace(':', '_').replace('.', '_')}.py"
    file.write_text(recipe_source.render(partial, top, variables))
    with block_project_imports():
        copy = runpy.run_path(str(file))["recipe"]()
    if "log.log_dir = None" not in {str(line) for line in flatten(partial)}:
        assert copy.log.log_dir is None or not variables  # the file says NeMo's default
        del copy.log.log_dir
    return sorted({str(line) for line in flatten(copy)} ^ {str(line) for line in flatten(partial)})


GPU_RECIPES = ("llama3_70b_pretrain_h100_bf16", "llama3_70b_pretrain_a100_bf16", "llama2_7b_pretrain_b200_mxfp8")


def environment_of(name: str) -> dict[str, str]:
    """Return the environment variables of a recipe."""
    from superpod.collection.facts import environment
    from superpod.collection.recipe_job import job
    from superpod.collection.registry import find

    return {variable.name: variable.value for variable in environment.variables(job(find(name)))}


def executor(file: Path) -> dict[str, str]:
    """Return the environment of a NeMo-Run executor with the variables of a file."""
    import nemo_run as run

    return run.LocalExecutor(env_vars=runpy.run_path(str(file))["ENVIRONMENT"]).env_vars


def data_line() -> list[str]:
    """Return the constant in the file of a recipe that reads a list of two tokenized texts."""
    import nemo_run as run
    from nemo.collections import llm

    from superpod.nemo2.export import recipe_source
    from superpod.recipes import build

    partial: Any = build("tiny_llama3")
    sizes = {key: getattr(partial.data, key) for key in ("seq_length", "micro_batch_size", "global_batch_size")}
    partial.data = run.Config(llm.PreTrainingDataModule, paths=["a_text", "b_text"], **sizes)
    return [line for line in recipe_source.render(partial, "Two texts.").splitlines() if line.startswith("DATA =")]


EDITED = {"NODES": 8, "SEQ_LENGTH": 4096, "GLOBAL_BATCH_SIZE": 64, "LEARNING_RATE": 1e-3, "FOLDER": "/scratch/me"}


def edited(file: Path) -> list[object]:
    """Return fields of a file's recipe after its constants were edited like in `EDITED`."""
    text = file.read_text()
    for name, value in EDITED.items():
        text = re.sub(rf"^{name} = .*$", f"{name} = {value!r}", text, count=1, flags=re.MULTILINE)
    names: dict[str, Any] = {"__name__": "edited"}
    exec(text, names)
    r = names["recipe"]()
    seq = [r.data.seq_length, r.model.config.seq_length]
    return [r.trainer.num_nodes, *seq, r.data.global_batch_size, r.optim.config.lr, r.log.log_dir]


def started(file: Path) -> list[str]:
    """Return the command that a file starts without a launcher, or its error message."""
    started: list[str] = []
    real, os.execv = os.execv, lambda _, command: started.extend(command)  # type: ignore[assignment]
    try:
        runpy.run_path(str(file), run_name="__main__")
    except SystemExit as end:
        started.append(str(end.code))
    finally:
        os.execv = real
    return started


TRAINED = ("tiny_llama3", "tiny_llama3_sft", "tiny_llama3_lora")
"""Recipes whose files are trained without this project."""


def changed(folder: Path) -> None:
    """Export a recipe of each task with two small steps for a rehearsal."""
    from superpod.nemo2 import overrides
    from superpod.nemo2.export import recipe_source
    from superpod.recipes import build

    short = ["trainer.max_steps=2", "trainer.limit_val_batches=0", "trainer.limit_test_batches=0"]
    (folder / "alone").mkdir()
    for name in TRAINED:
        partial = build(name)
        overrides.apply(partial, [*short, "data.global_batch_size=4", "data.micro_batch_size=2"])
        (folder / "alone" / f"{name}.py").write_text(recipe_source.render(partial, "Two steps."))


class Color(enum.Enum):
    RED = "red"


@dataclass
class Inner:
    color: Color = Color.RED
    sizes: tuple[int, ...] = (1,)


def function(*positional: object, **named: object) -> object:
    return positional, named


def values(folder: Path) -> str:
    """Return the source of a configuration with a value of every kind, which `render` checks."""
    sys.modules["exported_values"] = sys.modules[__name__]
    (folder / "exported_values.py").write_text("")
    for thing in (Color, Inner, function):
        thing.__module__ = "exported_values"
    import nemo_run as run
    import torch

    from superpod.nemo2.export import recipe_source

    nested = run.Config(dict, one=run.Partial(function, b=2), words=["it's", 'a "b"', "line\nend", "ü" * 80])
    whole = run.Partial(
        function,
        numbers=[1e-5, float("inf"), -3, 2 + 1j, True, None, b"raw"],
        things=[torch.bfloat16, Color.RED, Inner(sizes=(2, 3)), function, int, pathlib.PurePosixPath("a/b")],
        holders=[(), (1,), {"k": (1, 2), "3": [4]}, {5}, frozenset({6}), set()],
        nested=nested,
        configs=[nested.one.__class__(function, c=3), run.Config(function)],
    )
    return recipe_source.render(whole, "Values.")


def refused(value: object) -> str:
    """Return the error message of exporting a recipe with this value."""
    import nemo_run as run

    from superpod.nemo2.export import recipe_source

    if isinstance(value, Inner):  # one configuration in two places: two would be built of the copy
        twice = run.Config(function, a=1)
        try:
            recipe_source.render(run.Partial(function, a=twice, b=twice), "")
        except RuntimeError as error:
            return str(error)
    try:
        recipe_source.render(run.Partial(function, value=value), "")
    except UserError as error:
        return str(error)
    return "not refused"


def differing(a: str, b: str) -> list[Any]:
    from superpod.nemo2.export import diff

    try:
        return [vars(difference) for difference in diff.differences(diff.load(a), diff.load(b))]
    except UserError as error:
        return [str(error), error.hint]


def fields() -> list[str]:
    """Return possible last names of paths: parameters of the classes in recipes, and callback classes."""
    from lightning.pytorch import Trainer
    from lightning.pytorch.loggers import TensorBoardLogger
    from lightning.pytorch.strategies import DDPStrategy
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig
    from nemo import lightning as nl
    from nemo.collections import llm
    from nemo.collections.llm.t5.data import MockDataModule as T5Data
    from nemo.lightning.pytorch.callbacks import megatron_comm_overlap
    from nemo.lightning.pytorch.callbacks.garbage_collection import GarbageCollectionCallback
    from nemo.lightning.pytorch.optim import CosineAnnealingScheduler, MegatronOptimizerModule
    from torch.nn.parallel import DistributedDataParallel

    from superpod.nemo2.overrides import parameters

    classes = (
        *(Trainer, nl.Trainer, nl.MegatronStrategy, nl.MegatronMixedPrecision, nl.NeMoLogger, nl.ModelCheckpoint),
        *(nl.AutoResume, nl.RestoreConfig, DistributedDataParallelConfig, OptimizerConfig, MegatronOptimizerModule),
        *(CosineAnnealingScheduler, llm.MockDataModule, llm.PreTrainingDataModule, T5Data, llm.peft.LoRA),
        *(llm.GPTConfig, llm.MixtralConfig8x7B, llm.pretrain, llm.finetune, llm.Llama3Config8B),
        *(megatron_comm_overlap.MegatronCommOverlapCallback, GarbageCollectionCallback),
        *(DDPStrategy, DistributedDataParallel, TensorBoardLogger),
    )
    names = {name for cls in classes for name in parameters(cls)}
    callbacks = {"recipe", "GarbageCollectionCallback", "TimingCallback", "NsysCallback", "MegatronCommOverlapCallback"}
    return sorted(names | callbacks)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
