"""Build the subject of a request: a recipe, a Python file with `recipe()`, or a NeMo recipe such as `nemo:llama3_70b`.

`recipes check` and `recipes rehearse` accept all three; runs, jobs and exports accept only recipes.
"""

from __future__ import annotations

import ast
import importlib.util
import re
import signal
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, Literal

from superpod.errors import UserError, did_you_mean, readable

if TYPE_CHECKING:
    import nemo_run as run

    from superpod.requests.request import Request

NEMO = "nemo:"
FUNCTIONS = {"pretrain": "pretrain_recipe", "finetune": "finetune_recipe", "sft": "finetune_recipe"}
FUNCTIONS |= {"lora": "finetune_recipe", "dora": "finetune_recipe"}
"""Task after the slash in `nemo:FILE/TASK` -> function in NeMo's file."""
LOAD_TIMEOUT_S = 60
"""Maximum seconds that `recipe()` in a user's file may take, without the import of NeMo."""
DEFAULT_GPU = "h100"
"""Default GPU for which a configuration is checked. NVIDIA's recipes are written for it."""


def subject_kind(name: str) -> Literal["recipe", "file", "nemo"]:
    """Return the kind of a subject: "nemo" for `nemo:...`, "file" for a `.py` file or a path, otherwise "recipe"."""
    if name.startswith(NEMO):
        return "nemo"
    return "file" if name.endswith(".py") or "/" in name else "recipe"


def check(request: Request) -> None:
    """Check the subject of a request before NeMo is imported. Does not execute a user's file.

    Raises UserError for an unknown recipe or size, and for a file that is missing, invalid, or has no `recipe()`.
    """
    name, num_nodes = request.recipe, request.num_nodes
    if subject_kind(name) != "recipe" and (request.layout or request.best_layout):
        raise UserError(
            f"--layout applies only to recipes, but {name} defines its own layout", "use overrides of trainer.strategy"
        )
    if subject_kind(name) == "nemo":
        _nemo_function(name)
    elif subject_kind(name) == "file":
        _check_file(Path(name))
        if num_nodes is not None:
            raise UserError(
                f"--nodes {num_nodes} does not apply to files, which define their own size",
                f"use trainer.num_nodes={num_nodes}",
            )
    else:
        request.sized_recipe()


def build(request: Request) -> run.Partial:
    """Build the configuration of a request, without overrides. Executes a user's file in this process.

    Raises UserError for an unknown recipe or size, if NeMo is missing, or if a file fails or returns no recipe.
    """
    name = request.recipe
    if subject_kind(name) == "recipe":
        from superpod import recipes

        return recipes.build_sized(request.sized_recipe(), request.num_nodes)
    is_nemo = subject_kind(name) == "nemo"
    partial = _build_nemo_recipe(name, request.num_nodes) if is_nemo else _load_file(Path(name))
    _apply_size(partial, request)
    return partial


def _apply_size(partial: run.Partial, request: Request) -> None:
    """Set the requested sequence length and batch size in a configuration from a file or from NeMo."""
    if request.seq:
        partial.data.seq_length = partial.model.config.seq_length = request.seq
    if request.gbs:
        partial.data.global_batch_size = request.gbs
    if request.batch_tokens:
        seq = partial.data.seq_length
        if request.batch_tokens % seq:
            lower_gbs = request.batch_tokens // seq
            raise UserError(
                f"--batch-tokens {request.batch_tokens} must be a multiple of the sequence length, {seq} tokens",
                f"use --gbs {max(1, lower_gbs)} or --gbs {lower_gbs + 1}",
            )
        partial.data.global_batch_size = request.batch_tokens // seq


def select_gpu(partial: run.Partial, gpu: str = "") -> str:
    """Return the GPU for which to check a configuration: `gpu`, or that of the recipe in log.name, or DEFAULT_GPU."""
    from superpod.collection.registry import recipes

    if gpu:
        return gpu
    recipe = recipes().get(str(getattr(partial.log, "name", "")))
    return recipe.gpu if recipe else DEFAULT_GPU


# -- a user's file ---------------------------------------------------------------------------------------------------


def _check_file(path: Path) -> None:
    """Raise UserError unless `path` is a valid Python file with a function `recipe`. Does not execute it."""
    if not path.is_file():
        problem = "is a folder" if path.is_dir() else "does not exist"
        raise UserError(f"{path} {problem}", "write a file with `recipes export NAME --to FILE.py`")
    try:
        tree = ast.parse(path.read_bytes(), str(path))
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        line = f":{error.lineno}" if isinstance(error, SyntaxError) and error.lineno else ""
        raise UserError(f"{path}{line}: invalid Python: {getattr(error, 'msg', error)}", "correct the line") from None
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}", "make the file readable") from None
    names: list[str] = []
    for node in tree.body:
        if isinstance(node, ast.FunctionDef):
            names.append(node.name)
        elif isinstance(node, ast.ImportFrom):
            names += [alias.asname or alias.name for alias in node.names]
    if "recipe" not in names:
        raise UserError(
            f"{path} has no function recipe()",
            "define recipe(), which returns a run.Partial; `recipes export` writes an example",
        )


def _load_file(path: Path) -> run.Partial:
    """Return the result of `recipe()` in a user's file. Raises UserError if it fails or returns something else."""
    _check_file(path)
    import superpod.nemo2.build.partial  # noqa: F401 - imports NeMo, which takes 15 s, before the time limit starts

    sys.path.insert(0, str(path.resolve().parent))  # the file may import modules from its own folder
    from superpod.runtime.rank.rank import load

    with _time_limit(path), _errors_with_location(path):
        result = load(path.resolve()).recipe()
    partial = _require_recipe(str(path), result)
    from superpod.nemo2 import overrides

    overrides.require_known_names(partial, str(path))
    return partial


def _require_recipe(where: str, partial: Any) -> run.Partial:
    """Return `partial`. Raises UserError about `where` unless it is a run.Partial of llm.pretrain or llm.finetune."""
    import nemo_run as run

    from superpod.nemo2.validation.reading import class_name

    if not isinstance(partial, run.Partial):
        raise UserError(
            f"{where}: recipe() must return a run.Partial, not {type(partial).__name__}",
            "`recipes export` writes an example",
        )
    if class_name(partial) not in ("pretrain", "finetune"):
        raise UserError(
            f"{where}: a recipe must be a partial of llm.pretrain or llm.finetune, not of {class_name(partial)}",
            "change recipe() in the file",
        )
    return partial


class _LoadTimeout(UserError):
    """The function `recipe()` of a file took more than LOAD_TIMEOUT_S seconds."""


@contextmanager
def _errors_with_location(path: Path) -> Iterator[None]:
    """Convert an exception in a user's file within the block to a UserError with the line number."""
    try:
        yield
    except _LoadTimeout:
        raise
    except BaseException as error:
        lines = [f.lineno for f in traceback.extract_tb(error.__traceback__) if f.filename == str(path.resolve())]
        location = f"{path}:{lines[-1]}" if lines else str(path)
        text = readable(str(error)).strip()
        if isinstance(error, UserError):  # raised by a function of this package that the file calls
            raise UserError(f"{location}: {text}", error.hint) from None
        message = f"{location}: {type(error).__name__}"
        if text:
            message += f": {text.splitlines()[0][:300]}"
        raise UserError(message, "correct the line; recipe() must return without an exception") from None


@contextmanager
def _time_limit(path: Path) -> Iterator[None]:
    """Raise _LoadTimeout in the block after LOAD_TIMEOUT_S seconds."""

    def interrupt(_number: int, _frame: FrameType | None) -> None:
        raise _LoadTimeout(
            f"{path}: recipe() took more than {LOAD_TIMEOUT_S} s", "recipe() should only build a configuration"
        )

    old_handler = signal.signal(signal.SIGALRM, interrupt)
    signal.alarm(LOAD_TIMEOUT_S)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, old_handler)


# -- NeMo's recipes --------------------------------------------------------------------------------------------------


def nemo_recipes() -> dict[str, list[str]]:
    """Return recipe file -> tasks of the installed NeMo, without importing it. Raises UserError if it is missing."""
    spec = importlib.util.find_spec("nemo")
    if spec is None or not spec.submodule_search_locations:
        raise UserError("NeMo is not installed", "run `pip install -c constraints.txt -e '.[nemo]'`")
    folder = Path(spec.submodule_search_locations[0], "collections", "llm", "recipes")
    recipes = {}
    for path in sorted(folder.glob("*.py")):
        defined_tasks = set(re.findall(r"^def (\w+)_recipe\(", path.read_text(encoding="utf-8"), re.MULTILINE))
        tasks = [task for task in ("pretrain", "finetune") if task in defined_tasks]
        if tasks:
            recipes[path.stem] = tasks
    return recipes


def _nemo_function(name: str) -> tuple[str, str]:
    """Parse `nemo:FILE/TASK` to (file, task). The default task is pretraining, if the file has it.

    Raises UserError if NeMo has no such recipe or task.
    """
    file, _, task = name.removeprefix(NEMO).partition("/")
    known_recipes = nemo_recipes()
    if file not in known_recipes:
        hint = did_you_mean(file, list(known_recipes)) or "docs/nemo_recipes.md lists NeMo's recipes"
        raise UserError(f"NeMo has no recipe {file!r}", hint)
    task = task or known_recipes[file][0]
    tasks = [name for name, function in FUNCTIONS.items() if function.removesuffix("_recipe") in known_recipes[file]]
    if task not in tasks:
        raise UserError(
            f"NeMo's {file} has no task {task!r}", f"use {' or '.join(f'{NEMO}{file}/{name}' for name in tasks)}"
        )
    return file, task


def _build_nemo_recipe(name: str, num_nodes: int | None) -> run.Partial:
    """Call the function of NeMo's recipe `nemo:FILE/TASK`. Raises UserError if it fails."""
    import inspect

    file, task = _nemo_function(name)
    module = importlib.import_module(f"nemo.collections.llm.recipes.{file}")
    function = inspect.unwrap(getattr(module, FUNCTIONS[task]))
    parameters = inspect.signature(function).parameters
    accepts_all = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    arguments: dict[str, Any] = {}
    if accepts_all or "name" in parameters:
        arguments["name"] = file
    if num_nodes is not None:
        arguments["num_nodes"] = num_nodes
    if task in ("sft", "lora", "dora"):
        arguments["peft_scheme"] = None if task == "sft" else task
    unknown = [key for key in arguments if key not in parameters and not accepts_all]
    if unknown:
        raise UserError(f"{name}: NeMo's function {function.__name__} has no parameter {unknown[0]}", "omit it")
    try:
        return _require_recipe(name, function(**arguments))
    except UserError:
        raise
    except Exception as error:  # NeMo's code may raise anything
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise UserError(
            f"{name}: NeMo's function {function.__name__} raised an error: {lines[0]}", "see docs/nemo_recipes.md"
        ) from error
