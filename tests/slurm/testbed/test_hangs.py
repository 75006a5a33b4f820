"""A rank of a real two-node run hangs: it is reported with its stack within the stall limit.

The stacks of ranks on other nodes are asked for by `scancel --signal`, which only a real Slurm shows.
"""

import os
import signal
import time

import pytest

from superpod.runtime.attempts import diagnose
from superpod.runtime.rank import stacks
from tests.slurm.testbed.bed import until
from tests.slurm.testbed.nemo_runs import NemoRun
from tests.slurm.testbed.test_faults import find_rank

pytestmark = [pytest.mark.nemo, pytest.mark.train, pytest.mark.long]

ODD = 1
LIMIT_S = 24
"""`stalled_s` of the profile; steps of NeMo on a busy machine take seconds."""
LOOKS_S = 40
"""How long the heartbeats' and the attempt's looks, the stacks and the end may take beyond the limit."""

PLANTED = f"""

import os, threading, time
def plant(when):
    while not os.path.exists(when):
        time.sleep(0.1)
    from megatron.core.models.gpt.gpt_model import GPTModel
    def slept_in(self, *words, **named):
        time.sleep(3600)
    GPTModel.forward = slept_in
if os.environ["RANK"] == "{ODD}" and os.environ["SUPERPOD_ATTEMPT"] == "001":
    threading.Thread(target=plant, args=(os.environ["SUPERPOD_RUN_DIR"] + "/now",), daemon=True).start()
"""
"""At the end of the run's recipe: rank ODD hangs in its next forward pass once the file RUN/now exists."""


@pytest.mark.parametrize("how", ["stopped", "sleep"])
def test_hang_on_the_second_node_is_reported_with_stack(how, nemo, testbed, profile):
    """The next attempt resumes."""
    run = NemoRun(nemo, profile(("stalled_s = 30", f"stalled_s = {LIMIT_S}")), attempts=2, max_steps=2000)
    until(lambda: [*run.run.path.glob("code.*/recipe.py")], 60, run.story)
    with run.recipe.open("a") as recipe:  # ranks import NeMo before they read it
        recipe.write(PLANTED)
    run.until_step(12)
    began = time.monotonic()
    if how == "stopped":
        os.kill(find_rank(run, 2), signal.SIGSTOP)
    else:
        (run.run.path / "now").touch()
    first = run.run.attempts[0]
    until(lambda: first.result["state"] == "stalled", LIMIT_S + LOOKS_S, run.story)
    print(f"named after {time.monotonic() - began:.0f} s: {first.result['message']}")
    expected = {
        "stopped": f"rank {ODD} wrote no stack (stopped or dead)",
        "sleep": f"rank {ODD} was in slept_in ({run.recipe.parent.name}/recipe.py:",
    }[how]
    assert expected in first.result["message"], run.story()
    assert "rank 0 waited in " in first.result["message"], run.story()
    assert [stack.rank for stack in stacks.read(first.path)] == ([0] if how == "stopped" else [0, ODD])
    verdict = diagnose.judge_attempt(run.run, first)
    assert verdict.root
    assert (verdict.root.name, verdict.root.ranks) == ("hang", (ODD,)), verdict.root
    assert expected in verdict.root.detail
    until(lambda: len(run.run.attempts) > 1, 120, run.story)
    run.until_step(30)
    testbed.slurm("scancel", run.job)
    run.until_gone()
    assert run.left_behind() == []
