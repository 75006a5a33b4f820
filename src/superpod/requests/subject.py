"""What a request names: one of our recipes, a Python file with `recipe()`, or NeMo's own recipe, `nemo:llama3_70b`.

`check` and `rehearse` take all three; a run, a job and an export take our recipes only.
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
"""What may follow NeMo's name after a slash, and the function of its file that makes it."""
LOADING_S = 60
"""Seconds that a user's file may take to return its recipe, NeMo's import not counted."""
GPU = "h100"
"""The GPU that a configuration is judged on where nothing names one: what NVIDIA's recipes are written for."""


def subject_kind(name: str) -> Literal["recipe", "file", "nemo"]:
    """What a name is, by its form: `nemo:` in front, `.py` behind or a slash inside, or a recipe's name."""
    if name.startswith(NEMO):
        return "nemo"
    return "file" if name.endswith(".py") or "/" in name else "recipe"


def check(request: Request) -> None:
    """Refuse what can be refused before NeMo is imported; nothing of a user's file is executed.

    Raises:
        UserError: no such recipe, size or file, or a file that is no Python or has no `recipe()`.
    """
    name, num_nodes = request.recipe, request.num_nodes
    if subject_kind(name) != "recipe" and (request.layout or request.best_layout):
        raise UserError(f"--layout is for recipes; {name} has its own", "write trainer.strategy.* overrides")
    if subject_kind(name) == "nemo":
        _nemo_function(name)
    elif subject_kind(name) == "file":
        _check_file(Path(name))
        if num_nodes is not None:
            raise UserError(f"--nodes {num_nodes}: a file has its own size", f"write trainer.num_nodes={num_nodes}")
    else:
        request.sized()


def build(request: Request) -> run.Partial:
    """The configuration that is asked for, without overrides. A file is executed here: in a process of its own.

    Raises:
        UserError: no such recipe or size, no NeMo, or a file or function that fails or gives something else.
    """
    name = request.recipe
    if subject_kind(name) == "recipe":
        from superpod import recipes

        return recipes.build_sized(request.sized(), request.num_nodes)
    partial = _build_nemo_recipe(name, request.num_nodes) if subject_kind(name) == "nemo" else _load_file(Path(name))
    _with_size(partial, request)
    return partial


def _with_size(partial: run.Partial, request: Request) -> None:
    """Give a configuration that others wrote the length and the batch that are asked for."""
    if request.seq:
        partial.data.seq_length = partial.model.config.seq_length = request.seq
    if request.gbs:
        partial.data.global_batch_size = request.gbs
    if request.batch_tokens:
        seq = partial.data.seq_length
        if request.batch_tokens % seq:
            below = request.batch_tokens // seq
            raise UserError(
                f"--batch-tokens {request.batch_tokens} is no whole number of samples of {seq} tokens",
                f"--gbs {max(1, below)} or --gbs {below + 1}",
            )
        partial.data.global_batch_size = request.batch_tokens // seq


def select_gpu(partial: run.Partial, gpu: str = "") -> str:
    """The GPU to judge a configuration on: the one that is given, that of the recipe in its log's name, or `GPU`."""
    from superpod.collection.registry import recipes

    known = recipes().get(str(getattr(partial.log, "name", "")))
    return gpu or (known.gpu if known else GPU)


# -- a user's file ---------------------------------------------------------------------------------------------------


def _check_file(path: Path) -> None:
    if not path.is_file():
        problem = "is a folder" if path.is_dir() else "does not exist"
        raise UserError(f"{path} {problem}", "`recipes export NAME --to FILE.py` writes one")
    try:
        tree = ast.parse(path.read_bytes(), str(path))
    except (SyntaxError, ValueError, RecursionError, MemoryError) as wrong:
        line = f":{wrong.lineno}" if isinstance(wrong, SyntaxError) and wrong.lineno else ""
        raise UserError(f"{path}{line}: this is no Python: {getattr(wrong, 'msg', wrong)}", "mend that line") from None
    except OSError as unreadable:
        raise UserError(f"{path}: {unreadable.strerror}", "make it readable") from None
    names = [node.name for node in tree.body if isinstance(node, ast.FunctionDef)]
    names += [
        alias.asname or alias.name for node in tree.body if isinstance(node, ast.ImportFrom) for alias in node.names
    ]
    if "recipe" not in names:
        raise UserError(f"{path} has no function recipe()", "recipe() returns the run.Partial: `recipes export`")


def _load_file(path: Path) -> run.Partial:
    _check_file(path)
    import superpod.nemo2.build.partial  # noqa: F401 - NeMo, before the clock starts: it takes 15 s

    sys.path.insert(0, str(path.resolve().parent))  # a collection's own module lies beside it
    from superpod.runtime.rank.rank import load

    with _time_limit(path), _errors_with_location(path):
        made = load(path.resolve()).recipe()
    partial = _require_recipe(str(path), made)
    from superpod.nemo2 import overrides

    overrides.require_known_names(partial, str(path))
    return partial


def _require_recipe(where: str, partial: Any) -> run.Partial:
    """The value, if it is what a recipe is.

    Raises:
        UserError: it is none.
    """
    import nemo_run as run

    from superpod.nemo2.validation.reading import name_of

    if not isinstance(partial, run.Partial):
        raise UserError(
            f"{where}: recipe() returned {type(partial).__name__}, not a run.Partial", "see `recipes export`"
        )
    if name_of(partial) not in ("pretrain", "finetune"):
        raise UserError(f"{where} calls {name_of(partial)}; recipes call llm.pretrain or llm.finetune", "change it")
    return partial


class _LoadTimeout(UserError):
    """A file that took too long: already in the user's words."""


@contextmanager
def _errors_with_location(path: Path) -> Iterator[None]:
    """Say what is wrong in a user's file, and where, without a traceback."""
    try:
        yield
    except _LoadTimeout:
        raise
    except BaseException as error:
        lines = [f.lineno for f in traceback.extract_tb(error.__traceback__) if f.filename == str(path.resolve())]
        where = f"{path}:{lines[-1]}" if lines else str(path)
        text = readable(str(error)).strip()
        if isinstance(error, UserError):  # of ours, that the file has called
            raise UserError(f"{where}: {text}", error.hint) from None
        what = text.splitlines()[0][:300] if text else ""
        raise UserError(
            f"{where}: {type(error).__name__}{f': {what}' if what else ''}", "mend that line; recipe() must return"
        ) from None


@contextmanager
def _time_limit(path: Path) -> Iterator[None]:
    def late(_number: int, _frame: FrameType | None) -> None:
        raise _LoadTimeout(
            f"{path}: recipe() took more than {LOADING_S} s", "a recipe is a description; it does no work"
        )

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(LOADING_S)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


# -- NeMo's own ------------------------------------------------------------------------------------------------------


def nemo_recipes() -> dict[str, list[str]]:
    """The recipe files of the NeMo that is installed, and the tasks of each: read, not imported.

    Raises:
        UserError: NeMo is not installed.
    """
    spec = importlib.util.find_spec("nemo")
    if spec is None or not spec.submodule_search_locations:
        raise UserError("NeMo is not installed", "pip install -c constraints.txt -e '.[nemo]'")
    folder = Path(spec.submodule_search_locations[0], "collections", "llm", "recipes")
    tasks_of = {}
    for path in sorted(folder.glob("*.py")):
        defined = set(re.findall(r"^def (\w+)_recipe\(", path.read_text(encoding="utf-8"), re.MULTILINE))
        if tasks := [task for task in ("pretrain", "finetune") if task in defined]:
            tasks_of[path.stem] = tasks
    return tasks_of


def _nemo_function(name: str) -> tuple[str, str]:
    """(file, task) of `nemo:FILE/TASK`; without a task, pretraining where there is one."""
    file, _, task = name.removeprefix(NEMO).partition("/")
    known = nemo_recipes()
    if file not in known:
        hint = did_you_mean(file, list(known)) or "docs/nemo_recipes.md lists them"
        raise UserError(f"NeMo has no recipe called {file!r}", hint)
    task = task or known[file][0]
    if task not in FUNCTIONS or FUNCTIONS[task].removesuffix("_recipe") not in known[file]:
        tasks = [t for t, function in FUNCTIONS.items() if function.removesuffix("_recipe") in known[file]]
        raise UserError(f"NeMo's {file} has no {task!r}", f"it has {', '.join(f'{NEMO}{file}/{t}' for t in tasks)}")
    return file, task


def _build_nemo_recipe(name: str, num_nodes: int | None) -> run.Partial:
    import inspect

    file, task = _nemo_function(name)
    module = importlib.import_module(f"nemo.collections.llm.recipes.{file}")
    function = inspect.unwrap(getattr(module, FUNCTIONS[task]))
    takes = inspect.signature(function).parameters
    anything = any(p.kind is p.VAR_KEYWORD for p in takes.values())
    given: dict[str, Any] = {"name": file} if anything or "name" in takes else {}
    if num_nodes is not None:
        given["num_nodes"] = num_nodes
    if task in ("sft", "lora", "dora"):
        given["peft_scheme"] = None if task == "sft" else task
    missing = [key for key in given if key not in takes and not anything]
    if missing:
        raise UserError(f"{name}: NeMo's {function.__name__} takes no {missing[0]}", "leave it out")
    try:
        return _require_recipe(name, function(**given))
    except UserError:
        raise
    except Exception as error:  # NeMo's own code, whatever it raises
        what = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise UserError(f"{name}: NeMo's own function fails: {what}", "docs/nemo_recipes.md") from error
