"""`Gpu`, `Node`, `Fabric` and `Hardware`: nominal properties of the hardware."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from superpod.errors import UserError, did_you_mean
from superpod.planner.hardware.precisions import PLAIN

GIB = 2**30


@dataclass(frozen=True)
class Gpu:
    """One GPU. Peaks are dense, in TFLOP/s; 0 = not supported. Bandwidths are unidirectional."""

    name: str
    generation: str
    """Name of a `[generation]` table in `data/hardware.toml`, which contains the fields from `scaled_formats` on."""
    bf16_tflops: float
    fp16_tflops: float
    fp32_tflops: float
    hbm_gb: float
    """Memory size according to the data sheet, 10^9 bytes."""
    hbm_usable_gib: float
    """Memory that PyTorch reports, 2^30 bytes, without any CUDA context."""
    hbm_tb_per_s: float
    nvlink_gb_per_s: float
    """Bandwidth to other GPUs in the NVLink domain; 0 = no NVLink."""
    pcie_gb_per_s: float
    """Bandwidth to the host: PCIe or NVLink-C2C."""
    sms: int
    power_w: float
    """Thermal design power."""
    tf32_tflops: float = 0.0
    fp8_tflops: float = 0.0
    nvfp4_tflops: float = 0.0
    calibrated_as: str = ""
    """The GPU whose calibration applies (set by `like`) and corrections, see `corrections.encode`; "" = this GPU."""
    fitted_as: str = ""
    """The generation whose fitted constants apply because no run of this one is fitted; "" = its own generation."""
    sm: int = 0
    """CUDA compute capability times ten: 90 for Hopper (9.0). 0 = unknown; kernel rules are not checked."""
    scaled_formats: tuple[str, ...] = ()
    """Precisions in `SCALED` that the Tensor Cores and Transformer Engine support."""
    fp8_any_order: bool = False
    """Whether FP8 GEMMs support every memory layout; otherwise the backward pass needs transposed copies of weights."""
    fuses_mxfp8_experts: bool = False
    """Whether gated MXFP8 experts run as a single kernel."""
    keeps_queue_order: bool = False
    """Whether kernels start in launch order with more than one hardware queue (CUDA_DEVICE_MAX_CONNECTIONS)."""
    multicast: bool = False
    """Whether NVLink supports multicast, which Transformer Engine's userbuffers require."""
    deepep: bool = False
    """Whether NVIDIA's images include DeepEP kernels for this GPU, and published runs use them."""
    cuda: str = ""
    """The first CUDA release that supports this GPU; "" = any that NeMo 2.7 supports."""
    cublas_workspace_mib: int = 8
    """cuBLAS workspace that PyTorch allocates per thread."""
    te_workspace_mib: int = 32
    """cuBLAS workspace that Transformer Engine allocates per stream."""
    aliases: tuple[str, ...] = ()
    """Other names, in lower case."""
    source: str = field(default="the user's file", compare=False)

    @property
    def hbm_usable_bytes(self) -> float:
        """Memory that PyTorch reports, in bytes."""
        return self.hbm_usable_gib * GIB

    @property
    def precisions(self) -> tuple[str, ...]:
        """The supported precisions, a subset of `PRECISIONS`."""
        plain_precisions = tuple(p for p in PLAIN if getattr(self, f"{p}_tflops"))
        peaks = {name: self.nvfp4_tflops if name == "nvfp4" else self.fp8_tflops for name in self.scaled_formats}
        return plain_precisions + tuple(name for name, peak in peaks.items() if peak)

    def tflops(self, precision: str) -> float:
        """Return the peak dense TFLOP/s of a precision in `PRECISIONS`, or of `fp8`.

        Raises:
            UserError: the GPU does not support the precision.
        """
        if precision == "fp8" and self.fp8_tflops:
            return self.fp8_tflops
        if precision not in self.precisions:
            raise UserError(
                f"{self.name} ({self.generation}) does not support {precision}",
                f"supported: {', '.join(self.precisions)}",
            )
        if precision in (*PLAIN, "nvfp4"):
            return getattr(self, f"{precision}_tflops")
        return self.fp8_tflops

    def replace(self, **changes: Any) -> Gpu:
        """Return a copy with some fields changed."""
        return replace(self, **changes)


@dataclass(frozen=True)
class Node:
    """A server with its GPUs and network ports. For NVL72, a compute tray; the NVLink domain is the rack."""

    name: str
    gpu: Gpu
    gpus: int
    nvlink_domain: int
    """GPUs connected by NVLink; 1 = no NVLink."""
    nics: int
    """Network ports of the compute fabric."""
    nic_gbps: float
    """Unidirectional speed of a port, 10^9 bits/s."""
    host_gb: float
    """Host memory, 10^9 bytes."""
    power_w: float
    """Maximum power of the system."""
    nvlink_c2c: bool = False
    """Whether GPUs are connected to a Grace CPU by NVLink-C2C, through which network ports access GPU memory."""
    source: str = field(default="the user's file", compare=False)

    @property
    def power_w_per_gpu(self) -> float:
        """Power of the system divided by the number of GPUs."""
        return self.power_w / self.gpus

    def replace(self, **changes: Any) -> Node:
        """Return a copy with some fields changed."""
        return replace(self, **changes)


@dataclass(frozen=True)
class Fabric:
    """The network between nodes."""

    name: str
    kind: str
    """infiniband or ethernet"""
    gbps: float
    """Unidirectional speed of a switch port, 10^9 bits/s."""
    latency_us: float
    """Latency of a small message."""
    oversubscription: float = 1.0
    """Downlinks per uplink of a leaf switch: 2 = half the bandwidth between leaf switches."""
    rails: int = 0
    """Connected ports per node; 0 = all."""
    scalable_unit: int = 0
    """Nodes per scalable unit; 0 = unknown."""
    source: str = field(default="the user's file", compare=False)

    def gb_per_s_per_gpu(self, node: Node) -> float:
        """Return the unidirectional bandwidth between nodes per GPU, in GB/s, if all GPUs of a node send."""
        ports = min(node.nics, self.rails or node.nics)
        return ports * min(node.nic_gbps, self.gbps) / 8 / node.gpus / self.oversubscription

    def replace(self, **changes: Any) -> Fabric:
        """Return a copy with some fields changed."""
        return replace(self, **changes)


@dataclass(frozen=True)
class Hardware:
    """Hardware tables by name: the built-in ones and those of a user's files."""

    gpus: Mapping[str, Gpu]
    nodes: Mapping[str, Node]
    fabrics: Mapping[str, Fabric]
    generations: Mapping[str, Mapping[str, object]] = field(default_factory=dict)
    """Generation -> fields of `Gpu` that all its GPUs share."""

    def gpu_name(self, name: object) -> str:
        """Return the name of the GPU with this alias, else the given name; in lower case."""
        lower = str(name).strip().lower()
        for gpu in self.gpus.values():
            if lower in gpu.aliases:
                return gpu.name
        return lower

    def gpu(self, name: str) -> Gpu:
        """Return a GPU by name or alias. Raises UserError if there is no such GPU; the hint names similar ones."""
        return pick(self.gpus, self.gpu_name(name), "GPU")

    def node(self, name: str) -> Node:
        """Return a node by name; a GPU name such as h100 means its DGX system. Raises UserError if there is none."""
        return pick(self.nodes, self.gpu_name(name), "node")

    def fabric(self, name: str) -> Fabric:
        """Return a fabric by name. Raises UserError if there is no such fabric."""
        return pick(self.fabrics, str(name).lower(), "fabric")

    def fabric_of(self, node: Node) -> Fabric:
        """Return the default fabric of a node: without rails, and with the port speed closest to the node's."""
        fully_connected = [fabric for fabric in self.fabrics.values() if not fabric.rails]
        return min(fully_connected, key=lambda fabric: abs(fabric.gbps - node.nic_gbps))


Kind = TypeVar("Kind", Gpu, Node, Fabric)


def pick(table: Mapping[str, Kind], name: str, what: str, where: str = "") -> Kind:
    """Return the entry `name` of a hardware table; error messages are `{where}there is no {what} {name}`.

    Raises:
        UserError: there is no such entry; the hint names similar ones.
    """
    if name not in table:
        hint = did_you_mean(name, list(table)) or f"known: {', '.join(table)}"
        raise UserError(f"{where}there is no {what} {name!r}", hint)
    return table[name]
