"""`Gpu`, `Node`, `Fabric`: what the hardware can do on paper. The numbers and their sources: `data/hardware.toml`.

What it does in practice (efficiency, measured collectives) is calibration, and lies elsewhere. A user adds hardware in
a TOML file of the same form; `load` reads it over the built-in tables.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields, replace
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from superpod.errors import UserError, did_you_mean
from superpod.planner.files import read_toml

DATA = Path(__file__).parent / "data" / "hardware.toml"

GIB = 2**30

PLAIN = ("fp32", "tf32", "bf16", "fp16")
"""Precisions that scale nothing."""
SCALED = ("fp8ds", "fp8cs", "fp8bw", "mxfp8", "nvfp4")
"""Precisions that scale tensors or blocks: FP8 with delayed, current and blockwise scaling; MXFP8; NVFP4."""
PRECISIONS = (*PLAIN, *SCALED)

PRECISION_ALIASES = {
    "fp8-ds": "fp8ds",
    "fp8-delayed": "fp8ds",
    "fp8-cs": "fp8cs",
    "fp8 current scaling": "fp8cs",
    "fp8 (torchao float8)": "fp8cs",  # torchao scales each tensor by its current maximum
    "float8": "fp8cs",
    "fp8-sc": "fp8bw",  # Megatron-Bridge's "sub-channel"
    "fp8-bw": "fp8bw",
    "fp8 blockwise": "fp8bw",
    "fp8-mx": "mxfp8",
    "fp8_mx": "mxfp8",
    "nvfp4": "nvfp4",
    "fp8": "fp8",  # the kind is not printed: delayed until mid-2025, current on Hopper later
}
"""Other spellings of precisions, in lower case. `fp8` stays as it is: only the caller can know which kind it means."""


@dataclass(frozen=True)
class Gpu:
    """One GPU. Peaks are dense, in TFLOP/s; 0 = the chip has no units for it. Bandwidths are one way."""

    name: str
    generation: str
    """A table of `data/hardware.toml`, which gives the fields from `scaled_formats` on."""
    bf16_tflops: float
    fp16_tflops: float
    fp32_tflops: float
    hbm_gb: float
    """Memory as sold, 10^9 bytes."""
    hbm_usable_gib: float
    """Memory that PyTorch sees, 2^30 bytes, before any context."""
    hbm_tb_per_s: float
    nvlink_gb_per_s: float
    """To other GPUs of the NVLink domain; 0 = none."""
    pcie_gb_per_s: float
    """To the host: PCIe, or NVLink-C2C."""
    sms: int
    power_w: float
    """Thermal design power."""
    tf32_tflops: float = 0.0
    fp8_tflops: float = 0.0
    nvfp4_tflops: float = 0.0
    calibrated_as: str = ""
    """The GPU whose calibration it takes: that which it is `like`; "" = its own."""
    scaled_formats: tuple[str, ...] = ()
    """Of `SCALED`, those that its Tensor Cores and Transformer Engine support."""
    fp8_any_order: bool = False
    """Tensor Cores multiply FP8 in any memory order; without, the backward pass needs a transposed copy of weights."""
    fuses_mxfp8_experts: bool = False
    """One kernel runs gated MXFP8 experts as a whole."""
    keeps_queue_order: bool = False
    """The GPU starts kernels in the order they are queued, with more than one hardware queue."""
    cublas_workspace_mib: int = 8
    """What PyTorch reserves for cuBLAS, per thread that calls it."""
    te_workspace_mib: int = 32
    """What Transformer Engine reserves for cuBLAS, per stream."""
    aliases: tuple[str, ...] = ()
    """Other names that it goes by, in lower case."""
    source: str = field(default="the user's file", compare=False)

    @property
    def hbm_usable_bytes(self) -> float:
        """Memory that PyTorch sees, bytes."""
        return self.hbm_usable_gib * GIB

    @property
    def precisions(self) -> tuple[str, ...]:
        """What it can train in, of `PRECISIONS`."""
        plain = tuple(p for p in PLAIN if getattr(self, f"{p}_tflops"))
        peaks = {name: self.nvfp4_tflops if name == "nvfp4" else self.fp8_tflops for name in self.scaled_formats}
        return plain + tuple(name for name, peak in peaks.items() if peak)

    def tflops(self, precision: str) -> float:
        """Peak dense TFLOP/s of matrix products in a precision (of `PRECISIONS`, or `fp8` of no particular kind).

        Raises:
            UserError: when this GPU has no such precision.
        """
        if precision == "fp8" and self.fp8_tflops:
            return self.fp8_tflops
        if precision not in self.precisions:
            raise UserError(
                f"{self.name} ({self.generation}) has no {precision}", f"it has {', '.join(self.precisions)}"
            )
        if precision in (*PLAIN, "nvfp4"):
            return getattr(self, f"{precision}_tflops")
        return self.fp8_tflops

    def replace(self, **changes: Any) -> Gpu:
        """A copy with some fields changed."""
        return replace(self, **changes)


@dataclass(frozen=True)
class Node:
    """A server: its GPUs and its way out. Of NVL72, a compute tray; the NVLink domain is the rack."""

    name: str
    gpu: Gpu
    gpus: int
    nvlink_domain: int
    """GPUs that NVLink joins; 1 = none."""
    nics: int
    """Ports for compute traffic."""
    nic_gbps: float
    """Speed of a port one way, 10^9 bits/s."""
    host_gb: float
    """Host memory, 10^9 bytes."""
    power_w: float
    """Of the whole system at most."""
    nvlink_c2c: bool = False
    """GPUs hang on a Grace CPU by NVLink-C2C, and network ports reach GPU memory through it."""
    source: str = field(default="the user's file", compare=False)

    @property
    def power_w_per_gpu(self) -> float:
        """The whole system's power over its GPUs."""
        return self.power_w / self.gpus

    def replace(self, **changes: Any) -> Node:
        """A copy with some fields changed."""
        return replace(self, **changes)


@dataclass(frozen=True)
class Fabric:
    """The network between nodes."""

    name: str
    kind: str
    """infiniband or ethernet"""
    gbps: float
    """Speed of a switch port one way, 10^9 bits/s."""
    latency_us: float
    """One small message, one way."""
    oversubscription: float = 1.0
    """Down-links over up-links of a leaf switch: 2 = half the bandwidth between leaves."""
    rails: int = 0
    """Ports of a node that are cabled; 0 = all of them."""
    scalable_unit: int = 0
    """Nodes under one group of leaf switches; 0 = not said."""
    source: str = field(default="the user's file", compare=False)

    def gb_per_s_per_gpu(self, node: Node) -> float:
        """Bandwidth between nodes, GB/s one way per GPU, when all of a node's GPUs send at once."""
        ports = min(node.nics, self.rails or node.nics)
        return ports * min(node.nic_gbps, self.gbps) / 8 / node.gpus / self.oversubscription

    def replace(self, **changes: Any) -> Fabric:
        """A copy with some fields changed."""
        return replace(self, **changes)


@dataclass(frozen=True)
class Hardware:
    """What a file holds, over the built-in tables."""

    gpus: Mapping[str, Gpu]
    nodes: Mapping[str, Node]
    fabrics: Mapping[str, Fabric]
    generations: Mapping[str, Mapping[str, object]] = field(default_factory=dict)
    """Of each GPU generation, the fields of `Gpu` that all its GPUs share."""

    def gpu_name(self, name: object) -> str:
        """The name here of a GPU: itself in lower case, or that of the GPU which has it as an alias."""
        return _spelled(name, self.gpus)

    def gpu(self, name: str) -> Gpu:
        """The GPU of that name or alias.

        Raises:
            UserError: naming the closest ones when there is none.
        """
        return _pick(self.gpus, self.gpu_name(name), "GPU")

    def node(self, name: str) -> Node:
        """The node of that name; a GPU's name (`h100`) is its DGX. Raises as `gpu`."""
        return _pick(self.nodes, self.gpu_name(name), "node")

    def fabric(self, name: str) -> Fabric:
        """The fabric of that name. Raises as `gpu`."""
        return _pick(self.fabrics, str(name).lower(), "fabric")

    def fabric_of(self, node: Node) -> Fabric:
        """The built-in InfiniBand fabric of the speed of the node's ports: that of its SuperPOD."""
        plain = [fabric for fabric in self.fabrics.values() if not fabric.rails]
        return min(plain, key=lambda fabric: abs(fabric.gbps - node.nic_gbps))


def gpu(name: str) -> Gpu:
    """A built-in GPU. Raises UserError naming the closest ones when there is none."""
    return builtin().gpu(name)


def node(name: str) -> Node:
    """A built-in node; `h100` is DGX H100. Raises as `gpu`."""
    return builtin().node(name)


def fabric(name: str) -> Fabric:
    """A built-in fabric. Raises as `gpu`."""
    return builtin().fabric(name)


def precision(text: str) -> str:
    """The name here of a precision: one of `PRECISIONS`, or `fp8` where the text does not say which kind.

    Free text is taken by its parts: `BF16, dist-opt (ZeRO-1)` is bf16, `FSDP+CP+compile+Float8` is fp8cs.

    Raises:
        UserError: when no precision is in it.
    """
    low = text.strip().lower()
    words = [low, low.split(",")[0].strip(), *low.replace("+", " ").replace(",", " ").split()]
    for word in words:
        if word in PRECISIONS or word in PRECISION_ALIASES:
            return PRECISION_ALIASES.get(word, word)
    known = [*PRECISIONS, *PRECISION_ALIASES]
    raise UserError(f"no precision is called {text!r}", did_you_mean(low, known) or f"known: {', '.join(PRECISIONS)}")


@cache
def builtin() -> Hardware:
    """The hardware of `data/hardware.toml`."""
    return _hardware(read_toml(DATA), DATA.name, Hardware({}, {}, {}))


def load(path: str | Path) -> Hardware:
    """The user's hardware over the built-in: tables `[gpu.NAME]`, `[node.NAME]`, `[fabric.NAME]`, `[generation.NAME]`.

    `[[collective]]` and `[[gemm]]` (measurements) may stand in the same file and are left to their own reader. `like =
    "h100"` in a table takes what the table does not say from a built-in one.

    Raises:
        UserError: naming file, table and key, and what the key may hold.
    """
    return _hardware(read_toml(Path(path)), str(path), builtin())


SECTIONS = ("generation", "gpu", "node", "fabric", "collective", "gemm")
TEXT = {"generation": (), "kind": ("infiniband", "ethernet"), "source": (), "gpu": (), "calibrated_as": ()}
"""Keys that hold words, and which ones; () = any."""
WORDS: dict[str, tuple[str, ...]] = {"scaled_formats": SCALED, "aliases": ()}
"""Keys that hold lists of words, and which ones; () = any."""
FLAGS = ("fp8_any_order", "fuses_mxfp8_experts", "keeps_queue_order", "nvlink_c2c")
WHOLE = (
    *("gpus", "nvlink_domain", "nics", "sms", "rails", "scalable_unit"),
    *("cublas_workspace_mib", "te_workspace_mib"),
)
"""Keys that hold whole numbers."""
NONE = ("nvlink_gb_per_s", "tf32_tflops", "fp8_tflops", "nvfp4_tflops", "rails", "scalable_unit", "host_gb", "nics")
"""Keys that may be 0: the hardware has none."""
OWN = ("name", "source", "aliases")
"""Fields that `like` does not take over."""
Kind = TypeVar("Kind", Gpu, Node, Fabric)
Value = str | bool | float | tuple[str, ...]


def _hardware(tables: dict[str, Any], where: str, base: Hardware) -> Hardware:
    for section in tables:
        if section not in SECTIONS:
            raise UserError(
                f"{where}: no section is called {section!r}",
                did_you_mean(section, list(SECTIONS)) or f"sections: {', '.join(SECTIONS)}",
            )
    known = replace(base, generations={**base.generations, **_tables(tables, "generation", where)})
    known = replace(known, gpus={**base.gpus, **_section(Gpu, tables, "gpu", where, known.gpus, known)})
    nodes = {**base.nodes, **_section(Node, tables, "node", where, base.nodes, known)}
    for name in (n.lower() for n in tables.get("gpu", {})):  # a GPU like another has a node like that one's
        like = base.nodes.get(known.gpus[name].calibrated_as)
        if name not in nodes and like is not None:
            nodes[name] = like.replace(name=name, gpu=known.gpus[name])
    fabrics = {**base.fabrics, **_section(Fabric, tables, "fabric", where, base.fabrics, known)}
    return replace(known, nodes=nodes, fabrics=fabrics)


def _tables(tables: dict[str, Any], section: str, where: str) -> dict[str, dict[str, Any]]:
    """The tables of a section, by name."""
    named = tables.get(section, {})
    if not isinstance(named, dict) or not all(isinstance(table, dict) for table in named.values()):
        raise UserError(f"{where}: {section} holds tables", f"write [{section}.my_name] above its keys")
    return named


def _section(
    kind: type[Kind], tables: dict[str, Any], section: str, where: str, base: Mapping[str, Kind], known: Hardware
) -> dict[str, Kind]:
    named = _tables(tables, section, where).items()
    return {n.lower(): _build(kind, n.lower(), t, f"{where} [{section}.{n}]", base, known) for n, t in named}


def _build(
    kind: type[Kind], name: str, table: dict[str, Any], where: str, base: Mapping[str, Kind], known: Hardware
) -> Kind:
    values: dict[str, Any] = {"name": name}
    keys = [f.name for f in fields(kind) if f.name != "name"]
    if (like := table.get("like")) is not None:
        model = _pick(base, known.gpu_name(like), kind.__name__.lower(), f"{where}: like: ")
        values = {key: getattr(model, key) for key in keys if key not in OWN} | values
        if isinstance(model, Gpu):
            values["calibrated_as"] = model.calibrated_as or model.name
    shared = known.generations.get(str(table.get("generation")), {}) if kind is Gpu else {}
    for key, value in {**shared, **table}.items():  # the GPU's own table wins over its generation's
        if key == "like":
            continue
        if key not in keys:
            hint = did_you_mean(key, keys) or f"keys: {', '.join(keys)}"
            raise UserError(f"{where}: no key is called {key!r}", hint)
        values[key] = _checked(key, value, where, known)
    for key in _required(kind):
        if key not in values:
            raise UserError(f"{where}: {key} is missing", 'give it, or take it over: like = "h100"')
    if isinstance(values.get("gpu"), str):
        values["gpu"] = _pick(known.gpus, known.gpu_name(values["gpu"]), "GPU", f"{where}: gpu: ")
    return kind(**values)


def _required(kind: type[Kind]) -> list[str]:
    """Fields without a default."""
    return [f.name for f in fields(kind) if f.default is MISSING and f.default_factory is MISSING and f.name != "name"]


def _checked(key: str, value: object, where: str, known: Hardware) -> Value:
    """The value of a key, of the type that the key holds; raises UserError where it is another."""
    if key in TEXT:
        allowed = tuple(known.generations) if key == "generation" else TEXT[key]
        if not isinstance(value, str) or (allowed and value not in allowed):
            raise UserError(f"{where}: {key} is {value!r}", _one_of(allowed) or "it is a string")
        return value
    if key in WORDS:
        words = value if isinstance(value, (list, tuple)) else [None]
        if not all(isinstance(word, str) and (not WORDS[key] or word in WORDS[key]) for word in words):
            raise UserError(f"{where}: {key} is {value!r}", f"it is a list of {', '.join(WORDS[key]) or 'strings'}")
        return tuple(str(word) for word in words)
    if key in FLAGS:
        if not isinstance(value, bool):
            raise UserError(f"{where}: {key} takes true or false, not {value!r}")
        return value
    whole = key in WHOLE
    if isinstance(value, bool) or not isinstance(value, int if whole else (int, float)):
        raise UserError(f"{where}: {key} takes a {'whole ' * whole}number, not {value!r}")
    least = 0 if key in NONE else 1 if whole else 1e-9
    if not least <= value < 1e9:
        raise UserError(f"{where}: {key} is {value}; it is {'0 or more' if least == 0 else 'more than 0'}, and finite")
    return value if whole else float(value)


def _one_of(allowed: tuple[str, ...]) -> str:
    return f"it is one of {', '.join(allowed)}" if allowed else ""


def _spelled(name: object, gpus: Mapping[str, Gpu]) -> str:
    """A GPU's name here, where the text is one of its aliases."""
    low = str(name).strip().lower()
    return next((gpu.name for gpu in gpus.values() if low in gpu.aliases), low)


def _pick(table: Mapping[str, Kind], name: str, what: str, where: str = "") -> Kind:
    if name not in table:
        hint = did_you_mean(name, list(table)) or f"known: {', '.join(table)}"
        raise UserError(f"{where}no {what} is called {name!r}", hint)
    return table[name]
