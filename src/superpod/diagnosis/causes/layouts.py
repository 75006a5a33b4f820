"""Causes: layouts, batch sizes and options that the model or Megatron-Core does not support."""

from __future__ import annotations

from superpod.diagnosis.causes.table import HINT, LIKELY, PROGRAM, Cause, Sign

_CHECK = "`recipes check NAME --layout tp=..,pp=.. --nodes N` lists every violated rule and the nearest legal change"
_NOT = (
    r"(not (evenly )?divisible|must (be|evenly) (evenly )?(divisible|a multiple|divide)|must be a multiple"
    r"|should be (evenly )?(divisible|a multiple)|(has|needs|have) to be (divisible|a multiple)|does not divide"
    r"|do not divide|cannot be divided|not a multiple|must be a whole number|% *[\w.()]+ *== *0)"
)
"""Phrases, and bare assertions, by which libraries report that a number is not divisible by another."""
_UNEQUAL = (
    rf"({_NOT}|(must|should|has to|needs? to|does not|do not|did not) (be equal|equal|match)|not equal|!=|mismatch"
    r"|expected\b.*\bgot|at (least|most)|(less|smaller|fewer|greater|larger|bigger|more) than)"
)
"""Phrases by which they report that two numbers are incompatible, by division or otherwise."""

CAUSES = (
    Cause(
        "world_size",
        PROGRAM,
        "the number of GPUs is not a multiple of the layout's size (TP x PP x CP, or the expert grid)",
        _CHECK,
        (
            Sign("world", rf"world[ _]?size\b.*{_NOT}"),
            Sign("number of gpus", rf"{_NOT}"),
            Sign("world size", r"(is )?(less|smaller) than (the )?(tensor|pipeline|model|product)"),
            Sign("world", rf"world[ _]?size\b.*{_UNEQUAL}|{_UNEQUAL}.*world[ _]?size\b", LIKELY),
            Sign("assert", r"assert (?!.*(batch|accum)).*world_size\b\)? *(==|[<>]=?|%)", LIKELY),
            Sign("gpus", rf"\b(\w*num_|number of )gpus\b.*{_UNEQUAL}", LIKELY),
            Sign("device", rf"\b(number of |num_|n_)(devices|processes|ranks)\b.*{_UNEQUAL}", LIKELY),
            Sign("data_parallel_size", r"(is|=|must).*(0\b|integer|positive)", LIKELY),
            Sign("divi", rf"(gpus|ranks|processes)\b.*{_NOT}.*(parallel|tp|pp)", LIKELY),
            Sign("rankgenerator", r"world", LIKELY),
            Sign("make sense", r"requested .*ranks? .*world", HINT),
        ),
    ),
    Cause(
        "batch_size",
        PROGRAM,
        "the global batch size is not divisible by micro-batch size x data-parallel size",
        _CHECK + "; --gbs sets the global batch",
        (
            Sign("batch size", rf"batch[ _-]?size.*{_NOT}"),
            Sign("batch_size", rf"batch[ _-]?size.*{_NOT}"),
            Sign("global_batch_size", rf"{_NOT}"),
            Sign("microbatch", rf"(micro.?batches|microbatches)\b.*{_NOT}"),
            Sign("micro_batch", rf"{_NOT}"),
            Sign("microbatches", rf"{_UNEQUAL}", LIKELY),
            Sign("batch size", rf"batch size.*{_UNEQUAL}", LIKELY),
            Sign("batch_size", rf"batch_size.*{_UNEQUAL}", LIKELY),
            Sign("accum", rf"(grad\w*[ _]accum|accumulation_steps).*{_UNEQUAL}", LIKELY),
            Sign("check batch related parameters"),
            Sign("train_batch_size is not equal to"),
        ),
        about=r"\b(micro|global)_?batch|\bbatch[ _]size\b",
    ),
    Cause(
        "layers_and_stages",
        PROGRAM,
        "the number of layers is not divisible by the number of pipeline stages",
        _CHECK,
        (
            Sign("layers", rf"\b(num_|number of |middle )?layers\b.*{_NOT}"),
            Sign("num_layers", rf"{_NOT}"),
            Sign("virtual pipeline", rf"{_NOT}"),
            Sign("pipeline", rf"{_NOT}.*pipeline|pipeline.*{_NOT}", LIKELY),
            Sign(
                "pipeline", r"(interleaved|virtual).*(requires?|needs|should be|must be).*(greater|more|larger|> ?[12])"
            ),
            Sign("pipeline", rf"pipeline.*{_UNEQUAL}", LIKELY),
        ),
    ),
    Cause(
        "heads_and_tp",
        PROGRAM,
        "attention heads, query groups or hidden sizes are not divisible by the tensor-parallel size",
        _CHECK,
        (
            Sign("num_attention_heads", rf"{_NOT}"),
            Sign("attention heads", rf"{_NOT}"),
            Sign("num_query_groups", rf"{_NOT}"),
            Sign("query_groups", rf"{_NOT}"),
            Sign("heads", rf"\b(kv |n?heads|num_heads).*{_NOT}"),
            Sign("heads", rf"{_UNEQUAL}.*\bheads\b|\bheads\b.*{_UNEQUAL}", LIKELY),
            Sign("hidden", rf"hidden[ _]size.*{_NOT}", LIKELY),
            Sign("is not divisible by", r"^(\w*Error: )?\d+ is not divisible by \d+$", LIKELY),
            Sign("tensor parallel", rf"{_NOT}", HINT),
        ),
        speaks=r"\b(attention|kv|query) heads?\b|\bnum_\w*heads\b",
    ),
    Cause(
        "sequence_and_cp",
        PROGRAM,
        "the sequence length is not divisible by the context- or tensor-parallel size",
        _CHECK + "; packed samples are padded to a multiple (pad_to_multiple_of)",
        (
            Sign("sequence", rf"\bseq(uence)?[ _-]?(len(gth)?)?\b.*{_NOT}"),
            Sign("seq_len", rf"{_NOT}"),
            Sign("seq_length", rf"{_NOT}"),
            Sign("first dimension of the tensor should be divisible"),
            Sign("context parallel", rf"{_NOT}", LIKELY),
            Sign("cp_size", rf"{_NOT}", LIKELY),
        ),
    ),
    Cause(
        "experts_and_ep",
        PROGRAM,
        "the number of experts is not divisible by the expert-parallel size",
        _CHECK,
        (
            Sign("expert", rf"expert.*{_NOT}"),
            Sign("num_moe_experts", rf"{_NOT}"),
        ),
        speaks=r"\bexperts?\b",
    ),
    Cause(
        "fp8_shape",
        PROGRAM,
        "a matrix has a size that FP8 kernels do not support",
        "tokens per rank and hidden sizes must be multiples of 16 (32 with MXFP8, 128 with blockwise "
        "scaling): pad the samples, or change tp; `recipes check NAME` reports it",
        (
            Sign("fp8", rf"{_NOT}"),
            Sign("fp8", r"(requires|expect|must).*(dimension|shape|multiple|divisible)"),
            Sign("mxfp8", r"(divisible|multiple)"),
            Sign("divisible by 8", r"(tensor|dimension|product)", LIKELY),
            Sign("fp8 execution requires"),
        ),
    ),
    Cause(
        "layout_option",
        PROGRAM,
        "options of the layout conflict, or an option that they require is missing",
        _CHECK,
        (
            Sign(
                "sequence parallel",
                r"(requires?|only|cannot|can not|must|without|should|not supported|when).*(tensor|tp|1|enabled)",
                LIKELY,
            ),
            Sign("sequence_parallel", r"(requires?|only|cannot|can not|must|without|should|when)", LIKELY),
            Sign(
                "moe",
                r"(requires?|must|only (support|work)|cannot|not (support|compatible)).*(sequence|tensor|expert"
                r"|parallel|dispatcher)",
                LIKELY,
            ),
            Sign("cannot be used with", r"parallel|overlap|recompute|optimizer|fsdp|cuda.?graph|fp8", LIKELY),
            Sign("is not supported with", r"parallel|overlap|recompute|optimizer|fsdp|cuda.?graph|fp8", LIKELY),
            Sign("not compatible with", r"parallel|overlap|recompute|optimizer|fsdp|cuda.?graph|fp8", LIKELY),
            Sign(
                "overlap", r"(param_gather|grad_reduce|p2p|tp_comm).*(requires?|only|must|needs|not supported)", LIKELY
            ),
            Sign("when using", r"parallel.*(must|should|is required|needs)", LIKELY),
            Sign("not implemented", r"(pipeline|tensor|context|expert|sequence).?parallel", LIKELY),
            Sign("userbuffers", r"(fail|error|assert|mismatch|not (support|initial))", LIKELY),
            Sign("tensor model parallel", r"(not initialized|already initialized)", HINT),
        ),
        about=r"\b(tensor|pipeline|context|expert|sequence|model)[ _-]parallel"
        r"|pipelin(e|ing)[_/]|parallel_state|device_mesh|\bworld[ _]?size\b",
    ),
    Cause(
        "max_connections",
        PROGRAM,
        "CUDA_DEVICE_MAX_CONNECTIONS does not suit this communication overlap",
        "set it to 1 with tensor or context parallelism before Blackwell, and leave it unset or larger with "
        "FSDP; the scripts of `recipes render` set it, and a profile's [env] must not override it",
        (Sign("cuda_device_max_connections", r"(must|should|need|expect|require|set|greater|larger|than 1|not)"),),
    ),
    Cause(
        "shapes",
        PROGRAM,
        "tensors with incompatible shapes were combined in an operation",
        "compare the sizes in the message with the hidden size, heads, vocabulary and sequence length of the "
        "recipe: `recipes show NAME`",
        (
            Sign("shapes cannot be multiplied"),
            Sign("must match the size of tensor"),
            Sign("sizes of tensors must match"),
            Sign("shape mismatch"),
            Sign("is invalid for input of size"),
            Sign("expected size", r"for tensor|batch2? tensor", LIKELY),
            Sign("expand", r"The expanded size of the tensor"),
            Sign("split_with_sizes", r"expects|sum"),
            Sign("output with shape", r"doesn't match the broadcast shape"),
            Sign("expected input batch_size", r"to match target batch_size"),
            Sign("expected sequence of length", sure=LIKELY),
            Sign("stack expects each tensor to be equal size"),
            Sign("expected input", r"to have \d+ channels, but got"),
        ),
        follows=("checkpoint_other_model", "checkpoint_other_layout"),
        about=r"\bshapes?\b|\bdim(ension)?s?\b|\bsize of tensor\b|\btorch\.Size\b|\bsizes\b|\b\d-?D\b"
        r"|\b(not|be) broadcast\b",
    ),
    Cause(
        "dtypes",
        PROGRAM,
        "tensors of different precision or on different devices were combined in an operation",
        "use one precision for the model and its inputs (the precision plugin), and one device for both",
        (
            Sign("have the same dtype"),
            Sign("on the same device", sure=LIKELY),
            Sign("expected scalar type"),
            Sign("only support", r"only supports? (fp16|bf16|fp8|float|half)", LIKELY),
            Sign("but found", r"dtype|expected .* type", LIKELY),
            Sign("not implemented for 'half'"),
            Sign("not implemented for 'bfloat16'"),
            Sign("should be the same", r"Input type .* and (weight|bias) type"),
        ),
        about=r"\bdtypes?\b|\b((bf|fp)16|b?float(16|32))\b|\b(same|expected|on) device\b|\bdevice type\b",
    ),
    Cause(
        "autograd",
        PROGRAM,
        "the backward pass cannot run: no trainable parameter contributes to the loss, or recomputation does "
        "not fit the graph",
        "unfreeze what is to be trained (check the names in an adapter's target_modules); recomputation of a "
        "frozen part needs inputs with gradients (enable_input_require_grads) or use_reentrant=False; "
        "otherwise disable recomputation",
        (
            Sign("does not require grad and does not have a grad_fn"),
            Sign("none of the inputs have requires_grad=true", sure=LIKELY, alone=False, any_level=True),
            Sign("any parameters that require a gradient"),
            Sign("differentiated tensors appears to not have been used"),
            Sign("optimizer got an empty parameter list"),
            Sign("no trainable parameters", sure=LIKELY),
            Sign("requires_grad", r"Error: .*(same|uniform).*requires_grad"),
            Sign("mark a variable ready only once"),
            Sign("has been marked as ready twice", any_level=True),
            Sign("a leaf variable that requires grad", r"in-place"),
            Sign("backward through the graph a second time"),
            Sign("recomputed values for the following tensors have different metadata"),
            Sign("a different number of tensors was saved during the original forward and recomputation"),
            Sign("needed for gradient computation has been modified by an inplace operation"),
        ),
        about=r"\brequires_grad\b|\bgrad_fn\b|\bbackward(\(| pass)|gradient checkpointing|utils/checkpoint\.py",
    ),
)
