"""What is said of a profile: bounds, what to change, the plan beside it, and what names of kernels mean."""

import dataclasses

import pytest

from superpod.planner import predict
from superpod.profiles import profile_bounds, profile_breakdown, profile_classes, profile_plan, profile_torch
from tests.profiles import synthetic_profiles as synthetic
from tests.slurm.jobs import planned

KERNELS = {
    "nvjet_hsh_128x256_64x4_1x2_h_bz_coopA_NTN": ("products", True),
    "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_warpgroupsize1x1x1_execute_segment": (
        "products",
        True,
    ),
    "void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_relu_bf16_256x128_32x3_tn_align8>": ("products", True),
    "ampere_bf16_s16816gemm_bf16_128x256_ldg8_f2f_stages_64x3_nt": ("products", True),
    "sm80_xmma_gemm_f32f32_f32f32_f32_tn_n_tilesize32x32x8_stage3_warpsize1x2x1_ffma_aligna4_alignc4_execute": (
        "products",
        False,
    ),
    "ampere_sgemm_128x64_tn": ("products", False),
    "void gemv2T_kernel_val<int, int, float, float, float, float>": ("products", False),
    "void cublasLt::splitKreduce_kernel<32, 16, int, float>": ("products", False),
    "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_6_128x128x128_4x1x1_kernel0_0": (
        "attention",
        True,
    ),
    "void flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel<Flash_bwd_kernel_traits<128>>": ("attention", True),
    "scaled_upper_triang_masked_softmax_warp_forward": ("attention", False),
    "void transformer_engine::normalization::ln_fwd_tuned_kernel<>": ("norms", False),
    "void (anonymous namespace)::rmsnorm_bwd_finalize_tuned_kernel<>": ("norms", False),
    "void multi_tensor_apply_kernel<TensorListMetadata<4>, transformer_engine::multi_tensor_adam::AdamFunctor>": (
        "optimizer",
        False,
    ),
    "void multi_tensor_apply_kernel<L2NormFunctor<float>>": ("optimizer", False),
    "ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)": ("communication", False),
    "void deep_ep::internode::dispatch<false, 8>": ("communication", False),
    "kuserbuffers_pushrecv": ("communication", False),
    "void at::native::elementwise_kernel<128, 4, gpu_kernel_impl<CUDAFunctor_add<float>>>": ("elementwise", False),
    "void transformer_engine::scaled_aligned_causal_masked_softmax_warp_backward": ("attention", False),
    "triton_poi_fused_add_mul_silu_0": ("elementwise", False),
}


@pytest.mark.parametrize("name", KERNELS)
def test_a_kernel_s_class_follows_from_its_name(name):
    kind, tensor = KERNELS[name]
    assert profile_classes.classify_kernel(name) == kind
    assert (kind in ("products", "attention") and profile_classes.uses_tensor_cores(name)) == tensor


@pytest.mark.parametrize(
    ("name", "group", "known"),
    [
        ("ncclDevKernel_AllGather", "TENSOR_MODEL_PARALLEL_GROUP", "tp"),
        ("ncclDevKernel_AllReduce", "DATA_PARALLEL_GROUP_WITH_CP", "dp"),
        ("ncclDevKernel_ReduceScatter", "INTRA_DISTRIBUTED_OPTIMIZER_INSTANCE_GROUP", "dp"),
        ("ncclDevKernel_SendRecv", "CONTEXT_PARALLEL_GROUP", "cp"),
        ("ncclDevKernel_SendRecv", "EXPERT_MODEL_PARALLEL_GROUP", "ep"),
        ("ncclDevKernel_SendRecv", "PIPELINE_MODEL_PARALLEL_GROUP", "pp"),
        ("ncclDevKernel_AllReduce", "default_pg", ""),
        ("ncclDevKernel_AllReduce", "", ""),
        ("void deep_ep::intranode::combine", "", "ep"),
        ("kuserbuffers_pushsend", "", "tp"),
    ],
)
def test_a_collective_serves_what_its_group_says(name, group, known):
    assert profile_classes.classify_group(name, group) == known


OPERATIONS = {
    "aten::addmm": "products",
    "aten::mm": "products",
    "aten::_scaled_dot_product_flash_attention_for_cpu": "attention",
    "aten::_fused_rms_norm": "norms",
    "aten::native_layer_norm": "norms",
    "aten::copy_": "copies",
    "aten::mul": "elementwise",
    "c10d::_allgather_base_": "communication",
    "gloo:all_reduce": "communication",
    "MulBackward0": "",
    "autograd::engine::evaluate_function: MmBackward0": "",
    "torch::autograd::AccumulateGrad": "",
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_an_operation_s_class_follows_from_its_name(name):
    assert profile_classes.classify_operation(name) == OPERATIONS[name]


@pytest.fixture(scope="module")
def recording(tmp_path_factory):
    folder = tmp_path_factory.mktemp("profiles")
    synthetic.write(folder)
    return profile_torch.read(folder / "synthetic.json")


@pytest.fixture
def sums(recording):
    return profile_breakdown.break_down(recording)


def test_bounds_say_what_is_usual_and_what_was_not_measured(recording, sums):
    bounds = {bound.name: bound for bound in profile_bounds.bounds(recording, sums)}
    assert (bounds["GPU busy"].value, bounds["GPU busy"].fine) == (pytest.approx(0.8), False)
    assert (bounds["launch gaps"].value, bounds["launch gaps"].fine) == (pytest.approx(152 / 3000), False)
    assert (bounds["HBM bandwidth"].value, bounds["HBM bandwidth"].fine) == (None, None)
    assert all(bound.words for bound in bounds.values())
    rich = dataclasses.replace(recording, counters={"DRAM Read Bandwidth [Throughput %]": 85.0})
    assert {b.name: b.fine for b in profile_bounds.bounds(rich, sums)}["HBM bandwidth"] is False


def test_what_lies_furthest_beyond_its_bound_is_changed_first(recording, sums):
    changes = profile_bounds.changes(recording, sums)
    assert [change.what for change in changes] == [
        "keep the GPU fed",
        "move GEMMs to Tensor Cores",
        "launch faster",
    ]
    assert [round(change.seconds * 1e6, 1) for change in changes] == [
        pytest.approx(448 / 3 - 30, abs=0.1),
        pytest.approx(80 - 0.05 * 480, abs=0.1),
        pytest.approx(152 / 3 - 30, abs=0.1),
    ]
    assert "ampere_sgemm" in changes[1].why


def test_a_plan_says_how_much_communication_is_usual(recording, sums):
    of_plan = profile_bounds.changes(recording, sums, {"tp": 1e-6, "pp_bubble": 1e-6}, max_changes=9)
    (sent,) = [change for change in of_plan if change.what == "hide tensor-parallel communication"]
    assert "planned 0.00 ms" in sent.why
    assert sent.seconds * 1e6 == pytest.approx(10)  # 60 less the half of 100 that is usual for all communication
    generous = profile_bounds.changes(recording, sums, {"tp": 1.0}, max_changes=9)
    assert [c.seconds for c in generous if c.what == "hide tensor-parallel communication"] == [0.0]


def test_nothing_is_said_of_gpus_by_a_profile_of_cpus(recording, sums):
    on_cpus = dataclasses.replace(recording, on_gpu=False)
    assert profile_bounds.bounds(on_cpus, sums) == profile_bounds.changes(on_cpus, sums) == []


@pytest.mark.parametrize("layout", [{}, {"pp": 2}, {"tp": 2, "sp": True}, {"cp": 2}, {"tp": 2, "pp": 4, "cp": 2}])
@pytest.mark.parametrize("named", [True, False])
def test_both_columns_of_the_comparison_add_up_to_their_steps(sums, layout, named):
    """However the plan communicates, and whether or not groups are named."""
    terms = predict.one(planned("h100", gbs=64, **layout)).terms_s
    unnamed = dataclasses.replace(sums, exposed={"": sum(sums.exposed.values())})
    rows = profile_plan.rows(terms, sums if named else unnamed)
    assert sum(row.planned_s for row in rows) == pytest.approx(sum(terms.values()), rel=1e-9)
    assert sum(row.measured_s for row in rows) == pytest.approx(sums.seconds / 3, rel=1e-9)
    assert len({row.name for row in rows}) == len(rows)
