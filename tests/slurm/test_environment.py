"""The variables of the ranks: what each of GPU, network, precision and layout changes, and that each has a reason."""

import pytest

from superpod.planner.layout import Layout
from superpod.slurm import environment, profiles


def of(name: str, precision: str = "bf16", **layout) -> dict[str, str]:
    variables = environment.variables(profiles.load(name), Layout(gbs=8, **layout), precision)
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
    assert of(where, **layout).get("CUDA_DEVICE_MAX_CONNECTIONS") == connections


def test_precision_network_and_grace_have_variables_of_their_own():
    assert of("dgx_b200", "mxfp8")["NVTE_NORM_FWD_USE_CUDNN"] == "1"
    assert "NVTE_NORM_FWD_USE_CUDNN" not in of("dgx_b200", "bf16")
    assert of("dgx_gb200")["NCCL_NET_GDR_C2C"] == "1"
    assert "NCCL_NET_GDR_C2C" not in of("dgx_h100")
    assert of("dgx_h100")["NCCL_IB_HCA"].startswith("mlx5_0,")


def test_a_testbed_gets_nothing_that_needs_a_gpu():
    variables = of("testbed", tp=2)
    assert not [name for name in variables if name.startswith(("CUDA", "NVTE", "NCCL", "TORCH_NCCL"))]
    assert variables["GLOO_SOCKET_IFNAME"] == "eth0"


def test_the_profile_wins():
    text = (profiles.SHIPPED / "dgx_h100.toml").read_text() + '\n[env]\nNCCL_DEBUG = "INFO"\nMINE = "a b"\n'
    variables = environment.variables(profiles.parse(text, "x.toml"), Layout(gbs=8), "bf16")
    values = {v.name: v.value for v in variables}
    assert values["NCCL_DEBUG"] == "INFO"
    assert values["MINE"] == "a b"
    assert len(variables) == len(values)
