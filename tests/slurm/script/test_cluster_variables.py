"""The variables of the ranks by GPU, network, precision and layout; each has a reason."""

import pytest

from superpod.errors import UserError
from superpod.slurm.profiles import profiles
from superpod.slurm.script import cluster_variables
from tests.slurm.jobs import planned


def variables_for(name: str, precision: str = "bf16", **layout) -> dict[str, str]:
    cluster = profiles.load(name)
    variables = cluster_variables.variables(cluster, planned(cluster.gpu, precision, **layout))
    assert len({v.name for v in variables}) == len(variables)
    assert all(v.reason for v in variables)
    return {v.name: v.value for v in variables}


@pytest.mark.parametrize(
    ("where", "layout", "connections"),
    [
        ("dgx_h100", {"tp": 2}, "1"),
        ("dgx_a100", {"cp": 2}, "1"),
        ("dgx_b200", {"tp": 2}, "32"),
        ("dgx_gb200", {"cp": 2}, "32"),
        ("dgx_h100", {}, None),
        ("dgx_b200", {"pp": 4}, None),
        ("dgx_h100", {"tp": 2, "sharding": "zero3"}, "8"),
    ],
)
def test_device_connections_follow_generation_and_layout(where, layout, connections):
    assert variables_for(where, **layout).get("CUDA_DEVICE_MAX_CONNECTIONS") == connections


def test_variables_of_precision_network_and_grace():
    assert variables_for("dgx_b200", "mxfp8")["NVTE_NORM_FWD_USE_CUDNN"] == "1"
    assert "NVTE_NORM_FWD_USE_CUDNN" not in variables_for("dgx_b200", "bf16")
    assert variables_for("dgx_gb200")["NCCL_NET_GDR_C2C"] == "1"
    assert "NCCL_NET_GDR_C2C" not in variables_for("dgx_h100")
    assert variables_for("dgx_h100")["NCCL_IB_HCA"].startswith("mlx5_0,")


def test_testbed_has_no_gpu_variables():
    variables = variables_for("testbed", tp=2)
    assert not [name for name in variables if name.startswith(("CUDA", "NVTE", "NCCL", "TORCH_NCCL"))]
    assert variables["GLOO_SOCKET_IFNAME"] == "eth0"


def test_profile_takes_precedence():
    text = (profiles.DEFAULT_PROFILES / "dgx_h100.toml").read_text() + '\n[env]\nNCCL_DEBUG = "INFO"\nMINE = "a b"\n'
    variables = cluster_variables.variables(profiles.parse(text, "x.toml"), planned())
    values = {v.name: v.value for v in variables}
    assert values["NCCL_DEBUG"] == "INFO"
    assert values["MINE"] == "a b"
    assert len(variables) == len(values)


def test_userbuffers_use_ipc_without_multicast():
    """TE 2.9 module/base.py:183 asserts UB_SKIPMC where NVLink has no multicast: A100."""
    assert variables_for("dgx_a100", tp=2, sp=True)["UB_SKIPMC"] == "1"
    assert "UB_SKIPMC" not in variables_for("dgx_h100", tp=2, sp=True)
    assert "UB_SKIPMC" not in variables_for("dgx_a100")
    assert "UB_SKIPMC" not in variables_for("dgx_a100", tp=2, sp=True, options={"overlap_tp": False})


def test_gpu_of_the_cluster_decides():
    """A recipe for H100 on a cluster of A100."""
    variables = cluster_variables.variables(profiles.load("dgx_a100"), planned("h100", tp=2, sp=True))
    assert "UB_SKIPMC" in {v.name for v in variables}


def test_no_expandable_segments_with_cuda_graphs():
    """megatron-core 0.15.3 transformer/cuda_graphs.py:1062 asserts it."""
    assert variables_for("dgx_h100")["PYTORCH_CUDA_ALLOC_CONF"] == "expandable_segments:True"
    assert "PYTORCH_CUDA_ALLOC_CONF" not in variables_for("dgx_h100", options={"cuda_graphs": True})


def test_variables_of_deterministic_runs():
    values = variables_for("dgx_h100", options={"deterministic": True})
    assert values["NVTE_ALLOW_NONDETERMINISTIC_ALGO"] == "0"
    assert values["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    assert values["NCCL_ALGO"] == "^NVLS"
    assert "NCCL_ALGO" not in variables_for("dgx_h100")


@pytest.mark.parametrize(
    ("line", "options"),
    [
        ('PYTORCH_CUDA_ALLOC_CONF = "max_split_size_mb:64,expandable_segments:True"', {"cuda_graphs": True}),
        ('NVTE_ALLOW_NONDETERMINISTIC_ALGO = "1"', {"deterministic": True}),
    ],
)
def test_profile_contradicting_an_option_is_refused(line, options):
    cluster = profiles.parse((profiles.DEFAULT_PROFILES / "dgx_h100.toml").read_text() + f"\n[env]\n{line}\n", "x.toml")
    assert cluster_variables.variables(cluster, planned())
    with pytest.raises(UserError, match=line.partition(" ")[0]):
        cluster_variables.variables(cluster, planned(options=options))
