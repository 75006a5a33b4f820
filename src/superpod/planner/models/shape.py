"""`ModelShape`: the shape of a decoder, as data. `counts.py` counts its parameters, `work.py` its FLOPs."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, overload

from superpod.errors import UserError, did_you_mean
from superpod.planner.models import counts, work
from superpod.planner.models.counts import Parameters
from superpod.planner.models.stages import Split

if TYPE_CHECKING:
    from superpod.planner.arrays import Column, Integer

STYLES: dict[str, dict[str, Any]] = {
    "llama": {},
    "gpt": {"norm": "layer", "gated": False, "bias": True, "tied": True},
}
"""What a style sets: llama = RMSNorm, gated MLP, no biases, untied; gpt = LayerNorm, biases everywhere, tied."""

LETTERS = {"M": ("mamba",), "*": ("attention",), "-": ("mlp",), "E": ("moe",)}
"""Megatron's letters of a hybrid pattern (megatron/core/ssm/mamba_hybrid_layer_allocation.py), one block a layer."""

RUN = re.compile(r"(\d{1,5})x(\d{1,7})(-?)")
"""One run of `ModelShape.runs`: layers, width of the MLP, - = without attention."""

REFUSABLE = ("pp", "cp", "vp")
"""What `ModelShape.refuses` may name."""

MOST, MOST_LAYERS = 2**31, 10_000
"""Largest sizes; anything larger is a typing mistake."""


@dataclass(frozen=True)
class ModelShape:
    """A decoder's shape. Sizes are in elements; 0 means that the model has no such part, unless a field says more."""

    name: str
    layers: int
    hidden: int
    heads: int
    vocab: int
    """Tokens of the model's own tokenizer, before padding."""
    ffn: int = 0
    """Width of the dense MLP; of no use where every layer is a mixture of experts; with `runs`, a typical one."""
    kv_heads: int = 0
    """Query groups; 0 = as many as heads."""
    head_dim: int = 0
    """kv_channels; 0 = hidden / heads."""
    vocab_divisible_by: int = 128
    """make_vocab_size_divisible_by. 1 = the configuration sets the embedding's size, as NeMo's Qwen and Gemma do."""
    norm: Literal["rms", "layer"] = "rms"
    gated: bool = True
    """SwiGLU and its kin: the MLP's first matrix is twice as wide."""
    clamped: bool = False
    """Experts' gated activations are clamped first, by kernels of their own that keep a copy (GPT-OSS)."""
    bias: bool = False
    """add_bias_linear: biases on every matrix product, the router's included."""
    qkv_bias: bool = False
    proj_bias: bool = False
    """On the attention's output projection."""
    mlp_bias: bool = False
    """On the matrices of dense MLPs."""
    tied: bool = False
    """The output head is the embedding; a copy of it where they lie on different pipeline stages."""
    qk_norm: bool = False
    """A norm of queries and one of keys, over head_dim (in MLA always, over the latent sizes)."""
    qk_norm_whole: bool = False
    """With `qk_norm`: over all heads at once (OLMo 2)."""
    one_norm: bool = False
    """Attention and MLP read the same norm, side by side (Command R, Phi 2, Falcon)."""
    post_norms: bool = False
    """A norm after attention and one after the MLP as well (Gemma 2 and 3)."""
    positions: int = 0
    """Rows of a learned position table."""
    sink: bool = False
    """A learned softmax offset for each head (GPT-OSS)."""
    window: int = 0
    """Keys that a windowed attention layer sees, tokens."""
    global_every: int = 0
    """With a window: the last of so many layers sees everything; 0 = no layer does."""
    chunked: bool = False
    """The window is a chunk that tokens see from its start (Llama 4), not one that slides."""
    flash_only: bool = False
    """NeMo's configuration sets attention_backend flash, so that Megatron switches the other backends off."""
    bf16_ends: int = 1
    """Layers at each end that stay in BF16 under FP8 with current scaling; a hybrid's layers are half as deep."""
    cross_attention: bool = False
    """A decoder's layers look at an encoder's output too (T5)."""
    soft_capped: bool = False
    """Scores are capped by a tanh, in an attention class of NeMo's own that keeps them, seq x seq (Gemma 2)."""
    refuses: str = ""
    """Degrees of which NeMo's class of this model takes 1 only, of `REFUSABLE`, as in `cp vp`."""
    experts: int = 0
    topk: int = 0
    expert_ffn: int = 0
    shared_ffn: int = 0
    """Width of all shared experts together."""
    shared_gate: bool = False
    dense_first: int = 0
    """Layers with a dense MLP before the first mixture of experts."""
    moe_every: int = 1
    """The last of so many layers is a mixture of experts."""
    latent: int = 0
    """Routed experts work on this size; a projection in and one out (Nemotron 3 Super)."""
    kv_lora: int = 0
    """Multi-head latent attention, if not 0."""
    q_lora: int = 0
    """0 = queries are projected from the hidden state directly."""
    qk_nope_dim: int = 0
    qk_rope_dim: int = 0
    v_dim: int = 0
    indexer_heads: int = 0
    """Sparse attention's indexer (DeepSeek V3.2, GLM-5)."""
    indexer_dim: int = 0
    indexer_topk: int = 0
    """Keys that it selects for each token."""
    pattern: str = ""
    """A hybrid's layers, one of Megatron's letters each: M, *, -, E."""
    letters_per_layer: int = 1
    """Letters of `pattern` that are one layer of NeMo's class: 2 in Hyena, a mixer and an MLP."""
    runs: str = ""
    """Layers that differ in their MLP, as runs in order: `5x28672` = five layers with attention and an MLP so wide,
    `2x14336-` = two without attention, `4x0-` = four that pass their input on (Llama-Nemotron Super and Ultra)."""
    mamba_heads: int = 0
    mamba_head_dim: int = 0
    mamba_state: int = 0
    mamba_groups: int = 0
    conv: int = 4
    """Taps of the causal convolution in Mamba and gated delta-net layers."""
    delta_every: int = 0
    """Gated delta net in all layers but the last of so many (Qwen3-Next, Qwen 3.6)."""
    delta_key_heads: int = 0
    delta_value_heads: int = 0
    delta_key_dim: int = 0
    delta_value_dim: int = 0
    attention_gate: bool = False
    """The attention's output is gated: its query matrix is twice as wide."""
    mtp_layers: int = 0
    """Multi-token-prediction layers, on the last stage. Each is built like the last layer, or like `mtp_pattern`."""
    mtp_pattern: str = ""
    approximate: str = field(default="", compare=False)
    """What the shape simplifies, where the blocks here do not quite describe the model; a warning repeats it."""
    source: str = field(default="given by hand", compare=False)

    def __post_init__(self) -> None:
        for f in fields(self):
            value = getattr(self, f.name)
            if type(value) is not type(_KINDS[f.name]):
                raise UserError(f"{self.name}: {f.name} must be {_kind(_KINDS[f.name])}, not {value!r}")
            most = MOST_LAYERS if f.name == "layers" else MOST
            if isinstance(value, int) and not 0 <= value <= most:
                raise UserError(f"{self.name}: {f.name} must be between 0 and {most:,}, not {value}")
        for problem, hint in _problems(self):
            raise UserError(f"{self.name}: {problem}", hint)

    @classmethod
    def from_mapping(cls, name: str, values: dict[str, Any], where: str) -> ModelShape:
        """A model from a TOML table; `where` (file and table) opens the message when a key is unknown.

        Raises:
            UserError: on an unknown or missing key, a value of the wrong type, or a shape that contradicts itself.
        """
        values = dict(values)
        style = values.pop("style", "llama")
        if style not in STYLES:
            raise UserError(f"{where}: style must be one of {', '.join(STYLES)}, not {style!r}")
        known = [f.name for f in fields(cls) if f.name != "name"]
        for key in values:
            if key not in known:
                raise UserError(f"{where}: there is no model key {key!r}", did_you_mean(key, known))
        for key in ("layers", "hidden", "heads", "vocab"):
            if key not in values:
                raise UserError(f"{where}: {key} is missing", "layers, hidden, heads and vocab are required")
        return cls(name=name, **{**STYLES[style], **values})

    @classmethod
    def from_shape(cls, *, name: str = "custom", style: str = "llama", **shape: Any) -> ModelShape:
        """A model given by hand: fields of this class over those of the style (`llama` or `gpt`).

        A `gpt` without `ffn` gets 4 x hidden.

        Raises:
            UserError: as `from_mapping`.
        """
        if style == "gpt" and isinstance(shape.get("hidden"), int):
            shape.setdefault("ffn", 4 * shape["hidden"])
        return cls.from_mapping(name, {"style": style, **shape}, name)

    def replace(self, **changes: Any) -> ModelShape:
        """A copy with some fields changed; `layers` alone cuts the model to so many (its pattern or runs with it)."""
        if self.pattern and "layers" in changes and "pattern" not in changes:
            changes["pattern"] = self.pattern[: changes["layers"]]
        if self.runs and "layers" in changes and "runs" not in changes:
            cut = self._runs[: changes["layers"]]
            changes["runs"] = " ".join(f"1x{ffn}{'' if mixer else '-'}" for mixer, ffn in cut)
        return replace(self, **changes)

    @property
    def is_moe(self) -> bool:
        """Whether some layer has routed experts."""
        return self.experts > 0

    @property
    def groups(self) -> int:
        """Key and value heads."""
        return self.kv_heads or self.heads

    @property
    def channels(self) -> int:
        """Size of one attention head."""
        return self.head_dim or self.hidden // self.heads

    @cached_property
    def blocks(self) -> tuple[tuple[str, ...], ...]:
        """The blocks of every layer: mixers `attention`, `mla`, `mamba`, `delta`; then `mlp` or `moe`."""
        if self.pattern:
            return tuple(LETTERS[letter] for letter in self.pattern)
        if self.runs:
            return tuple(("attention", "mlp") if mixer else ("mlp",) for mixer, _ in self._runs)
        return tuple((self._mixer(i), self._feed_forward(i)) for i in range(self.layers))

    @cached_property
    def widths(self) -> tuple[int, ...]:
        """Width of every layer's dense MLP; 0 = it has none."""
        if self.runs:
            return tuple(ffn for _, ffn in self._runs)
        return tuple(self.ffn * ("mlp" in blocks) for blocks in self.blocks)

    @property
    def _runs(self) -> tuple[tuple[bool, int], ...]:
        """Of every layer of `runs`: whether it has attention, and its MLP's width."""
        runs = (RUN.fullmatch(run) for run in self.runs.split())
        return tuple(layer for run in runs if run for layer in int(run[1]) * [(not run[3], int(run[2]))])

    def held(self, layers: Iterable[int]) -> Mapping[str, float]:
        """Blocks of each kind in these layers; MLPs that differ in width count in units of `ffn`."""
        layers = list(layers)
        counted = Counter(block for i in layers for block in self.blocks[i])
        return {**counted, "mlp": sum(self.widths[i] for i in layers) / self.ffn} if self.runs else counted

    @property
    def mtp_blocks(self) -> tuple[str, ...]:
        """The blocks of one multi-token-prediction layer."""
        if self.mtp_pattern:
            return tuple(LETTERS[letter][0] for letter in self.mtp_pattern)
        return self.blocks[-1]

    @cached_property
    def kinds(self) -> frozenset[str]:
        """The kinds of blocks that it has, multi-token prediction included."""
        layers = (*self.blocks, self.mtp_blocks) if self.mtp_layers else self.blocks
        return frozenset(block for blocks in layers for block in blocks)

    def _mixer(self, layer: int) -> str:
        if self.delta_every and (layer + 1) % self.delta_every:
            return "delta"
        return "mla" if self.kv_lora else "attention"

    def _feed_forward(self, layer: int) -> str:
        routed = self.experts and layer >= self.dense_first and layer % self.moe_every == self.moe_every - 1
        return "moe" if routed else "mlp"

    def sees_all(self, layer: int) -> bool:
        """Whether an attention layer attends to the whole sequence, not to a window."""
        return not self.window or bool(self.global_every and (layer + 1) % self.global_every == 0)

    @overload
    def padded_vocab(self, tp: int = 1) -> int: ...
    @overload
    def padded_vocab(self, tp: Column) -> Column: ...
    def padded_vocab(self, tp: Integer = 1) -> Integer:
        """Rows of the embedding: vocab up to a multiple of vocab_divisible_by x tp (nemo.lightning.base)."""
        multiple = self.vocab_divisible_by * tp
        return -(-self.vocab // multiple) * multiple

    def parameters(self, split: Split | None = None, stage: int = 0) -> Parameters:
        """Parameters on one rank of a pipeline stage, all its model chunks together, by owner.

        Raises:
            UserError: when the split does not divide the model.
        """
        return sum(self.chunk_parameters(split, stage), Parameters())

    def chunk_parameters(self, split: Split | None = None, stage: int = 0) -> list[Parameters]:
        """As `parameters`, one for each model chunk of the stage (one without virtual stages), in order."""
        return counts.stage_parameters(self, split or Split(), stage)

    def total_parameters(self) -> int:
        """Parameters of the whole model, with its vocabulary unpadded: the number on a model's card."""
        return self.replace(vocab_divisible_by=1).parameters().total

    def active_parameters(self) -> int:
        """Of `total_parameters`, those that one token passes: of the routed experts, topk."""
        whole = self.replace(vocab_divisible_by=1).parameters()
        return whole.total - whole.experts + (whole.experts * self.topk // self.experts if self.experts else 0)

    def flops_per_token(self, seq: int, *, causal: bool) -> float:
        """Model FLOPs of one training step per token (no recomputation): `work.flops_per_token` says the convention."""
        return work.flops_per_token(self, seq, causal=causal)

    def kv_bytes_per_token(self, dtype: str = "bf16") -> float:
        """Bytes of KV cache that one more token takes, while no window is full: 2 x layers x groups x head_dim x bytes.

        Raises:
            UserError: when the dtype is not one of bf16, fp16, fp8, fp32, int8.
        """
        return work.kv_bytes_per_token(self, dtype)

    def kv_cache_bytes(self, seq: int, dtype: str = "bf16") -> float:
        """Bytes of the whole cache of one sequence: windows cut off, the states of Mamba and delta-net layers added."""
        return work.kv_cache_bytes(self, seq, dtype)


TEXTS = ("name", "source", "approximate", "norm", "pattern", "mtp_pattern", "runs", "refuses")
_KINDS: dict[str, Any] = {f.name: "" if f.name in TEXTS else f.default for f in fields(ModelShape)} | dict.fromkeys(
    ("layers", "hidden", "heads", "vocab"), 0
)
"""A value of each field's type."""


def _kind(value: object) -> str:
    return {bool: "true or false", int: "an integer", str: "a string"}[type(value)]


def _problems(m: ModelShape) -> list[tuple[str, str]]:
    """Return the contradictions in a shape, as (message, fix)."""
    positive = ("layers", "hidden", "heads", "vocab", "vocab_divisible_by", "moe_every")
    problems = [(f"{key} is 0", "it must be 1 or more") for key in positive if not getattr(m, key)]
    if problems:
        return problems
    if m.norm not in ("rms", "layer"):
        problems.append((f"norm is {m.norm!r}", "it must be rms or layer"))
    if not m.head_dim and m.hidden % m.heads:
        problems.append((f"hidden {m.hidden} must be divisible by heads {m.heads}", "or set head_dim"))
    if m.heads % m.groups:
        problems.append((f"heads {m.heads} must be divisible by kv_heads {m.kv_heads}", "change kv_heads"))
    unknown = sorted(set(m.refuses.split()) - set(REFUSABLE))
    if unknown:
        problems.append((f"refuses contains {unknown[0]!r}", f"it may contain {', '.join(REFUSABLE)}"))
    if m.topk > m.experts:
        problems.append((f"topk {m.topk} exceeds experts {m.experts}", "reduce topk"))
    return problems or _pattern_problems(m) or _runs_problems(m) or _missing(m)


def _pattern_problems(m: ModelShape) -> list[tuple[str, str]]:
    unknown = sorted(set(m.pattern + m.mtp_pattern) - set(LETTERS))
    if unknown:
        return [(f"the pattern contains {''.join(unknown)!r}", f"valid letters: {' '.join(LETTERS)}")]
    if m.pattern and len(m.pattern) != m.layers:
        return [(f"the pattern has {len(m.pattern)} layers, but layers is {m.layers}", "write one letter per layer")]
    return []


def _runs_problems(m: ModelShape) -> list[tuple[str, str]]:
    for run in m.runs.split():
        if not RUN.fullmatch(run):
            return [(f"runs contains {run!r}", "write layers x MLP width: 5x28672, or 5x28672- without attention")]
    if not m.runs:
        return []
    if len(m.widths) != m.layers:
        return [(f"the runs have {len(m.widths)} layers, but layers is {m.layers}", "the runs must add up to layers")]
    if m.pattern or m.experts or m.kv_lora or m.delta_every:
        return [
            ("runs cannot be combined with pattern, experts, kv_lora or delta_every", "set runs, or one of the others")
        ]
    return []


NEEDS = {
    "mlp": ("ffn",),
    "moe": ("experts", "topk", "expert_ffn"),
    "mla": ("kv_lora", "qk_nope_dim", "v_dim"),
    "mamba": ("mamba_heads", "mamba_head_dim", "mamba_state", "mamba_groups"),
    "delta": ("delta_key_heads", "delta_value_heads", "delta_key_dim", "delta_value_dim"),
    "attention": (),
}
"""Required fields by kind of block."""


def _missing(m: ModelShape) -> list[tuple[str, str]]:
    kinds = {block for blocks in m.blocks for block in blocks}
    needed = [(kind, key) for kind in sorted(kinds) for key in NEEDS[kind]]
    needed += [("indexer", key) for key in ("indexer_dim", "q_lora", "kv_lora") if m.indexer_heads]
    return [(f"{key} is missing", f"{kind} layers require it") for kind, key in needed if not getattr(m, key)]
