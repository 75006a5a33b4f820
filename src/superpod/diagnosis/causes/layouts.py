"""Causes: layouts, batch sizes and options that the model or Megatron-Core does not support."""

from __future__ import annotations

from superpod.diagnosis.causes.table import HINT, LIKELY, PROGRAM, Cause, Pattern, phrases

_CHECK = (
    "`recipes check NAME --layout tp=..,pp=.. --nodes N` lists every violated rule and the smallest change "
    "that fixes it"
)
_NOT = (
    r"(not (evenly )?divisible|must (be|evenly) (evenly )?(divisible|a multiple|divide)|must be a multiple"
    r"|should be (evenly )?(divisible|a multiple)|(has|needs|have) to be (divisible|a multiple)|does not divide"
    r"|do not divide|cannot be divided|not a multiple|must be a whole number|% *[\w.()]+ *== *0)"
)
"""Phrases and assertions with which libraries report that a number is not divisible by another."""
_UNEQUAL = (
    rf"({_NOT}|(must|should|has to|needs? to|does not|do not|did not) (be equal|equal|match)|not equal|!=|mismatch"
    r"|expected\b.*\bgot|at (least|most)|(less|smaller|fewer|greater|larger|bigger|more) than)"
)
"""Phrases with which libraries report that two numbers are incompatible."""

CAUSES = (
    Cause(
        "world_size",
        PROGRAM,
        "the number of GPUs is not a multiple of TP x PP x CP (for experts: of ETP x EP x PP)",
        _CHECK,
        (
            Pattern("world", rf"world[ _]?size\b.*{_NOT}"),
            Pattern("number of gpus", _NOT),
            Pattern("world size", r"(is )?(less|smaller) than (the )?(tensor|pipeline|model|product)"),
            Pattern("world", rf"world[ _]?size\b.*{_UNEQUAL}|{_UNEQUAL}.*world[ _]?size\b", LIKELY),
            Pattern("assert", r"assert (?!.*(batch|accum)).*world_size\b\)? *(==|[<>]=?|%)", LIKELY),
            Pattern("gpus", rf"\b(\w*num_|number of )gpus\b.*{_UNEQUAL}", LIKELY),
            Pattern("device", rf"\b(number of |num_|n_)(devices|processes|ranks)\b.*{_UNEQUAL}", LIKELY),
            Pattern("data_parallel_size", r"(is|=|must).*(0\b|integer|positive)", LIKELY),
            Pattern("divi", rf"(gpus|ranks|processes)\b.*{_NOT}.*(parallel|tp|pp)", LIKELY),
            Pattern("rankgenerator", r"world", LIKELY),
            Pattern("make sense", r"requested .*ranks? .*world", HINT),
        ),
    ),
    Cause(
        "batch_size",
        PROGRAM,
        "the global batch size is not divisible by micro-batch size x data-parallel size",
        _CHECK + "; --gbs sets the global batch",
        (
            *phrases("batch size", "batch_size", pattern=rf"batch[ _-]?size.*{_NOT}"),
            *phrases("global_batch_size", "micro_batch", pattern=_NOT),
            Pattern("microbatch", rf"(micro.?batches|microbatches)\b.*{_NOT}"),
            Pattern("microbatches", _UNEQUAL, LIKELY),
            Pattern("batch size", rf"batch size.*{_UNEQUAL}", LIKELY),
            Pattern("batch_size", rf"batch_size.*{_UNEQUAL}", LIKELY),
            Pattern("accum", rf"(grad\w*[ _]accum|accumulation_steps).*{_UNEQUAL}", LIKELY),
            Pattern("check batch related parameters"),
        ),
        topics=r"\b(micro|global)_?batch|\bbatch[ _]size\b",
    ),
    Cause(
        "layers_and_stages",
        PROGRAM,
        "the number of layers is not divisible by the number of pipeline stages",
        _CHECK,
        (
            Pattern("layers", rf"\b(num_|number of |middle )?layers\b.*{_NOT}"),
            *phrases("num_layers", "virtual pipeline", pattern=_NOT),
            Pattern("pipeline", rf"{_NOT}.*pipeline|pipeline.*{_NOT}", LIKELY),
            Pattern(
                "pipeline", r"(interleaved|virtual).*(requires?|needs|should be|must be).*(greater|more|larger|> ?[12])"
            ),
            Pattern("pipeline", rf"pipeline.*{_UNEQUAL}", LIKELY),
        ),
    ),
    Cause(
        "heads_and_tp",
        PROGRAM,
        "attention heads, query groups or hidden sizes are not divisible by the tensor-parallel size",
        _CHECK,
        (
            *phrases("num_attention_heads", "attention heads", "query_groups", pattern=_NOT),
            Pattern("heads", rf"\b(kv |n?heads|num_heads).*{_NOT}"),
            Pattern("heads", rf"{_UNEQUAL}.*\bheads\b|\bheads\b.*{_UNEQUAL}", LIKELY),
            Pattern("hidden", rf"hidden[ _]size.*{_NOT}", LIKELY),
            Pattern("is not divisible by", r"^(\w*Error: )?\d+ is not divisible by \d+$", LIKELY),
            Pattern("tensor parallel", _NOT, HINT),
        ),
        message_topics=r"\b(attention|kv|query) heads?\b|\bnum_\w*heads\b",
    ),
    Cause(
        "sequence_and_cp",
        PROGRAM,
        "the sequence length is not divisible by the context- or tensor-parallel size",
        _CHECK + "; packed samples are padded to a multiple (pad_to_multiple_of)",
        (
            Pattern("sequence", rf"\bseq(uence)?[ _-]?(len(gth)?)?\b.*{_NOT}"),
            Pattern("seq_len", _NOT),
            Pattern("first dimension of the tensor should be divisible"),
            *phrases("context parallel", "cp_size", pattern=_NOT, sure=LIKELY),
        ),
    ),
    Cause(
        "experts_and_ep",
        PROGRAM,
        "the number of experts is not divisible by the expert-parallel size",
        _CHECK,
        (
            Pattern("expert", rf"expert.*{_NOT}"),
            Pattern("num_moe_experts", _NOT),
        ),
        message_topics=r"\bexperts?\b",
    ),
    Cause(
        "fp8_shape",
        PROGRAM,
        "a matrix has a size that FP8 kernels do not support",
        "tokens per rank and hidden sizes must be multiples of 16 (32 with MXFP8, 128 with blockwise scaling): pad the "
        "samples, or change tp; `recipes check NAME` detects this",
        (
            Pattern("fp8", _NOT),
            Pattern("fp8", r"(requires|expect|must).*(dimension|shape|multiple|divisible)"),
            Pattern("mxfp8", r"(divisible|multiple)"),
            Pattern("divisible by 8", r"(tensor|dimension|product)", LIKELY),
        ),
    ),
    Cause(
        "layout_option",
        PROGRAM,
        "layout options conflict, or a required option is missing",
        _CHECK,
        (
            Pattern(
                "sequence parallel",
                r"(requires?|only|cannot|can not|must|without|should|not supported|when).*(tensor|tp|1|enabled)",
                LIKELY,
            ),
            Pattern("sequence_parallel", r"(requires?|only|cannot|can not|must|without|should|when)", LIKELY),
            Pattern(
                "moe",
                r"(requires?|must|only (support|work)|cannot|not (support|compatible)).*(sequence|tensor|expert"
                r"|parallel|dispatcher)",
                LIKELY,
            ),
            Pattern("cannot be used with", r"parallel|overlap|recompute|optimizer|fsdp|cuda.?graph|fp8", LIKELY),
            Pattern("is not supported with", r"parallel|overlap|recompute|optimizer|fsdp|cuda.?graph|fp8", LIKELY),
            Pattern("not compatible with", r"parallel|overlap|recompute|optimizer|fsdp|cuda.?graph|fp8", LIKELY),
            Pattern(
                "overlap", r"(param_gather|grad_reduce|p2p|tp_comm).*(requires?|only|must|needs|not supported)", LIKELY
            ),
            Pattern("when using", r"parallel.*(must|should|is required|needs)", LIKELY),
            Pattern("not implemented", r"(pipeline|tensor|context|expert|sequence).?parallel", LIKELY),
            Pattern("userbuffers", r"(fail|error|assert|mismatch|not (support|initial))", LIKELY),
            Pattern("tensor model parallel", r"(not initialized|already initialized)", HINT),
        ),
        topics=r"\b(tensor|pipeline|context|expert|sequence|model)[ _-]parallel"
        r"|pipelin(e|ing)[_/]|parallel_state|device_mesh|\bworld[ _]?size\b",
    ),
    Cause(
        "max_connections",
        PROGRAM,
        "the value of CUDA_DEVICE_MAX_CONNECTIONS is not suitable for this communication overlap",
        "set it to 1 for tensor or context parallelism on GPUs before Blackwell, and leave it unset or set it higher "
        "for FSDP; scripts from `recipes render` set it, and [env] in the profile must not override it",
        (Pattern("cuda_device_max_connections", r"(must|should|need|expect|require|set|greater|larger|than 1|not)"),),
    ),
    Cause(
        "shapes",
        PROGRAM,
        "an operation was applied to tensors with incompatible shapes",
        "compare the sizes in the message with the hidden size, heads, vocabulary and sequence length of the "
        "recipe: `recipes show NAME`",
        (
            *phrases("shapes cannot be multiplied", "must match the size of tensor", "sizes of tensors must match"),
            *phrases("shape mismatch", "is invalid for input of size", "stack expects each tensor to be equal size"),
            Pattern("expected size", r"for tensor|batch2? tensor", LIKELY),
            Pattern("expand", r"The expanded size of the tensor"),
            Pattern("split_with_sizes", r"expects|sum"),
            Pattern("output with shape", r"doesn't match the broadcast shape"),
            Pattern("expected input batch_size", r"to match target batch_size"),
            Pattern("expected sequence of length", sure=LIKELY),
            Pattern("expected input", r"to have \d+ channels, but got"),
        ),
        follows=("checkpoint_other_model", "checkpoint_other_layout"),
        topics=r"\bshapes?\b|\bdim(ension)?s?\b|\bsize of tensor\b|\btorch\.Size\b|\bsizes\b|\b\d-?D\b"
        r"|\b(not|be) broadcast\b",
    ),
    Cause(
        "dtypes",
        PROGRAM,
        "an operation was applied to tensors with different dtypes or on different devices",
        "use the same precision (trainer.plugins) and the same device for the model and its inputs",
        (
            *phrases("have the same dtype", "expected scalar type"),
            Pattern("on the same device", sure=LIKELY),
            Pattern("only support", r"only supports? (fp16|bf16|fp8|float|half)", LIKELY),
            Pattern("but found", r"dtype|expected .* type", LIKELY),
            Pattern("not implemented for '", r"'(Half|BFloat16)'"),
            Pattern("should be the same", r"Input type .* and (weight|bias) type"),
        ),
        topics=r"\bdtypes?\b|\b((bf|fp)16|b?float(16|32))\b|\b(same|expected|on) device\b|\bdevice type\b",
    ),
    Cause(
        "autograd",
        PROGRAM,
        "the backward pass cannot run: no trainable parameter contributes to the loss, or recomputation does not "
        "match the graph",
        "unfreeze the parameters to train (check the names in target_modules of an adapter); recomputing a frozen "
        "part needs inputs with gradients (enable_input_require_grads) or use_reentrant=False; otherwise disable "
        "recomputation",
        (
            *phrases("does not require grad and does not have a grad_fn", "any parameters that require a gradient"),
            *phrases("differentiated tensors appears to not have been used", "optimizer got an empty parameter list"),
            *phrases("mark a variable ready only once", "backward through the graph a second time"),
            *phrases("recomputed values for the following tensors have different metadata"),
            *phrases("a different number of tensors was saved during the original forward and recomputation"),
            *phrases("needed for gradient computation has been modified by an inplace operation"),
            Pattern("none of the inputs have requires_grad=true", sure=LIKELY, alone=False, any_level=True),
            Pattern("no trainable parameters", sure=LIKELY),
            Pattern("requires_grad", r"Error: .*(same|uniform).*requires_grad"),
            Pattern("has been marked as ready twice", any_level=True),
            Pattern("a leaf variable that requires grad", r"in-place"),
        ),
        topics=r"\brequires_grad\b|\bgrad_fn\b|\bbackward(\(| pass)|gradient checkpointing|utils/checkpoint\.py",
    ),
)
