"""The command line of `attempt.py`. Standard library only."""

from __future__ import annotations

import argparse

from superpod.runtime.attempts import model_steps
from superpod.runtime.attempts.notify import Webhook
from superpod.runtime.checkpoints import resume


def parse(words: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """Parse the arguments of attempt.py.

    Returns:
        The options, with the command of the model steps as `model_step`; and the command after `--` that starts the
        ranks.
    """
    parser = argparse.ArgumentParser(prog="attempt.py")
    parser.add_argument("--recipe", required=True)
    parser.add_argument("--runs", required=True)
    parser.add_argument("--unpacked", default="")
    parser.add_argument("--facts", default="{}")
    parser.add_argument("--lines", default="")
    parser.add_argument("--save-s", type=float, default=300)
    parser.add_argument("--stalled-s", type=float, default=600)
    parser.add_argument("--second-look-s", type=float, default=resume.SECOND_LOOK_S)
    parser.add_argument("--idle-attempts", type=int, default=2)
    parser.add_argument("--failures", type=int, default=20)
    parser.add_argument("--checks", nargs="*", default=[])
    parser.add_argument("--verify", action="store_true")
    parser.add_argument("--self-submit", action="store_true")
    parser.add_argument("--notify", dest="webhook", type=Webhook.from_option, default="")
    if "--" not in words:
        parser.error("the command that starts the ranks is missing; pass it after --, for example: -- srun ...")
    index = words.index("--")
    command, model_step = model_steps.split(words[index + 1 :])
    return parser.parse_args(words[:index], argparse.Namespace(model_step=model_step)), command
