"""Each patch is needed: a case of real NeMo is right with all patches, and without that one fails in a known way."""

import math
import re
from typing import Any

import pytest

from superpod.rehearsal.patches.registry import install, patches
from tests.rehearsal.case_client import CaseRequest, with_outcomes

pytestmark = pytest.mark.nemo

HANGS, WRONG = "it hangs", "its result is wrong"
NO_DRIVER = "NVIDIA driver|CUDA driver|Cannot re-initialize CUDA in forked subprocess"
"""What the CUDA build of torch says where there is no GPU; the CPU build has a message for each call."""

# Patch: (a case, how it fails without the patch: the error, HANGS or WRONG).
NEEDED_BY = {
    "cuda-streams": ("resume", f"torch.cuda.Stream requires CUDA support|{NO_DRIVER}"),
    "cuda-device": ("resume", f"Torch not compiled with CUDA enabled|{NO_DRIVER}"),
    "cuda-tensors": ("resume", f"PyTorch is not linked with support for cuda devices|{NO_DRIVER}"),
    "cuda-literals": ("resume", f"PyTorch is not linked with support for cuda devices|{NO_DRIVER}"),
    "cuda-rng": ("resume", f"no attribute '_cuda_getDevice'|{NO_DRIVER}"),
    "rng-tracker": ("resume", "tuple indices must be integers or slices, not torch.device"),
    "recompute-fp8": ("moe-recompute", "name 'FP8GlobalStateManager' is not defined"),
    "torch-norm": ("tp2", "sequence parallel not supported by torch LayerNorm"),
    "attention": ("cp2", "Context parallelism is only supported by TEDotProductAttention"),
    "fused-adam": ("dp2", "AssertionError"),
    "optimizer-no-grad": ("dp2", "a view of a leaf Variable that requires grad"),
    "offloaded-parameters": ("offload-bf16", r"KeyError: tensor\("),
    "te-adam": ("precise-bf16", "'>=' not supported between instances of 'NoneType' and 'Version'"),
    "fsdp-mesh": ("fsdp-dp2", "Invalid device string: 'cuda:cpu'"),
    "fsdp-collectives": ("fsdp-dp2", "Cannot use ReduceOp.PREMUL_SUM with Gloo"),
    "te-layers": ("resume", WRONG),
    "te-classes": ("dry-gemma2", "Mock object has no attribute 'module'"),
    "moe-router-gemm": ("moe-ep2", "name 'te_general_gemm' is not defined"),
    "moe-splits": ("moe-ep2", r"all_to_all_single\(\): incompatible function arguments"),
    "moe-uneven-gather": ("moe-tp2ep2", "ProcessGroupGloo::allgather: invalid tensor size"),
    "expert-bias": ("biased-experts", "is a view and is being modified inplace"),
    "gpu-settings": ("resume", "apply_rope_fusion is not available"),
    "pipeline-outputs": ("pp2vp2", WRONG),
    "gpu-settings-late": ("pp2vp2", "object of type 'NoneType' has no len"),
    "gloo-timers": ("tp2-save", HANGS),
    "checkpoint-device": ("resume", "argument 'index' must be int, not torch.device"),
    "model-parallel-seed": ("resume", "KeyError: 'model-parallel-rng'"),
    "adapters": ("lora", "transformer_engine.pytorch could not be imported"),
    "adapters-of-experts": ("moe-lora-ep2", WRONG),
    "attention-mask": ("resume", "The dataloader did not provide an attention mask"),
}
CASES = sorted({case for case, _ in NEEDED_BY.values()} | {"recompute", "tp2-bf16"})
LAYER_NORM = "decoder.layers.0.self_attention.linear_qkv.layer_norm_weight"  # as Transformer Engine has it


def fault(case: str, value: Any, outcomes: Any) -> str:
    """What is wrong with the result of a case; empty when it is right."""
    if case.startswith("dry"):
        return "" if value["counts"] == [[2_614_341_888]] else f"not Gemma 2 2B: {value}"
    if case == "lora":  # adapters begin as nothing: the first loss is the model's own
        first, then = value["losses"]
        own = outcomes(CaseRequest("finetune"))["value"]["losses"][0]
        return "" if first == pytest.approx(own, abs=1e-5) and then != first else f"{first}, {then}, not {own}"
    if case == "biased-experts":  # it has learnt nothing yet
        return "" if value["losses"][0] == pytest.approx(math.log(64), abs=0.5) else f"{value['losses']}"
    if "moe-lora" in case:
        expected = outcomes(CaseRequest("moe-lora"))["value"]["losses"]
    elif case.startswith("moe"):  # the two ways of spreading experts agree
        expected = outcomes(CaseRequest("moe-ep2"))["value"]["losses"]
    else:
        reference = outcomes(CaseRequest("reference"))["value"]
        whole = case in ("fsdp-dp2", "offload-bf16", "precise-bf16")  # these begin with it
        expected = reference["losses"][0 if whole else 2 :]
        if case in ("resume", "recompute") and value["digest"] != reference["digest"]:
            return "the parameters are not those of the uninterrupted run, bit for bit"
        if not any(name.endswith(LAYER_NORM) for name in value["names"]) and "pp2" not in case:
            return f"no {LAYER_NORM} in {value['names']}"
    tolerance = (
        1e-2 if case in ("offload-bf16", "precise-bf16") else 1e-3 if "bf16" in case else 1e-5
    )  # rounding of two steps more
    return "" if value["losses"] == pytest.approx(expected, abs=tolerance) else f"{value['losses']}, not {expected}"


def test_every_patch_is_needed_by_a_case():
    assert set(NEEDED_BY) == {patch.name for patch in patches()}


@with_outcomes(*map(CaseRequest, CASES))
def test_right_with_all_patches(outcome, outcomes):
    assert outcome["outcome"] == "passed", (outcome["error"], outcome["log"])
    assert fault(outcome["case"], outcome["value"], outcomes) == ""


@pytest.mark.slow
@with_outcomes(*(CaseRequest(case, (name,)) for name, (case, _) in NEEDED_BY.items()))
def test_fails_without_the_patch(outcome, outcomes):
    [name] = outcome["without"]
    case, how = NEEDED_BY[name]
    if how == WRONG:
        nan = "found NaN" in outcome["error"]
        assert nan or (outcome["outcome"] == "passed" and fault(case, outcome["value"], outcomes))
    elif how == HANGS:
        assert outcome["outcome"] == "hung"
    else:
        assert outcome["outcome"] == "failed", outcome
        assert re.search(how, outcome["error"])


@with_outcomes(CaseRequest("resume", order="patches-first"))
def test_order_of_imports_does_not_matter(outcome, outcomes):
    assert outcome["outcome"] == "passed", (outcome["error"], outcome["log"])
    assert fault("resume", outcome["value"], outcomes) == ""


@with_outcomes(CaseRequest("finetune"))
def test_finetuning_starts_from_the_weights(outcome, outcomes):
    assert outcome["outcome"] == "passed", (outcome["error"], outcome["log"])
    fresh = outcomes(CaseRequest("reference"))["value"]["losses"]
    assert outcome["value"]["losses"][0] < fresh[0] - 0.05  # the same batch, after two steps of training


@with_outcomes(CaseRequest("settings"))
def test_gpu_settings_are_dropped_and_listed(outcome):
    assert outcome["outcome"] == "passed", (outcome["error"], outcome["log"])
    assert outcome["value"] == {"unknown": [], "kept": [], "unlisted": [], "recompute": ["core_attn"]}


@with_outcomes(CaseRequest("attention-values"))
def test_attention_agrees_with_megatrons(outcome):
    assert outcome["outcome"] == "passed", (outcome["error"], outcome["log"])
    assert set(outcome["value"]) >= {"causal", "window", "packed", "sinks", "dropout from the same state"}
    assert max(outcome["value"].values()) < 1e-5


@with_outcomes(CaseRequest("refuses-gpu"))
def test_nothing_is_patched_where_there_is_a_gpu(outcome):
    assert outcome["outcome"] == "passed", outcome["error"]
    assert outcome["value"]["changed"] == ["is_available"]  # that is the test's own
    assert outcome["value"]["error"] == "RehearsalError: a rehearsal runs without a GPU, but torch detects one"


def test_install_knows_its_patches():
    with pytest.raises(ValueError, match="gloo-timer;"):
        install(without=frozenset({"gloo-timer"}))
