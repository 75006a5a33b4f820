"""Causes: abnormal values in a run that continues. Most are detected from the losses: see losses.py."""

from __future__ import annotations

from superpod.diagnosis.causes.table import CERTAIN, HINT, LIKELY, PROGRAM, Cause, Sign

CAUSES = (
    Cause(
        "loss_is_nan",
        PROGRAM,
        "the loss or a gradient is not a number (NaN)",
        "resume before that step with a lower optim.config.lr or a longer warm-up; skip the batch; use bf16 "
        "instead of fp16; `recipes rehearse NAME` compares the layout with a single rank",
        (
            Sign("found nan in"),
            Sign("found inf in"),
            Sign("unexpected result nan"),
            Sign("unexpected result inf"),
            Sign(
                "nan", r"\b\w*loss['\"]?\s*(is|was|became|:|=|->)?\s*(not a number|nan|inf)\b", LIKELY, any_level=True
            ),
            Sign("nan", r"\b(nan|NaN|inf) (loss|gradients?|grad norm)\b(?! (check|iterations|in_|and))", LIKELY),
            Sign("loss is not a number"),
            Sign("grad", r"\bgrad\w*( norm)? (is|was|became) (nan|inf)\b", LIKELY),
            Sign("not finite", r"\b(loss|grad\w*)\b.*(is|are) not finite", CERTAIN),
            Sign("non-finite", r"\b(loss|grad\w*|norm)\b"),
            Sign("returned nan values in its", r"Function '\w+' returned nan"),
            Sign("nan or inf", r"(loss|grad|activations?|logits|tensor)", LIKELY),
            Sign("model diverged with loss = nan"),
            Sign("must be > 0 and finite", sure=HINT),
            Sign("probability tensor contains either"),
            Sign("found invalid values", r"constraint", LIKELY),
        ),
        follows=("silent_corruption", "gpu_ecc", "fp16_overflow"),
        speaks=r"\b(nan|inf)\b(?! check)",
    ),
    Cause(
        "fp16_overflow",
        PROGRAM,
        "gradients overflow in FP16 at every loss scale",
        "use bf16 if the GPU supports it; otherwise increase the initial loss scale window, lower the "
        "learning rate, or clip gradients",
        (
            Sign("loss scale", r"(already at minimum|minimum loss scale|cannot decrease scale|reached (its )?min)"),
            Sign("minimum loss scale reached"),
            Sign("cannot decrease scale anymore"),
            Sign("floatingpointerror", r"loss|scale|overflow", LIKELY),
        ),
    ),
    Cause(
        "loss_spike",
        PROGRAM,
        "the loss jumped within one step",
        "resume before the step and skip its batch; clip gradients (optim.config.clip_grad), or lower lr or "
        "beta2; inspect that batch of data",
        (
            Sign("loss spike", r"(detected|found|at (step|iteration))", LIKELY),
            Sign("spiky loss", r"detected|unexpected", CERTAIN, any_level=True),
            Sign("spike", r"(loss|grad\w* norm).*(spike|spiked)", HINT, alone=False),
        ),
        follows=("loss_is_nan", "silent_corruption"),
    ),
    Cause(
        "loss_diverged",
        PROGRAM,
        "the loss rises and does not recover",
        "resume from a checkpoint before the rise, with a lower optim.config.lr, a longer warm-up, or clipped"
        " gradients",
        (Sign("diverge", r"\b(loss|training|model)\b.*\b(has |is |have )?diverg(ed|ing)\b", LIKELY),),
        follows=("loss_is_nan", "silent_corruption"),
    ),
    Cause(
        "slow_data",
        PROGRAM,
        "the ranks wait for data",
        "use more data workers and prefetching, move the data to a faster disk, or build its index in advance"
        " (`recipes data build`)",
        (
            Sign("dataloader timed out"),
            Sign("dataloader", r"(slow|starv|bottleneck).*(\d+(\.\d+)? ?(s|ms|%))", LIKELY),
            Sign(
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
