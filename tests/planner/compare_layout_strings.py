"""`python -m tests.planner.compare_layout_strings COUNT`: random layout strings, read here and by Megatron-Core."""

import random
import sys
from typing import Any

from megatron.core.transformer.enums import LayerType
from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout

from superpod.errors import UserError
from superpod.planner.rules import pipeline_layout

LETTERS = {LayerType.embedding: "E", LayerType.decoder: "t", LayerType.mtp: "m", LayerType.loss: "L"}
PIECES = (
    "E",
    "L",
    "m",
    "t",
    "t",
    "tt",
    "|",
    "|",
    "||",
    ",",
    "(",
    ")",
    ")*2",
    "*3",
    "*0",
    "*12",
    " ",
    "x",
    "e",
    "*",
    "1",
)


def drawn(rng: random.Random) -> tuple[str, int, int, int]:
    """A string with pp, layers and layers of multi-token prediction: one that may be legal, or pieces at random."""
    if rng.random() < 0.3:
        return "".join(rng.choices(PIECES, k=rng.randint(0, 14))), rng.randint(1, 4), rng.randint(0, 12), 0
    pp, vp = rng.randint(1, 6), rng.randint(1, 4)
    chunks = [rng.randint(0, 3) for _ in range(pp * vp)]
    mtp = rng.choice((0, 0, 1, 2))
    text = pipeline_layout.from_chunks(chunks, mtp)
    layers = sum(chunks)
    if rng.random() < 0.5:  # one thing wrong with it, perhaps
        at = rng.randrange(len(text))
        text = rng.choice((text[:at] + text[at + 1 :], text[:at] + rng.choice(PIECES) + text[at:]))
    if rng.random() < 0.2:
        pp, layers, mtp = rng.choice(((pp + 1, layers, mtp), (pp, layers + 1, mtp), (pp, layers, mtp + 1)))
    return text, pp, layers, mtp


def theirs(text: str, pp: int, layers: int, mtp: int) -> tuple[str, ...] | None:
    """The stages as Megatron has them; None where it refuses the string."""
    try:
        whole: Any = PipelineParallelLayerLayout(text, pp)  # typed for models with MTP layers only
        whole.validate_layer_layout(layers, mtp or None)
    except (AssertionError, NotImplementedError, IndexError):
        return None
    rows = [stage for chunk in zip(*whole.layout, strict=True) for stage in chunk]
    return tuple("".join(LETTERS[kind] for kind in row) for row in rows)


def ours(text: str, pp: int, layers: int, mtp: int) -> tuple[str, ...] | None:
    """The same, read here."""
    try:
        stages = pipeline_layout.parse(text)
    except UserError:
        return None
    return None if pipeline_layout.refusal(stages, pp, layers, mtp) else stages


def main(count: int) -> int:
    rng, legal = random.Random(0), 0
    for _ in range(count):
        case = drawn(rng)
        if (own := ours(*case)) != (other := theirs(*case)):
            print(f"{case}: here {own}, Megatron {other}", file=sys.stderr)
            return 1
        legal += own is not None
    print(f"{count} strings, {legal} of them legal")
    return 0 if 0.2 * count < legal < 0.8 * count else 1


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
