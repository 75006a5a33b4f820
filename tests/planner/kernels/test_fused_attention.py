import csv
import os
from dataclasses import fields, replace
from pathlib import Path

import pytest

from superpod.planner.kernels.fused_attention import (
    ARBITRARY,
    FP8,
    MAX512,
    Fused,
    FusedAttention,
    fused_backend,
    unmet_conditions,
)
from tests.planner.kernels import compiled_te


def _answers():
    default = FusedAttention(sm=90, cudnn=90000)
    kinds = {f.name: type(getattr(default, f.name)) for f in fields(FusedAttention)}
    with compiled_te.ANSWERS.open() as rows:
        for row in csv.DictReader(rows):
            answer = int(row.pop("backend"))
            values = {k: v == "True" if kinds[k] is bool else kinds[k](v) for k, v in row.items()}
            yield replace(default, **values), answer


def test_every_answer_is_that_of_the_compiled_library_of_transformer_engine_2_9():
    answers = list(_answers())
    wrong = [(layer, answer) for layer, answer in answers if fused_backend(layer) != answer]
    assert not wrong
    kernels = [answer for _, answer in answers]
    assert len(kernels) == 800
    assert {Fused.NONE, Fused.ARBITRARY, Fused.FP8} <= set(kernels)


@pytest.mark.skipif("SUPERPOD_TE_LIBRARY" not in os.environ, reason="compiled_te.py says how to get the library")
def test_the_library_itself(capsys):
    library, stubs = (Path(path) for path in os.environ["SUPERPOD_TE_LIBRARY"].split(":"))
    compiled_te.main("compare", library, stubs, 50_000)
    assert "0 answered otherwise" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("change", "condition"),
    [
        ({"head_qk": 192, "head_v": 128, "sm": 80}, "head sizes"),
        ({"head_qk": 256, "head_v": 256, "sm": 100}, "head sizes"),
        ({"qkv_layout": "thd_thd_thd", "mask": "padding_causal", "sm": 80}, "format"),
        ({"softmax": "learnable", "cudnn": 91300}, "softmax"),
        ({"cudnn": 91001}, "cuDNN 9.10.0 and 9.10.1"),
        ({"bias": "post_scale_bias", "mask": "padding"}, "bias with padding"),
        ({"window_left": 128, "window_right": 0, "mask": "padding"}, "window"),
    ],
)
def test_what_is_missing_is_named(change, condition):
    layer = FusedAttention(
        **{"sm": 90, "cudnn": 91400, "seq_q": 4096, "seq_kv": 4096, "head_qk": 128, "head_v": 128} | change
    )
    assert fused_backend(layer) is Fused.NONE
    assert condition in [broken.name for broken in unmet_conditions(ARBITRARY, layer)]


def test_short_sequences_take_the_kernel_that_the_environment_wants():
    short = FusedAttention(sm=90, cudnn=91400, seq_q=512, seq_kv=512, qkv_layout="bshd_bshd_bshd")
    assert fused_backend(short) is Fused.ARBITRARY
    assert fused_backend(replace(short, wanted=0)) is Fused.MAX512
    assert fused_backend(replace(short, seq_q=1024, wanted=0)) is Fused.ARBITRARY


def test_every_condition_has_its_lines():
    for condition in (*FP8, *MAX512, *ARBITRARY):
        first, _, last = condition.lines.partition("-")
        assert 200 < int(first) <= int(last or first) < 460
