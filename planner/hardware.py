"""`Gpu`, `Node`, `Fabric`: what the hardware can do on paper. The numbers and their sources: `data/hardware.toml`.

What it does in practice (efficiency, measured collectives) is calibration, and lies elsewhere. A user adds hardware in
a TOML file of the same form; `load` reads it over the built-in tables.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from superpod.errors import UserError, did_you_mean
from superpod.planner.files import read_toml

DATA = Path(__file__).parent / "data" / "hardware.toml"

GIB = 2**30

FP8_KINDS = {
    "ampere": (),
    "ada": ("fp8ds", "fp8cs"),
    "hopper": ("fp8ds", "fp8cs", "fp8bw"),
    "blackwell": ("fp8ds", "fp8cs", "fp8bw", "mxfp8", "nvfp4"),
}
"""Scaled formats by GPU generation: fp8ds delayed, fp8cs current, fp8bw blockwise scaling. Ampere has no FP8 units;
blockwise needs Hopper, MXFP8 and NVFP4 need Blackwell (Transformer Engine 2.x, `transformer_engine/pytorch/fp8.py`)."""

PLAIN = ("fp32", "tf32", "bf16", "fp16")
"""Precisions that scale nothing."""
PRECISIONS = (*PLAIN, "fp8ds", "fp8cs", "fp8bw", "mxfp8", "nvfp4")

GPU_ALIASES = {
    "a100-80gb": "a100",
    "a100-sxm4-80gb": "a100",
    "a100-40gb": "a100_40gb",
    "a100-sxm4-40gb": "a100_40gb",
    "h100-80gb": "h100",
    "h100-sxm5-80gb": "h100",
    "h200-141gb": "h200",
    "b200-180gb": "b200",
    "b300-270gb": "b300",
    "b300-288gb": "b300",
    "gb200-nvl72": "gb200",
    "gb300-nvl72": "gb300",
}
"""Published spellings of GPUs, in lower case, and the name here. The only such table; the next is for precisions."""

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
"""Published spellings of precisions, in lower case. `fp8` stays: which kind it is, the caller knows by the release."""


@dataclass(frozen=True)
class Gpu:
    """One GPU. Peaks are dense, in TFLOP/s; 0 = the chip has no units for it. Bandwidths are one way."""

    name: str
    generation: str
    """ampere, ada, hopper or blackwell: decides which FP8 kinds there are."""
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
    source: str = field(default="the user's file", compare=False)

    @property
    def hbm_usable_bytes(self) -> float:
        """Memory that PyTorch sees, bytes."""
        return self.hbm_usable_gib * GIB

    @property
    def precisions(self) -> tuple[str, ...]:
        """What it can train in, of `PRECISIONS`."""
        plain = tuple(p for p in PLAIN if getattr(self, f"{p}_tflops"))
        kinds = FP8_KINDS[self.generation]
        return plain + tuple(k for k in kinds if (self.nvfp4_tflops if k == "nvfp4" else self.fp8_tflops))

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

    def gpu(self, name: str) -> Gpu:
        """The GPU of that name, or of a published spelling of it.

        Raises:
            UserError: naming the closest ones when there is none.
        """
        return _pick(self.gpus, _spelled(name), "GPU")

    def node(self, name: str) -> Node:
        """The node of that name; a GPU's name (`h100`) is its DGX. Raises as `gpu`."""
        return _pick(self.nodes, _spelled(name), "node")

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
    """The name here of a precision as published: one of `PRECISIONS`, or `fp8` where the kind is not said.

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
    """The user's hardware over the built-in: tables `[gpu.NAME]`, `[node.NAME]`, `[fabric.NAME]`.

    `[[collective]]` and `[[gemm]]` (measurements) may stand in the same file and are left to their own reader. `like =
    "h100"` in a table takes what the table does not say from a built-in one.

    Raises:
        UserError: naming file, table and key, and what the key may hold.
    """
    return _hardware(read_toml(Path(path)), str(path), builtin())


SECTIONS = ("gpu", "node", "fabric", "collective", "gemm")
TEXT = {
    "generation": tuple(FP8_KINDS),
    "kind": ("infiniband", "ethernet"),
    "source": (),
    "gpu": (),
    "calibrated_as": (),
}
"""Keys that hold words, and which ones; () = any."""
NONE = ("nvlink_gb_per_s", "tf32_tflops", "fp8_tflops", "nvfp4_tflops", "rails", "scalable_unit", "host_gb", "nics")
"""Keys that may be 0: the hardware has none."""
Kind = TypeVar("Kind", Gpu, Node, Fabric)


def _hardware(tables: dict[str, Any], where: str, base: Hardware) -> Hardware:
    for section in tables:
        if section not in SECTIONS:
            raise UserError(
                f"{where}: no section is called {section!r}",
                did_you_mean(section, list(SECTIONS)) or f"sections: {', '.join(SECTIONS)}",
            )
    gpus = {**base.gpus, **_section(Gpu, tables, "gpu", where, base.gpus, {})}
    nodes = {**base.nodes, **_section(Node, tables, "node", where, base.nodes, gpus)}
    for name in (n.lower() for n in tables.get("gpu", {})):  # a GPU like another has a node like that one's
        like = base.nodes.get(gpus[name].calibrated_as)
        if name not in nodes and like is not None:
            nodes[name] = like.replace(name=name, gpu=gpus[name])
    return Hardware(gpus, nodes, {**base.fabrics, **_section(Fabric, tables, "fabric", where, base.fabrics, {})})


def _section(
    kind: type[Kind], tables: dict[str, Any], section: str, where: str, base: Mapping[str, Kind], gpus: dict[str, Gpu]
) -> dict[str, Kind]:
    found = tables.get(section, {})
    if not isinstance(found, dict) or not all(isinstance(table, dict) for table in found.values()):
        raise UserError(f"{where}: {section} holds tables", f"write [{section}.my_name] above its keys")
    return {n.lower(): _build(kind, n.lower(), t, f"{where} [{section}.{n}]", base, gpus) for n, t in found.items()}


def _build(
    kind: type[Kind], name: str, table: dict[str, Any], where: str, base: Mapping[str, Kind], gpus: dict[str, Gpu]
) -> Kind:
    table = dict(table)
    values: dict[str, Any] = {"name": name}
    known = [each.name for each in fields(kind) if each.name != "name"]
    if (like := table.pop("like", None)) is not None:
        model = _pick(base, _spelled(like), kind.__name__.lower(), f"{where}: like: ")
        values = {key: getattr(model, key) for key in known if key != "source"} | values
        if isinstance(model, Gpu):
            values["calibrated_as"] = model.calibrated_as or model.name
    for key, value in table.items():
        if key not in known:
            hint = did_you_mean(key, known) or f"keys: {', '.join(known)}"
            raise UserError(f"{where}: no key is called {key!r}", hint)
        values[key] = _checked(key, value, where)
    for each in fields(kind):
        if each.name not in values and each.name in _required(kind):
            raise UserError(f"{where}: {each.name} is missing", 'give it, or take it over: like = "h100"')
    if isinstance(values.get("gpu"), str):
        values["gpu"] = _pick(gpus, _spelled(values["gpu"]), "GPU", f"{where}: gpu: ")
    return kind(**values)


def _required(kind: type[Any]) -> list[str]:
    optional = (
        "calibrated_as",
        "tf32_tflops",
        "fp8_tflops",
        "nvfp4_tflops",
        "oversubscription",
        "rails",
        "scalable_unit",
        "source",
    )
    return [each.name for each in fields(kind) if each.name not in optional]


def _checked(key: str, value: Any, where: str) -> Any:
    if key in TEXT:
        allowed = TEXT[key]
        if not isinstance(value, str) or (allowed and value not in allowed):
            hint = f"it is one of {', '.join(allowed)}" if allowed else "it is a string"
            raise UserError(f"{where}: {key} is {value!r}", hint)
        return value
    whole = key in ("gpus", "nvlink_domain", "nics", "sms", "rails", "scalable_unit")
    if isinstance(value, bool) or not isinstance(value, int if whole else (int, float)):
        raise UserError(f"{where}: {key} takes a {'whole ' * whole}number, not {value!r}")
    least = 0 if key in NONE else 1 if whole else 1e-9
    if not least <= value < 1e9:
        raise UserError(f"{where}: {key} is {value}; it is {'0 or more' if least == 0 else 'more than 0'}, and finite")
    return value if whole else float(value)


def _spelled(name: object) -> str:
    """A GPU's name here, of a published spelling."""
    low = str(name).strip().lower()
    return GPU_ALIASES.get(low, low)


def _pick(table: Mapping[str, Kind], name: str, what: str, where: str = "") -> Kind:
    if name not in table:
        hint = did_you_mean(name, list(table)) or f"known: {', '.join(table)}"
        raise UserError(f"{where}no {what} is called {name!r}", hint)
    return table[name]
