"""The command `recipes`. Each verb parses, calls and prints; what it calls imports NeMo only if it must."""

from __future__ import annotations

import contextlib
import errno
import os
import sys

import typer

from superpod.launchers.cli import budget, data, doctor, judge, plan, run, show
from superpod.planner.errors import UserError

app = typer.Typer(
    help="NeMo 2.0 / Megatron-Core training recipes: read, rehearse and run them.",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
)
app.command("list")(show.list_)
app.command("show")(show.show)
app.command("plan")(plan.plan)
app.command("check")(judge.check)
app.command("memory")(judge.memory)
app.command("explain")(judge.explain)
app.command("scale")(budget.scale)
app.command("cost")(budget.cost)
app.command("predict")(judge.predict)
app.command("run", context_settings={"ignore_unknown_options": False})(run.run)
app.command("report")(run.report)
app.command("doctor")(doctor.doctor)
app.add_typer(data.app, name="data", help="Make training data: tokenizer, .bin and .idx files, blends.")


INTERRUPTED = 130


def main() -> None:
    """Entry point: the exit codes of contracts.md, and never a traceback for a user's mistake."""
    try:
        try:
            app()
        finally:
            if sys.stdout is not None:  # here, where a reader that has gone away is no error, not at the very end
                sys.stdout.flush()
    except UserError as error:
        _say(str(error), error.hint)
        sys.exit(2)
    except run.NotDone as end:
        sys.exit(end.exit_code)
    except SystemExit as end:
        if end.code == INTERRUPTED:  # Typer has caught the KeyboardInterrupt, and says nothing
            _say("interrupted", "")
        raise
    except BrokenPipeError:
        with contextlib.suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        sys.exit(1)
    except Exception as error:
        sys.exit(_unexpected(error))


def _unexpected(error: Exception) -> int:
    """Our own failure: one line, and the traceback in a file for whoever mends it."""
    import tempfile
    import traceback

    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        _say(f"{error.strerror} ({error.filename or 'while writing'})", "make room, then run this again")
        return 1
    if os.environ.get("SUPERPOD_DEBUG"):
        traceback.print_exception(error)
        return 1
    with tempfile.NamedTemporaryFile("w", prefix="recipes-", suffix=".log", delete=False) as log:
        traceback.print_exception(error, file=log)
    _say(f"this is our failure, not yours: {type(error).__name__}: {error}", f"the traceback is in {log.name}")
    return 1


def _say(message: str, hint: str) -> None:
    print(f"error: {message}", file=sys.stderr)
    if hint:
        print(f"  next: {hint}", file=sys.stderr)
