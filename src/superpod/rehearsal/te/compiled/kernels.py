"""Substitutes for kernels of `transformer_engine_torch`, which return tensors of the right shape without values.

`KERNELS` contains the functions that Transformer Engine's Python package calls: GEMMs, norms, attention, RoPE and
casts. Source of the shapes: NVIDIA/TransformerEngine v2.9, transformer_engine/pytorch/csrc/extensions/*.cpp.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from superpod.rehearsal.te.compiled import enumerations
from superpod.rehearsal.te.package_kernels import do_nothing

DTYPES = {
    enumerations.DType.kByte: "uint8",
    enumerations.DType.kInt32: "int32",
    enumerations.DType.kInt64: "int64",
    enumerations.DType.kFloat32: "float32",
    enumerations.DType.kFloat16: "float16",
    enumerations.DType.kBFloat16: "bfloat16",
    enumerations.DType.kFloat8E4M3: "float8_e4m3fn",
    enumerations.DType.kFloat8E5M2: "float8_e5m2",
}
FP8_ALIGNMENT = 16
"""Leading dimensions in FP8 must be multiples of this number (common/gemm/cublaslt_gemm.cu, CanonicalizeGemmInput)."""


def torch_dtype(dtype: enumerations.DType) -> Any:
    """Return torch's data type for one of Transformer Engine's."""
    import torch

    return getattr(torch, DTYPES[dtype])


def empty(shape: Sequence[int], dtype: Any) -> Any:
    """Return a tensor without values on the meta device."""
    import torch

    return torch.empty(tuple(shape), dtype=dtype, device="meta")


def make_output(shape: Sequence[int], dtype: Any, quantizer: Any) -> Any:
    """Return a tensor on the meta device, from the quantizer's `make_empty` if there is a quantizer."""
    return quantizer.make_empty(shape, dtype=dtype, device="meta") if quantizer else empty(shape, dtype)


def quantize(tensor: Any, quantizer: Any, output: Any = None, noop_flag: object = None) -> Any:
    """Return a quantized tensor of the same shape from the quantizer's `make_empty`, whose assertions are executed."""
    return output if output is not None else quantizer.make_empty(tensor.shape, dtype=tensor.dtype, device="meta")


def split_quantize(tensor: Any, splits: Sequence[int], quantizers: Sequence[Any]) -> list[Any]:
    """Split a tensor along its first dimension into parts of these sizes, and return the quantized parts."""
    return [quantize(part, one) for part, one in zip(tensor.split(list(splits)), quantizers, strict=True)]


def bgrad_quantize(grad: Any, quantizer: Any) -> tuple[Any, Any]:
    """Return the gradient of a bias, and the quantized gradient."""
    return empty(grad.shape[-1:], grad.dtype), quantize(grad, quantizer)


def dequantize(tensor: Any, dtype: enumerations.DType) -> Any:
    """Return a tensor of the same shape with another data type."""
    return empty(tensor.size(), torch_dtype(dtype))


def fp8_transpose(data: Any, dtype: Any, *, out: Any = None) -> Any:
    """Return a tensor with the last dimension first."""
    shape = data.size()
    return empty((shape[-1], *shape[:-1]), data.dtype)


def swap_first_dims(data: Any, *, out: Any = None) -> Any:
    """Return a tensor with its first two dimensions swapped."""
    shape = data.size()
    return empty((shape[1], shape[0], *shape[2:]), data.dtype)


def _rows_and_columns(tensor: Any) -> tuple[int, int]:
    """Return the product of all dimensions but the last, and the last dimension."""
    if getattr(tensor, "_data", True) is None:  # a Float8Tensor that stores only its transpose
        last, *rows = tensor._transpose.size()
        return math.prod(rows), last
    shape = tensor.size()
    return math.prod(shape[:-1]), shape[-1]


def _is_quantized(tensor: Any) -> bool:
    return hasattr(tensor, "_quantizer")


def gemm_shape(a: Any, transa: bool, b: Any, transb: bool) -> tuple[int, ...]:
    """Return the shape of a GEMM's result, in TE's order of operands: `a` contains weights, `b` tokens.

    Raises:
        RuntimeError: the shapes of the operands do not match, or cuBLASLt does not support them in FP8.
    """
    (a_rows, a_columns), (b_rows, b_columns) = _rows_and_columns(a), _rows_and_columns(b)
    inner_a, last = (a_columns, a_rows) if transa else (a_rows, a_columns)
    inner_b = b_rows if transb else b_columns
    if inner_a != inner_b:
        raise RuntimeError(
            f"GEMM of {tuple(a.size())} and {tuple(b.size())}: inner dimensions {inner_a} and {inner_b} differ"
        )
    if _is_quantized(a) and _is_quantized(b):
        # In FP8, the inner dimension is contiguous in both operands. cuBLASLt requires it and the number of rows of the
        # result to be multiples of 16.
        for name, size in (("inner dimension", inner_a), ("number of rows of the result", last)):
            if size % FP8_ALIGNMENT:
                raise RuntimeError(f"FP8 GEMM: the {name} must be a multiple of {FP8_ALIGNMENT}, but is {size}")
    return (b_columns, last) if transb else (*b.size()[:-1], last)


def generic_gemm(
    a: Any,
    transa: bool,
    b: Any,
    transb: bool,
    out: Any,
    quantizer: Any,
    out_dtype: enumerations.DType | None,
    bias: Any,
    bias_dtype: enumerations.DType,
    gelu: bool,
    gelu_in: Any,
    grad: bool,
    *_: Any,
    comm_overlap: Any = None,
    comm_type: Any = None,
    extra_output: Any = None,
    bulk_overlap: bool = False,
    **__: Any,
) -> tuple[Any, Any, Any, Any]:
    """Return (result, gradient of the bias, input of GELU, extra output of a GEMM that overlaps communication).

    Raises:
        RuntimeError: the shapes of the operands, of `out` or of the userbuffer do not match.
    """
    shape = gemm_shape(a, transa, b, transb)
    if out is not None and math.prod(out.size()) != math.prod(shape):
        raise RuntimeError(f"a GEMM of shape {shape} cannot write to a tensor of shape {tuple(out.size())}")
    if comm_overlap is not None and not bulk_overlap and comm_type == enumerations.CommOverlapType["RS"]:
        comm_overlap.check(math.prod(shape), local_chunk=False)
    dtype = torch_dtype(out_dtype) if out_dtype is not None else b.dtype
    result = out if out is not None else make_output(shape, dtype, quantizer)
    bias_grad = None
    if grad and bias is not None:
        bias_grad = empty(b.size()[-1:], torch_dtype(bias_dtype))
    if gelu_in is None and gelu:
        gelu_in = empty(shape, dtype)
    return result, bias_grad, gelu_in, extra_output


def te_general_grouped_gemm(
    a: Sequence[Any],
    transa: bool,
    b: Sequence[Any],
    transb: bool,
    out: Any,
    dtype: Any,
    splits: Any,
    bias: Any,
    *_: Any,
) -> Any:
    """Check the shapes of each expert's GEMM, whose result is in `out`, and return `bias`."""
    for weights, tokens in zip(a, b, strict=True):
        gemm_shape(weights, transa, tokens, transb)
    return bias


def _normalized_output(x: Any, out: Any, quantizer: Any, dtype: Any) -> Any:
    return out if out is not None else make_output(x.shape, torch_dtype(dtype), quantizer)


def rmsnorm_fwd(x: Any, weight: Any, eps: float, out: Any, quantizer: Any, dtype: Any, *_: Any) -> tuple[Any, ...]:
    """Return (normalized input, None, reciprocal standard deviations)."""
    import torch

    return _normalized_output(x, out, quantizer, dtype), None, empty(x.shape[:1], torch.float32)


def layernorm_fwd(
    x: Any, weight: Any, bias: Any, eps: float, out: Any, quantizer: Any, dtype: Any, *_: Any
) -> tuple[Any, ...]:
    """Return (normalized input, means, reciprocal standard deviations)."""
    import torch

    rows = empty(x.shape[:1], torch.float32)
    return _normalized_output(x, out, quantizer, dtype), rows, rows


def rmsnorm_bwd(grad: Any, x: Any, rsigma: Any, weight: Any, *_: Any) -> tuple[Any, ...]:
    """Return the gradients of input and weight."""
    return empty(x.shape, x.dtype), empty(weight.shape, weight.dtype)


def layernorm_bwd(grad: Any, x: Any, mu: Any, rsigma: Any, weight: Any, *_: Any) -> tuple[Any, ...]:
    """Return the gradients of input, weight and bias."""
    return empty(x.shape, x.dtype), empty(weight.shape, weight.dtype), empty(weight.shape, weight.dtype)


def fused_attn_fwd(
    max_q: int, max_kv: int, training: bool, scale: float, dropout: float, fill: bool, layout: Any, *rest: Any
) -> list[Any]:
    """Return [output, softmax statistics, generator state], and the softmax offset if there is one."""
    import torch

    q, v, o_quantizer = rest[6], rest[8], rest[15]
    shape = (*q.size()[:-1], v.size()[-1])
    dtype = q.dtype if q.dtype.is_floating_point else rest[9]
    output = make_output(shape, dtype, o_quantizer)
    batch = rest[4].numel() - 1
    heads = q.size()[-2]
    is_packed = layout.name.startswith("NVTE_T")
    statistics = empty((q.size()[0], heads, 1) if is_packed else (batch, heads, max_q, 1), torch.float32)
    results = [output, statistics, empty((2,), torch.int64)]
    if rest[17] is not None:
        results.append(rest[17])
    return results


def fused_attn_bwd(*arguments: Any) -> list[Any]:
    """Return the gradients of queries, keys, values, bias and softmax offset."""
    import torch

    q, k, v, dtype, quantizer = *arguments[13:16], arguments[18], arguments[-1]
    auxiliary = arguments[20]
    grads = [make_output(tensor.size(), dtype, quantizer) for tensor in (q, k, v)]
    return [*grads, empty((1,), torch.float32), empty(auxiliary[-1].size(), torch.float32)]


def _empty_like(x: Any, *_: Any, **__: Any) -> Any:
    return empty(x.shape, x.dtype)


def _create_activation(gated: bool) -> Callable[..., Any]:
    """Create an activation function; a gated one halves the last dimension."""

    def forward(x: Any, quantizer: Any = None, **_: Any) -> Any:
        shape = (*x.shape[:-1], x.shape[-1] // 2) if gated else x.shape
        return make_output(shape, x.dtype, quantizer)

    return forward


def _activation_gradient(grad: Any, x: Any, quantizer: Any = None, **_: Any) -> Any:
    return make_output(x.shape, x.dtype, quantizer)


def _dbias_activation(grad: Any, x: Any, quantizer: Any) -> tuple[Any, Any]:
    return empty(x.shape[-1:], grad.dtype), _activation_gradient(grad, x, quantizer)


def thd_read_half_tensor(x: Any, cu_seqlens: Any, half: int) -> Any:
    """Return one half of the tokens of each packed sample; tokens are dimension 0 of thd, 1 of [2, tokens, ...]."""
    shape = list(x.shape)
    axis = 0 if x.dim() == 3 else 1
    shape[axis] //= 2
    return empty(shape, x.dtype)


def thd_read_second_half_lse(lse: Any, cu_seqlens: Any, packed: bool, second_half_tokens: int) -> Any:
    """Return the softmax statistics of the second half of each packed sample."""
    shape = (lse.shape[0], second_half_tokens) if packed else (*lse.shape[:-1], second_half_tokens)
    return empty(shape, lse.dtype)


def fa_prepare_fwd(query: Any) -> Any:
    """Convert interleaved queries, keys and values: [tokens, batch, heads, 128] -> [3, batch, tokens, heads, 128]."""
    tokens, batch, *head = query.shape
    return empty((3, batch, tokens, *head), query.dtype)


def fa_prepare_bwd(query: Any, key: Any, value: Any) -> Any:
    """Return the gradients of queries, keys and values, interleaved: [tokens, batch, heads, 3 x 128]."""
    batch, tokens, heads, channels = query.shape
    return empty((tokens, batch, heads, 3 * channels), query.dtype)


_SOFTMAXES = tuple(
    f"scaled_{kind}softmax_{way}"
    for kind in ("", "masked_", "upper_triang_masked_", "aligned_causal_masked_")
    for way in ("forward", "backward")
)
_WRITES = (
    *("thd_second_half_lse_correction", "thd_out_correction", "thd_grad_correction", "fused_multi_row_padding"),
    *("fused_multi_row_unpadding", "bulk_overlap_ag_with_external_gemm", "multi_tensor_scale", "multi_tensor_adam"),
    *("fused_amax_and_scale_update_after_reduction", "multi_tensor_compute_scale_and_scale_inv", "compute_amax"),
)
_PLAIN_ACTIVATIONS = ("gelu", "qgelu", "relu", "srelu", "silu")
_GATED_ACTIVATIONS = ("geglu", "qgeglu", "reglu", "sreglu", "swiglu", "clamped_swiglu")

KERNELS: dict[str, Callable[..., Any]] = {
    **{
        function.__name__: function
        for function in (
            *(quantize, split_quantize, bgrad_quantize, dequantize, generic_gemm, te_general_grouped_gemm),
            *(rmsnorm_fwd, layernorm_fwd, rmsnorm_bwd, layernorm_bwd, fused_attn_fwd, fused_attn_bwd),
            *(fa_prepare_fwd, fa_prepare_bwd, thd_read_half_tensor, thd_read_second_half_lse),
            *(fp8_transpose, swap_first_dims),
        )
    },
    **dict.fromkeys(("fused_rope_forward", "fused_rope_backward"), _empty_like),
    **dict.fromkeys(_SOFTMAXES, _empty_like),
    **dict.fromkeys(_WRITES, do_nothing),
    **dict.fromkeys(_PLAIN_ACTIVATIONS, _create_activation(False)),
    **dict.fromkeys(_GATED_ACTIVATIONS, _create_activation(True)),
    **dict.fromkeys((f"d{n}" for n in (*_PLAIN_ACTIVATIONS, *_GATED_ACTIVATIONS[:-1])), _activation_gradient),
    "clamped_dswiglu": _activation_gradient,
    **dict.fromkeys((f"dbias_d{n}" for n in _PLAIN_ACTIVATIONS), _dbias_activation),
}
