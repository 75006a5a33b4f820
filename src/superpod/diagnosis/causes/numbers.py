"""Causes: abnormal losses, gradients and step times. Most are detected in the reported values by losses.py."""

from __future__ import annotations

from superpod.diagnosis.causes.table import CERTAIN, HINT, LIKELY, PROGRAM, Cause, Pattern, phrases

CAUSES = (
    Cause(
        "loss_is_nan",
        PROGRAM,
        "the loss or a gradient is not a number (NaN)",
        "resume from a checkpoint before that step with a lower optim.config.lr or a longer warm-up; skip the batch; "
        "use bf16 instead of fp16; `recipes rehearse NAME` compares the layout with a single rank",
        (
            Pattern("found ", r"found (nan|inf) in"),
            Pattern("unexpected result", r"result (nan|inf)"),
            Pattern(
                "nan",
                r"\b\w*loss['\"]?\s*(is|was|became|:|=|->)?\s*(not a number|nan|inf(inity)?)\b",
                LIKELY,
                any_level=True,
            ),
            Pattern("nan", r"\b(nan|NaN|inf) (loss|gradients?|grad norm)\b(?! (check|iterations|in_|and))", LIKELY),
            *phrases("loss is not a number", "model diverged with loss = nan", "probability tensor contains either"),
            Pattern("grad", r"\bgrad\w*( norm)? (is|was|became) (nan|inf)\b", LIKELY),
            Pattern("not finite", r"\b(loss|grad\w*)\b.*(is|are) not finite", CERTAIN),
            Pattern("non-finite", r"\b(loss|grad\w*|norm)\b"),
            Pattern("returned nan values in its", r"Function '\w+' returned nan"),
            Pattern("nan or inf", r"(loss|grad|activations?|logits|tensor)", LIKELY),
            Pattern("must be > 0 and finite", sure=HINT),
            Pattern("found invalid values", r"constraint", LIKELY),
        ),
        follows=("silent_corruption", "gpu_ecc", "fp16_overflow"),
        message_topics=r"\b(nan|inf)\b(?! check)",
    ),
    Cause(
        "fp16_overflow",
        PROGRAM,
        "gradients overflow in FP16 at every loss scale",
        "use bf16 if the GPU supports it; otherwise increase the loss scale window, lower the learning rate, or clip "
        "gradients",
        (
            Pattern("loss scale", r"(already at minimum|minimum loss scale|cannot decrease scale|reached (its )?min)"),
            Pattern("floatingpointerror", r"loss|scale|overflow", LIKELY),
        ),
    ),
    Cause(
        "loss_spike",
        PROGRAM,
        "the loss increased sharply within one step",
        "resume from a checkpoint before that step and skip its batch; clip gradients (optim.config.clip_grad), or "
        "lower lr or beta2; inspect that batch",
        (
            Pattern("loss spike", r"(detected|found|at (step|iteration))", LIKELY),
            Pattern("spiky loss", r"detected|unexpected", CERTAIN, any_level=True),
            Pattern("spike", r"(loss|grad\w* norm).*(spike|spiked)", HINT, alone=False),
        ),
        follows=("loss_is_nan", "silent_corruption"),
    ),
    Cause(
        "loss_diverged",
        PROGRAM,
        "the loss is rising and does not recover",
        "resume from a checkpoint before the rise with a lower optim.config.lr, a longer warm-up or clipped gradients",
        (Pattern("diverge", r"\b(loss|training|model)\b.*\b(has |is |have )?diverg(ed|ing)\b", LIKELY),),
        follows=("loss_is_nan", "silent_corruption"),
    ),
    Cause(
        "slow_data",
        PROGRAM,
        "the ranks spend time waiting for data",
        "use more data workers and prefetching, move the data to a faster disk, or build its index in advance with "
        "`recipes data build`",
        (
            Pattern("dataloader timed out"),
            Pattern("dataloader", r"(slow|starv|bottleneck).*(\d+(\.\d+)? ?(s|ms|%))", LIKELY),
            Pattern(
                "data",
                r"(waiting|waited|blocked) (for|on) (the )?(data|batch|dataloader|next batch).* [\d.]+ ?(s|sec"
                r"|seconds|%)",
                LIKELY,
                any_level=True,
            ),
        ),
        follows=("filesystem_error",),
    ),
)
