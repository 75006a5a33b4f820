"""Lists the settings that a rehearsal switches off or changes because there is no GPU, and the tests that cover them.

`test_switched_off.py` fails if a switched-off setting is missing here, or if the test that a row names does not exist.
"""

from __future__ import annotations

from dataclasses import dataclass

BUILD_TEST = "tests/rehearsal/te/test_build.py::test_parameters_with_te_layers_are_the_planners"
"""Builds with Transformer Engine's layers keep every setting of the model, and run each layer with shapes only."""
ORDER_TESTS = "tests/rehearsal/test_order_of_calls.py::"
ORDER_TESTS += "test_three_steps_with_the_flags_of_a_gpu_run_train_the_weights_of_one_rank"
CUDA_GRAPHS_TEST = "tests/slurm/script/test_cluster_variables.py::test_no_expandable_segments_with_cuda_graphs"
DEEPEP_TEST = "tests/nemo2/build/test_fusions.py::test_uses_deepep"
FP8_SHAPES_TEST = (
    "tests/planner/kernels/test_fp8_shapes.py::test_a_shape_of_transformer_engines_tests_fits_where_it_runs"
)
USERBUFFERS_TEST = "tests/rehearsal/te/test_build.py::test_userbuffers_without_multicast_need_their_variable"

NUMERICS = "numerical results"
SPEED = "speed"
START = "whether it starts; numerical results"


@dataclass(frozen=True)
class Row:
    """Settings that are switched off for the same reason."""

    settings: tuple[str, ...]
    """Fields of TransformerConfig, dotted paths in the recipe, or classes of callbacks."""
    tests: tuple[str, ...]
    """Tests that cover the settings; empty if there are none."""
    unseen: str
    """What only a run on a GPU can test."""


ROWS = (
    Row(
        ("apply_rope_fusion", "fused_single_qkv_rope", "masked_softmax_fusion", "persist_layer_norm"),
        (BUILD_TEST,),
        NUMERICS,
    ),
    Row(
        ("gradient_accumulation_fusion", "cross_entropy_loss_fusion", "defer_embedding_wgrad_compute"),
        (BUILD_TEST,),
        NUMERICS,
    ),
    Row(("bias_activation_fusion", "bias_dropout_fusion", "use_te_activation_func"), (BUILD_TEST,), NUMERICS),
    Row(("moe_permute_fusion", "moe_router_fusion", "moe_grouped_gemm"), (BUILD_TEST,), NUMERICS),
    Row(("moe_enable_deepep", "moe_token_dispatcher_type", "DeepEPCallback"), (DEEPEP_TEST,), START),
    Row(("tp_comm_overlap",), (USERBUFFERS_TEST, BUILD_TEST), NUMERICS),
    Row(("fp8", "fp4", "moe_router_padding_for_fp8", "trainer.plugins.fp8"), (BUILD_TEST, FP8_SHAPES_TEST), NUMERICS),
    Row(
        ("fp8_param", "fp4_param", "trainer.plugins.fp8_params", "trainer.plugins.fp8_param_gather"),
        (BUILD_TEST, ORDER_TESTS),
        "tensors of delayed and current scaling in Megatron's buffers; rounding",
    ),
    Row(
        ("enable_cuda_graph", "external_cuda_graph", "cuda_graph_impl", "use_te_rng_tracker"),
        (CUDA_GRAPHS_TEST,),
        START,
    ),
    Row(("use_transformer_engine_full_layer_spec", "delay_wgrad_compute"), (), "everything; no recipe sets it"),
    Row(("cpu_offloading",), (), "everything: with=offload_activations is built, not rehearsed"),
    Row(("recompute_modules",), (BUILD_TEST,), "recomputed activations of experts"),
    Row(("deallocate_pipeline_outputs",), (), "whether freed outputs of a stage are read again"),
    Row(("hidden_dropout", "attention_dropout"), (BUILD_TEST,), "equal masks on all ranks that share a tensor"),
    Row(("use_cpu_initialization", "perform_initialization"), (), "weights initialized on a GPU"),
    Row(
        ("trainer.accelerator", "trainer.num_nodes", "trainer.strategy.process_group_backend"),
        (),
        "NCCL, communication between nodes",
    ),
    Row(("trainer.strategy.nccl_communicator_config_path", "trainer.strategy.use_sharp"), (), "everything"),
    Row(("trainer.strategy.ddp.nccl_ub",), (), "everything; no recipe sets it"),
    Row(("trainer.strategy.ckpt_async_save",), (), "copies from GPU memory in a separate process"),
    Row(("data.pin_memory", "data.num_workers", "data.persistent_workers"), (), SPEED),
    Row(("NsysCallback", "MemoryProfileCallback", "StragglerDetectionCallback"), (), "everything"),
)


def format_table() -> str:
    """Format all rows as a Markdown table for docs/rehearsal.md."""
    lines = ["| switched off | covered by | tested on a GPU only |", "|---|---|---|"]
    for row in ROWS:
        tests = ", ".join(f"`{test.partition('::')[2]}`" for test in row.tests)
        lines.append(f"| {', '.join(f'`{name}`' for name in row.settings)} | {tests or '**nothing**'} | {row.unseen} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(format_table())
