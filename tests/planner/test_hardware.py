import csv
import re

import pytest

from superpod.errors import UserError
from superpod.planner import hardware
from tests.conftest import ROOT

REFERENCE = ROOT / "benchmarks" / "reference"
NOT_A_GPU = {"", "8-GPU node (GPU type not stated)"}
UNKNOWN = {"h100-96gb-500w", "h100_96gb"}  # no SXM part that NVIDIA sells: benchmarks/reference/hardware.toml has it


def published(column):
    names = set()
    for name in ("step_time.csv", "memory.csv"):
        with (REFERENCE / name).open() as file:
            names |= {row[column] for row in csv.DictReader(file)}
    return names


def test_every_published_gpu_has_a_name_here():
    spellings = published("gpu") - NOT_A_GPU - UNKNOWN
    names = {spelling: hardware.gpu(spelling).name for spelling in spellings}
    assert names["h100-80gb"] == "h100"
    assert names["a100-80gb"] == "a100"
    assert set(names.values()) == {"a100", "h100", "h200", "b200", "b300", "gb200", "gb300"}


def test_every_published_precision_has_a_name_here():
    names = {spelling: hardware.precision(spelling) for spelling in published("precision") - {""}}
    assert names["fp8-mx"] == names["MXFP8"] == "mxfp8"
    assert names["FSDP+CP+compile+Float8"] == names["FP8 current scaling"] == "fp8cs"
    assert names["BF16, dist-opt (ZeRO-1), fp32 grads, CE fusion, no recompute"] == "bf16"
    assert set(names.values()) <= {*hardware.PRECISIONS, "fp8"}


def test_every_number_has_its_source_beside_it():
    lines = hardware.DATA.read_text().splitlines()
    counted = [line for line in lines if re.match(r"(gpus = |\w+ = [\"'])|#|\[|$", line) is None]
    assert len(counted) > 100
    assert not [line for line in counted if not re.search(r"#\s+\S", line)]


@pytest.mark.parametrize(
    ("name", "bf16", "best"),
    [
        ("a100", 312, "bf16"),
        ("h100", 989.4, "fp8bw"),
        ("b200", 2250, "nvfp4"),
        ("gb300", 2500, "nvfp4"),
        ("vr200", 4000, "nvfp4"),
    ],
)
def test_what_a_gpu_trains_in(name, bf16, best):
    gpu = hardware.gpu(name)
    assert gpu.tflops("bf16") == bf16
    assert gpu.precisions[-1] == (best if best != "bf16" else "fp16")
    assert gpu.tflops(gpu.precisions[-1]) == max(gpu.tflops(p) for p in gpu.precisions)


@pytest.mark.parametrize(
    ("name", "precision"), [("a100", "fp8cs"), ("h100", "mxfp8"), ("h200", "nvfp4"), ("l40s", "fp8bw")]
)
def test_a_precision_that_a_generation_lacks_is_refused_with_those_it_has(name, precision):
    with pytest.raises(UserError, match=f"{name} .* {precision}") as refused:
        hardware.gpu(name).tflops(precision)
    assert "bf16" in refused.value.hint


def test_peaks_stand_in_their_natural_proportion():
    for gpu in hardware.builtin().gpus.values():
        assert gpu.fp16_tflops == gpu.bf16_tflops
        assert 1.9 < gpu.bf16_tflops / gpu.tf32_tflops < 2.1
        if gpu.generation == "rubin":  # NVIDIA's own: 4 and 17.5 PFLOP/s
            assert gpu.nvfp4_tflops == 2 * gpu.fp8_tflops == 8.75 * gpu.bf16_tflops
        elif gpu.fp8_tflops:
            assert 1.9 < gpu.fp8_tflops / gpu.bf16_tflops < 2.1
        assert 0.9 < gpu.hbm_usable_gib * hardware.GIB / (gpu.hbm_gb * 1e9) < 1.09


def test_bandwidth_between_nodes():
    builtin = hardware.builtin()
    per_gpu = {name: builtin.fabric_of(node).gb_per_s_per_gpu(node) for name, node in builtin.nodes.items()}
    assert per_gpu["a100"] == 25
    assert per_gpu["h100"] == per_gpu["gb200"] == 50
    assert per_gpu["gb300"] == per_gpu["b300"] == 100
    assert per_gpu["vr200"] == 200
    assert per_gpu["gh200"] == 25
    assert hardware.fabric("ib_hdr_4rail").gb_per_s_per_gpu(hardware.node("a100")) * 8 * 8 == 800
    slow = hardware.fabric("ib_ndr").replace(oversubscription=2.0)
    assert slow.gb_per_s_per_gpu(hardware.node("h100")) == 25


def test_nvlink_joins_a_rack_of_nvl72_and_no_l40s():
    assert hardware.node("gb200").nvlink_domain == 72
    assert hardware.node("gb200").gpus == 4
    assert hardware.node("l40s").gpu.nvlink_gb_per_s == 0


OWN = """
[gpu.h20]
like = "h100"
bf16_tflops = 148
hbm_gb = 96

[node.mine]
like = "h100"
gpu = "h20"
nics = 4

[fabric.office]
kind = "ethernet"
gbps = 100
latency_us = 12
"""


def test_a_users_file_adds_to_the_tables(tmp_path):
    path = tmp_path / "hardware.toml"
    path.write_text(OWN)
    own = hardware.load(path)
    assert own.gpu("h20").bf16_tflops == 148
    assert own.gpu("h20").sms == 132
    assert own.node("mine").gpu is own.gpu("h20")
    assert own.fabric("office").gb_per_s_per_gpu(own.node("mine")) == 4 * 100 / 8 / 8
    assert own.gpu("b200") is hardware.gpu("b200")
    with pytest.raises(UserError):
        hardware.gpu("h20")


@pytest.mark.parametrize(
    ("text", "says", "hint"),
    [
        ("[gpu.x]\nlike='h100'\nbf16_tflop = 3", r"\[gpu.x\]: there is no key 'bf16_tflop'", "bf16_tflops"),
        ("[[gemm]]\ndtype = 'bf16'", "there is no section 'gemm'", "calibration"),
        ("[gpu.x]\nlike='h10'", "like: there is no gpu 'h10'", "h100"),
        ("[gpu.x]\nlike='h100'\nhbm_gb = '80'", "hbm_gb must be a number, not '80'", ""),
        ("[gpu.x]\nlike='h100'\nsms = 1.5", "sms must be an integer", ""),
        ("[gpu.x]\nlike='h100'\nhbm_gb = nan", "hbm_gb must .*nan", ""),
        ("[gpu.x]\nlike='h100'\nhbm_gb = -1", "hbm_gb must .*-1", ""),
        ("[gpu.x]\nlike='h100'\nhbm_gb = true", "hbm_gb must be a number, not True", ""),
        (
            "[gpu.x]\nlike='h100'\ngeneration = 'fermi'",
            "generation must be one of ampere, ada, hopper, blackwell.*'fermi'",
            "",
        ),
        ("[gpu.x]\nhbm_gb = 80", "generation is missing", "like"),
        ("[node.x]\nlike='h100'\ngpu = 'h1000'", "gpu: there is no GPU 'h1000'", "h100"),
        ("[node.x]\nlike='h100'\ngpus = 0", "gpus must .*0", ""),
        ("[fabrik.x]\ngbps = 1", "there is no section 'fabrik'", "fabric"),
        ("gpu = 3", "gpu must contain tables", "[gpu.my_name]"),
        ("[gpu.x", "is not TOML", ""),
    ],
)
def test_a_users_mistake_is_named_with_its_place(tmp_path, text, says, hint):
    path = tmp_path / "hardware.toml"
    path.write_text(text)
    with pytest.raises(UserError, match=says) as refused:
        hardware.load(path)
    assert str(path) in str(refused.value)
    assert hint in refused.value.hint


def test_an_unknown_name_is_answered_with_the_closest():
    with pytest.raises(UserError, match="there is no GPU 'h1000'") as refused:
        hardware.gpu("H1000")
    assert "h100" in refused.value.hint
    with pytest.raises(UserError, match="there is no precision 'int4'"):
        hardware.precision("int4")
    with pytest.raises(UserError, match=r"/nowhere/at/all\.toml does not exist"):
        hardware.load("/nowhere/at/all.toml")


@pytest.mark.parametrize("text", ["", "# nothing yet\n", "[gpu]\n"])
def test_a_users_file_without_a_table_is_refused(tmp_path, text):
    (tmp_path / "mine.toml").write_text(text)
    with pytest.raises(UserError, match="contains no tables") as refused:
        hardware.load(tmp_path / "mine.toml")
    assert "[node.mine]" in refused.value.hint


def test_no_more_memory_can_be_used_than_there_is(tmp_path):
    (tmp_path / "mine.toml").write_text('[gpu.mine]\nlike = "h100"\nhbm_gb = 40\nhbm_usable_gib = 79\n')
    with pytest.raises(UserError, match="exceeds hbm_gb 40"):
        hardware.load(tmp_path / "mine.toml")


@pytest.mark.parametrize("hbm_gb", [40, 141])
def test_memory_beside_like_changes_what_can_be_used_in_proportion(tmp_path, hbm_gb):
    (tmp_path / "mine.toml").write_text(f'[gpu.mine]\nlike = "h100"\nhbm_gb = {hbm_gb}\n')
    usual, mine = hardware.load(tmp_path / "mine.toml").gpus["h100"], hardware.load(tmp_path / "mine.toml").gpus["mine"]
    assert mine.hbm_usable_gib == pytest.approx(usual.hbm_usable_gib * hbm_gb / usual.hbm_gb)


@pytest.mark.parametrize("text", ["h100?nosuch=1", "h100?general=abc", "h100?full_from", "h100?general=0"])
def test_a_calibration_in_a_gpus_own_words_is_checked(text, tmp_path):
    (tmp_path / "own.toml").write_text(f'[gpu.mine]\nlike = "h100"\ncalibrated_as = "{text}"\n')
    with pytest.raises(UserError, match="calibrated_as"):
        hardware.load(tmp_path / "own.toml")
