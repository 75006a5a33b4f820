"""`ModelShape`: the shape of a decoder. `counts.py` counts its parameters, `work.py` its FLOPs."""

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
"""Style -> fields: llama = RMSNorm, gated MLP, no biases, untied; gpt = LayerNorm, biases everywhere, tied."""

LETTERS = {"M": ("mamba",), "*": ("attention",), "-": ("mlp",), "E": ("moe",)}
"""Megatron's letters in a hybrid pattern (megatron/core/ssm/mamba_hybrid_layer_allocation.py), one block per layer."""

RUN = re.compile(r"(\d{1,5})x(\d{1,7})(-?)")
"""One run in `ModelShape.runs`: number of layers, MLP width, and a minus sign if there is no attention."""

REFUSABLE_DEGREES = ("pp", "cp", "vp")
"""Degrees that `ModelShape.refuses` may contain."""

MAX_SIZE, MAX_LAYERS = 2**31, 10_000
"""Maximum sizes; a larger one is a typo."""


@dataclass(frozen=True)
class ModelShape:
    """The shape of a decoder. Sizes are in elements; 0 means "none" unless documented otherwise."""

    name: str
    layers: int
    hidden: int
    heads: int
    vocab: int
    """Vocabulary size of the model's tokenizer, before padding."""
    ffn: int = 0
    """Width of the dense MLP; unused if all layers are MoE layers; with `runs`, a typical width."""
    kv_heads: int = 0
    """Query groups; 0 = same as heads."""
    head_dim: int = 0
    """kv_channels; 0 = hidden / heads."""
    vocab_divisible_by: int = 128
    """make_vocab_size_divisible_by; 1 = the configuration sets the embedding size, as in NeMo's Qwen and Gemma."""
    norm: Literal["rms", "layer"] = "rms"
    gated: bool = True
    """Whether the MLP is gated, such as SwiGLU: its first matrix is twice as wide."""
    clamped: bool = False
    """Whether the gated activations of experts are clamped, by separate kernels that keep a copy (GPT-OSS)."""
    bias: bool = False
    """add_bias_linear: whether all linear layers have biases, including the router."""
    qkv_bias: bool = False
    proj_bias: bool = False
    """Whether the output projection of attention has a bias."""
    mlp_bias: bool = False
    """Whether dense MLPs have biases."""
    tied: bool = False
    """Whether the output layer shares the embedding; a copy if they are on different pipeline stages."""
    qk_norm: bool = False
    """Whether queries and keys are normalized, over head_dim (MLA always does, over the latent sizes)."""
    qk_norm_whole: bool = False
    """With `qk_norm`: over all heads together (OLMo 2)."""
    one_norm: bool = False
    """Whether attention and MLP run in parallel and share one norm (Command R, Phi 2, Falcon)."""
    post_norms: bool = False
    """Whether there are also norms after attention and after the MLP (Gemma 2 and 3)."""
    positions: int = 0
    """Number of learned positions."""
    sink: bool = False
    """Whether each head has a learned softmax offset (GPT-OSS)."""
    window: int = 0
    """Size of the attention window in tokens."""
    global_every: int = 0
    """With a window: every `global_every`-th layer attends to all tokens; 0 = no layer does."""
    chunked: bool = False
    """Whether the window is a fixed chunk (Llama 4) instead of a sliding window."""
    flash_only: bool = False
    """Whether NeMo's configuration sets attention_backend flash, with which Megatron disables all other backends."""
    bf16_ends: int = 1
    """Number of layers at each end that stay in BF16 with FP8 current scaling; layers of hybrids are half as deep."""
    cross_attention: bool = False
    """Whether the decoder layers also attend to the output of an encoder (T5)."""
    soft_capped: bool = False
    """Whether scores are soft-capped by tanh, in a NeMo attention class that stores them, seq x seq (Gemma 2)."""
    refuses: str = ""
    """Degrees in `REFUSABLE_DEGREES` that NeMo's class of this model does not support, such as `cp vp`."""
    experts: int = 0
    topk: int = 0
    expert_ffn: int = 0
    shared_ffn: int = 0
    """Total width of all shared experts."""
    shared_gate: bool = False
    dense_first: int = 0
    """Number of layers with a dense MLP before the first MoE layer."""
    moe_every: int = 1
    """Every `moe_every`-th layer is an MoE layer."""
    latent: int = 0
    """Hidden size of routed experts, with projections before and after them (Nemotron 3 Super)."""
    kv_lora: int = 0
    """Rank of keys and values in multi-head latent attention; 0 = no latent attention."""
    q_lora: int = 0
    """0 = queries are projected from the hidden state directly."""
    qk_nope_dim: int = 0
    qk_rope_dim: int = 0
    v_dim: int = 0
    indexer_heads: int = 0
    """Heads of the indexer in sparse attention (DeepSeek V3.2, GLM-5)."""
    indexer_dim: int = 0
    indexer_topk: int = 0
    """Number of keys that the indexer selects per token."""
    pattern: str = ""
    """Layers of a hybrid model, in Megatron's letters: M, *, -, E."""
    letters_per_layer: int = 1
    """Letters of `pattern` per layer of NeMo's class: 2 in Hyena, a mixer and an MLP."""
    runs: str = ""
    """Layers with different MLPs, as runs: `5x28672` = five layers with attention and MLP width 28672, `2x14336-` = two
    without attention, `4x0-` = four that only pass on their input (Llama-Nemotron Super and Ultra)."""
    mamba_heads: int = 0
    mamba_head_dim: int = 0
    mamba_state: int = 0
    mamba_groups: int = 0
    conv: int = 4
    """Kernel size of the causal convolution in Mamba and gated delta-net layers."""
    delta_every: int = 0
    """All layers except every `delta_every`-th have a gated delta net (Qwen3-Next, Qwen 3.6); 0 = none."""
    delta_key_heads: int = 0
    delta_value_heads: int = 0
    delta_key_dim: int = 0
    delta_value_dim: int = 0
    attention_gate: bool = False
    """Whether the output of attention is gated: its query matrix is twice as wide."""
    mtp_layers: int = 0
    """Multi-token-prediction layers on the last stage. Each has the blocks of the last layer, or of `mtp_pattern`."""
    mtp_pattern: str = ""
    approximate: str = field(default="", compare=False)
    """How the shape differs from the model, if it is approximate; shown as a warning."""
    source: str = field(default="given by hand", compare=False)

    def __post_init__(self) -> None:
        for f in fields(self):
            value = getattr(self, f.name)
            if type(value) is not type(_KINDS[f.name]):
                raise UserError(f"{self.name}: {f.name} must be {_describe_type(_KINDS[f.name])}, not {value!r}")
            maximum = MAX_LAYERS if f.name == "layers" else MAX_SIZE
            if isinstance(value, int) and not 0 <= value <= maximum:
                raise UserError(f"{self.name}: {f.name} must be between 0 and {maximum:,}, not {value}")
        for problem, hint in _problems(self):
            raise UserError(f"{self.name}: {problem}", hint)

    @classmethod
    def from_mapping(cls, name: str, values: dict[str, Any], where: str) -> ModelShape:
        """Create a shape from a TOML table; error messages begin with `where` (file and table).

        Raises:
            UserError: a key is unknown or missing, a value has the wrong type, or the shape is inconsistent.
        """
        values = dict(values)
        style = values.pop("style", "llama")
        if style not in STYLES:
            raise UserError(f"{where}: style must be one of {', '.join(STYLES)}, not {style!r}")
        field_names = [f.name for f in fields(cls) if f.name != "name"]
        for key in values:
            if key not in field_names:
                raise UserError(f"{where}: there is no model key {key!r}", did_you_mean(key, field_names))
        for key in ("layers", "hidden", "heads", "vocab"):
            if key not in values:
                raise UserError(f"{where}: {key} is missing", "layers, hidden, heads and vocab are required")
        return cls(name=name, **{**STYLES[style], **values})

    @classmethod
    def from_shape(cls, *, name: str = "custom", style: str = "llama", **shape: Any) -> ModelShape:
        """Create a shape from the defaults of a style (`llama` or `gpt`) and fields of this class, which override them.

        In the style `gpt`, `ffn` is 4 x hidden by default.

        Raises:
            UserError: a field is unknown, missing or invalid, or the shape is inconsistent.
        """
        if style == "gpt" and isinstance(shape.get("hidden"), int):
            shape.setdefault("ffn", 4 * shape["hidden"])
        return cls.from_mapping(name, {"style": style, **shape}, name)

    def replace(self, **changes: Any) -> ModelShape:
        """Return a copy with some fields changed; reducing `layers` also truncates `pattern` or `runs`."""
        if self.pattern and "layers" in changes and "pattern" not in changes:
            changes["pattern"] = self.pattern[: changes["layers"]]
        if self.runs and "layers" in changes and "runs" not in changes:
            kept_runs = self._runs[: changes["layers"]]
            changes["runs"] = " ".join(f"1x{ffn}{'' if mixer else '-'}" for mixer, ffn in kept_runs)
        return replace(self, **changes)

    @property
    def is_moe(self) -> bool:
        """Whether any layer has routed experts."""
        return self.experts > 0

    @property
    def groups(self) -> int:
        """Number of key-value heads."""
        return self.kv_heads or self.heads

    @property
    def channels(self) -> int:
        """Size of an attention head."""
        return self.head_dim or self.hidden // self.heads

    @cached_property
    def blocks(self) -> tuple[tuple[str, ...], ...]:
        """The blocks of each layer: a mixer, `attention`, `mla`, `mamba` or `delta`; then `mlp` or `moe`."""
        if self.pattern:
            return tuple(LETTERS[letter] for letter in self.pattern)
        if self.runs:
            return tuple(("attention", "mlp") if mixer else ("mlp",) for mixer, _ in self._runs)
        return tuple((self._mixer(i), self._feed_forward(i)) for i in range(self.layers))

    @cached_property
    def widths(self) -> tuple[int, ...]:
        """Width of the dense MLP in each layer; 0 = none."""
        if self.runs:
            return tuple(ffn for _, ffn in self._runs)
        return tuple(self.ffn * ("mlp" in blocks) for blocks in self.blocks)

    @property
    def _runs(self) -> tuple[tuple[bool, int], ...]:
        """For each layer in `runs`: whether it has attention, and the width of its MLP."""
        runs = (RUN.fullmatch(run) for run in self.runs.split())
        return tuple(layer for run in runs if run for layer in int(run[1]) * [(not run[3], int(run[2]))])

    def count_blocks(self, layers: Iterable[int]) -> Mapping[str, float]:
        """Return the number of blocks of each kind in `layers`; with `runs`, MLPs count as width / ffn."""
        layers = list(layers)
        block_counts = Counter(block for i in layers for block in self.blocks[i])
        return {**block_counts, "mlp": sum(self.widths[i] for i in layers) / self.ffn} if self.runs else block_counts

    @property
    def mtp_blocks(self) -> tuple[str, ...]:
        """The blocks of a multi-token-prediction layer."""
        if self.mtp_pattern:
            return tuple(LETTERS[letter][0] for letter in self.mtp_pattern)
        return self.blocks[-1]

    @cached_property
    def kinds(self) -> frozenset[str]:
        """The kinds of blocks in the model, including multi-token prediction."""
        layers = (*self.blocks, self.mtp_blocks) if self.mtp_layers else self.blocks
        return frozenset(block for blocks in layers for block in blocks)

    def _mixer(self, layer: int) -> str:
        """Return the kind of a layer's mixer."""
        if self.delta_every and (layer + 1) % self.delta_every:
            return "delta"
        return "mla" if self.kv_lora else "attention"

    def _feed_forward(self, layer: int) -> str:
        """Return `moe` or `mlp`, the kind of a layer's feed-forward block."""
        routed = self.experts and layer >= self.dense_first and layer % self.moe_every == self.moe_every - 1
        return "moe" if routed else "mlp"

    def sees_all(self, layer: int) -> bool:
        """Return whether an attention layer attends to the entire sequence instead of a window."""
        return not self.window or bool(self.global_every and (layer + 1) % self.global_every == 0)

    @overload
    def padded_vocab(self, tp: int = 1) -> int: ...
    @overload
    def padded_vocab(self, tp: Column) -> Column: ...
    def padded_vocab(self, tp: Integer = 1) -> Integer:
        """Return the number of rows of the embedding: vocab rounded up to a multiple of vocab_divisible_by x tp.

        Source: nemo.lightning.base.
        """
        multiple = self.vocab_divisible_by * tp
        return -(-self.vocab // multiple) * multiple

    def parameters(self, split: Split | None = None, stage: int = 0) -> Parameters:
        """Return the number of parameters per category on one rank of a pipeline stage, summed over its model chunks.

        Without a split, of the complete model.

        Raises:
            UserError: the split does not divide a size of the model.
        """
        return sum(self.chunk_parameters(split, stage), Parameters())

    def chunk_parameters(self, split: Split | None = None, stage: int = 0) -> list[Parameters]:
        """Return the number of parameters per category of each model chunk on one rank of a pipeline stage."""
        return counts.stage_parameters(self, split or Split(), stage)

    def total_parameters(self) -> int:
        """Return the number of parameters of the model with unpadded vocabulary, as on a model card."""
        return self.replace(vocab_divisible_by=1).parameters().total

    def active_parameters(self) -> int:
        """Return the number of parameters that a token uses: of the routed experts, only topk."""
        unpadded = self.replace(vocab_divisible_by=1).parameters()
        return unpadded.total - unpadded.experts + (unpadded.experts * self.topk // self.experts if self.experts else 0)

    def flops_per_token(self, seq: int, *, causal: bool) -> float:
        """Return the model FLOPs per token of a training step; see `work.flops_per_token`."""
        return work.flops_per_token(self, seq, causal=causal)


TEXTS = ("name", "source", "approximate", "norm", "pattern", "mtp_pattern", "runs", "refuses")
_KINDS: dict[str, Any] = {f.name: "" if f.name in TEXTS else f.default for f in fields(ModelShape)} | dict.fromkeys(
    ("layers", "hidden", "heads", "vocab"), 0
)
"""Field -> an example value of its type."""


def _describe_type(value: object) -> str:
    """Return the type of a value, for messages."""
    return {bool: "true or false", int: "an integer", str: "a string"}[type(value)]


def _problems(m: ModelShape) -> list[tuple[str, str]]:
    """Return the inconsistencies in a shape, as (message, fix)."""
    positive = ("layers", "hidden", "heads", "vocab", "vocab_divisible_by", "moe_every")
    problems = [
        (f"{key} is 0, but must be at least 1", f"set {key} to at least 1") for key in positive if not getattr(m, key)
    ]
    if problems:
        return problems
    if m.norm not in ("rms", "layer"):
        problems.append((f"norm must be rms or layer, not {m.norm!r}", "set norm rms or layer"))
    if not m.head_dim and m.hidden % m.heads:
        problems.append(
            (f"hidden {m.hidden} must be divisible by heads {m.heads}", "set head_dim, or change hidden or heads")
        )
    if m.heads % m.groups:
        problems.append((f"heads {m.heads} must be divisible by kv_heads {m.kv_heads}", "change kv_heads"))
    unknown = sorted(set(m.refuses.split()) - set(REFUSABLE_DEGREES))
    if unknown:
        problems.append((f"refuses contains {unknown[0]!r}", f"valid degrees: {', '.join(REFUSABLE_DEGREES)}"))
    if m.topk > m.experts:
        problems.append((f"topk {m.topk} exceeds experts {m.experts}", "reduce topk"))
    return problems or _pattern_problems(m) or _runs_problems(m) or _missing_keys(m)


def _pattern_problems(m: ModelShape) -> list[tuple[str, str]]:
    """Return the inconsistencies in `pattern` and `mtp_pattern`, as (message, fix)."""
    unknown = sorted(set(m.pattern + m.mtp_pattern) - set(LETTERS))
    if unknown:
        return [(f"the pattern contains {''.join(unknown)!r}", f"valid letters: {' '.join(LETTERS)}")]
    if m.pattern and len(m.pattern) != m.layers:
        return [(f"the pattern has {len(m.pattern)} layers, but layers is {m.layers}", "use one letter per layer")]
    return []


def _runs_problems(m: ModelShape) -> list[tuple[str, str]]:
    """Return the inconsistencies in `runs`, as (message, fix)."""
    for run in m.runs.split():
        if not RUN.fullmatch(run):
            return [(f"runs contains {run!r}", "use layers x MLP width: 5x28672, or 5x28672- without attention")]
    if not m.runs:
        return []
    if len(m.widths) != m.layers:
        return [(f"the runs have {len(m.widths)} layers, but layers is {m.layers}", "the runs must add up to layers")]
    if m.pattern or m.experts or m.kv_lora or m.delta_every:
        return [
            ("runs cannot be combined with pattern, experts, kv_lora or delta_every", "set only runs, or omit runs")
        ]
    return []


REQUIRED_FIELDS = {
    "mlp": ("ffn",),
    "moe": ("experts", "topk", "expert_ffn"),
    "mla": ("kv_lora", "qk_nope_dim", "v_dim"),
    "mamba": ("mamba_heads", "mamba_head_dim", "mamba_state", "mamba_groups"),
    "delta": ("delta_key_heads", "delta_value_heads", "delta_key_dim", "delta_value_dim"),
    "attention": (),
}
"""Kind of block -> fields that must not be 0."""


def _missing_keys(m: ModelShape) -> list[tuple[str, str]]:
    """Return (message, fix) for each field that a block of the model requires and that is 0."""
    kinds = {block for blocks in m.blocks for block in blocks}
    required_fields = [(kind, key) for kind in sorted(kinds) for key in REQUIRED_FIELDS[kind]]
    required_fields += [("indexer", key) for key in ("indexer_dim", "q_lora", "kv_lora") if m.indexer_heads]
    return [(f"{key} is missing", f"{kind} layers require it") for kind, key in required_fields if not getattr(m, key)]
