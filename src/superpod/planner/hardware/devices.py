"""`Gpu`, `Node`, `Fabric` and `Hardware`: what the hardware can do on paper."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from superpod.errors import UserError, did_you_mean
from superpod.planner.hardware.precisions import PLAIN

GIB = 2**30


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
    sm: int = 0
    """CUDA's compute capability, ten times: 90 is Hopper's 9.0. 0 = not known, and no kernel is looked for."""
    scaled_formats: tuple[str, ...] = ()
    """Of `SCALED`, those that its Tensor Cores and Transformer Engine support."""
    fp8_any_order: bool = False
    """Tensor Cores multiply FP8 in any memory order; without, the backward pass needs a transposed copy of weights."""
    fuses_mxfp8_experts: bool = False
    """One kernel runs gated MXFP8 experts as a whole."""
    keeps_queue_order: bool = False
    """The GPU starts kernels in the order they are queued, with more than one hardware queue."""
    multicast: bool = False
    """NVLink switches send one write to several GPUs, which Transformer Engine's userbuffers ask for."""
    deepep: bool = False
    """NVIDIA's images build DeepEP's kernels for it, and its published runs use them."""
    cuda: str = ""
    """The first CUDA that compiles for it; "" = any that NeMo 2.7 runs with."""
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
        return pick(self.gpus, self.gpu_name(name), "GPU")

    def node(self, name: str) -> Node:
        """The node of that name; a GPU's name (`h100`) is its DGX. Raises as `gpu`."""
        return pick(self.nodes, self.gpu_name(name), "node")

    def fabric(self, name: str) -> Fabric:
        """The fabric of that name. Raises as `gpu`."""
        return pick(self.fabrics, str(name).lower(), "fabric")

    def fabric_of(self, node: Node) -> Fabric:
        """The built-in InfiniBand fabric of the speed of the node's ports: that of its SuperPOD."""
        plain = [fabric for fabric in self.fabrics.values() if not fabric.rails]
        return min(plain, key=lambda fabric: abs(fabric.gbps - node.nic_gbps))


Kind = TypeVar("Kind", Gpu, Node, Fabric)


def pick(table: Mapping[str, Kind], name: str, what: str, where: str = "") -> Kind:
    """The entry of that name; raises UserError, opened by `where`, naming the closest ones when there is none."""
    if name not in table:
        hint = did_you_mean(name, list(table)) or f"known: {', '.join(table)}"
        raise UserError(f"{where}no {what} is called {name!r}", hint)
    return table[name]


def _spelled(name: object, gpus: Mapping[str, Gpu]) -> str:
    """A GPU's name here, where the text is one of its aliases."""
    low = str(name).strip().lower()
    return next((gpu.name for gpu in gpus.values() if low in gpu.aliases), low)
