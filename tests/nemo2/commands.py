"""commands.py N: `nemo llm VERB --factory NAME --dryrun` of every Nth recipe; prints those that went wrong, as JSON.

Each command is run by NeMo-Run's own entry point with those words, in a child forked after its imports: half a second
instead of twelve.
"""

import json
import os
import sys
import traceback


def main() -> None:
    one_in = int(sys.argv[1])
    sys.argv = ["nemo", "llm"]  # what is imported below reads them
    from nemo_run.__main__ import app

    from superpod.collection.registry import recipes

    wrong = {}
    chosen = list(recipes().values())[::one_in]
    for recipe in chosen:
        verb = "pretrain" if recipe.task == "pretrain" else "finetune"
        code, output = forked(app, ["nemo", "llm", verb, "--factory", recipe.name, "--dryrun"])
        if code or f"Dry run for {verb}" not in output or "Traceback" in output:
            wrong[recipe.name] = [code, output[-2000:]]
    print("\nRESULT", json.dumps({"asked": len(chosen), "wrong": wrong}))


def forked(app, words: list[str]) -> tuple[int, str]:
    """Call `app` with `words` in a child process; return its exit code and output."""
    reads, writes = os.pipe()
    child = os.fork()
    if child == 0:
        os.dup2(writes, 1)
        os.dup2(writes, 2)
        sys.argv = words
        os._exit(called(app))
    os.close(writes)
    with open(reads, encoding="utf-8", errors="replace") as pipe:
        output = pipe.read()
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), output


def called(app) -> int:
    code: object = 0
    try:
        app()
    except SystemExit as ended:
        code = ended.code or 0
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    return code if isinstance(code, int) else 1


if __name__ == "__main__":
    main()
