"""Compare `violations` with Megatron on many drawn jobs: `python tests/planner/compare_megatron.py --jobs 100000`.

Prints one JSON object: jobs, legal, seconds, hits by rule, and every disagreement with its seed. Needs NeMo; one core.
"""

from __future__ import annotations

import argparse
import json
import logging
import random
import sys
import time
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from drawn_jobs import draw

from superpod.errors import UserError
from superpod.planner.legality import violations
from superpod.planner.rules.kernel_rules import KERNELS

KERNEL_RULES = [rule.name for rule in KERNELS]

STRICTER = {
    "precision": "which GPU has which format: Megatron leaves it to Transformer Engine's kernels",
    "memory_cap": "Megatron does not know how much memory the GPU has",
    "vp_p2p": "Megatron-Core runs it, and the gradients are wrong (docs/rehearsal.md)",
    "vp_of_one": "Megatron-LM's arguments make it none; Megatron-Core runs it, but for PP 2 and overlapped sends",
    "delayed_shared": "Transformer Engine's linear layer refuses it (planner/rules/family_rules.py)",
    **dict.fromkeys(KERNEL_RULES, "Transformer Engine's: its kernels are not there when Megatron builds a model"),
}
"""Rules that Megatron-Core does not check itself. A job that breaks one is compared by its other rules."""


def compare(jobs: int, first_seed: int) -> dict[str, Any]:
    """What both say of jobs drawn from consecutive seeds."""
    from megatron_oracle import refusal  # imports NeMo

    began, hits, legal, drawn, differ = time.monotonic(), Counter(), 0, 0, []
    seed = first_seed
    while drawn < jobs:
        seed += 1
        try:
            job = draw(random.Random(seed))
        except UserError:  # a shape that contradicts itself is no job
            continue
        drawn += 1
        broken_rules = [broken.rule for broken in violations(job)]
        hits.update(set(broken_rules))
        legal += not set(broken_rules) - set(KERNEL_RULES)
        ours, theirs = [rule for rule in broken_rules if rule not in STRICTER], refusal(job)
        if bool(ours) != bool(theirs):
            differ.append({"seed": seed, "ours": ours, "megatron": theirs})
    seconds = round(time.monotonic() - began, 1)
    return {"jobs": drawn, "legal": legal, "seconds": seconds, "hits": dict(hits.most_common()), "differ": differ}


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    chosen = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    result = compare(chosen.jobs, chosen.seed)
    print("RESULT" + json.dumps(result))


if __name__ == "__main__":
    main()
