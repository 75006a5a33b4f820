from dataclasses import replace

import pytest

from superpod.planner.kernels.attention import (
    FLASH2,
    FLASH3,
    FUSED,
    UNFUSED,
    Attention,
    available,
    choose,
    failed_assertions,
    reasons_against,
)
from tests.planner.kernels.te_cases import CASES
from tests.planner.kernels.te_cp_cases import CP_CASES

ALL = (*CASES, *CP_CASES)
CUDNN = 91400  # of Transformer Engine 2.9's time


@pytest.mark.parametrize("case", ALL, ids=[f"{case.test}-sm{case.sm}" for case in ALL])
def test_a_configuration_of_transformer_engines_tests_has_the_backends_that_it_runs_with(case):
    layer = Attention(sm=case.sm, cudnn=CUDNN, **case.values)
    names = zip(("flash", "fused", "unfused"), available(layer), strict=True)
    assert " ".join(name for name, there in names if there) == case.available
    assert bool(case.available and failed_assertions(layer)) == case.asserts


def test_there_are_60_of_them_and_more():
    assert len({(case.test, case.sm) for case in ALL}) == len(ALL) >= 60


MLA = {"head_qk": 192, "head_v": 128, "heads": 128, "groups": 128, "seq_q": 4096, "seq_kv": 4096}
GPT_OSS = {"heads": 64, "groups": 8, "seq_q": 4096, "seq_kv": 4096, "softmax": "learnable"}
GEMMA = {"head_qk": 256, "head_v": 256, "heads": 8, "groups": 4, "seq_q": 4096, "seq_kv": 4096}
PACKED = {"qkv_layout": "thd_thd_thd", "mask": "padding_causal"}


@pytest.mark.parametrize(
    ("sm", "values", "backend"),
    [
        (80, MLA, "unfused"),
        (90, MLA, "fused"),
        (100, MLA, "fused"),
        (80, MLA | PACKED, ""),
        (80, MLA | {"cp": 2}, ""),
        (90, MLA | PACKED, "fused"),
        (90, GPT_OSS, "fused"),
        (90, GPT_OSS | {"cp": 2}, ""),
        (90, GPT_OSS | {"cp": 2, "cp_comm": "a2a"}, "fused"),
        (90, GPT_OSS | {"cudnn": 91300}, "unfused"),
        (90, GPT_OSS | {"cudnn": 91300, "cp": 2, "cp_comm": "a2a"}, ""),
        (90, GPT_OSS | PACKED, ""),
        (90, GPT_OSS | PACKED | {"cudnn": 91800}, ""),  # 2.9's Python asks nothing of cuDNN there
        (80, GEMMA | {"backend": "flash"}, "flash"),
        (100, GEMMA | {"backend": "flash"}, "flash"),
        (103, GEMMA | {"backend": "flash"}, ""),  # B300: neither
        (103, GEMMA, "unfused"),
        (80, PACKED, "flash"),
        (90, {"deterministic": True}, "fused"),
        (100, {"deterministic": True}, "flash"),
    ],
)
def test_the_backend_of_what_recipes_train(sm, values, backend):
    assert choose(Attention(sm=sm, **values)).backend == backend


def test_assertions_of_context_parallelism():
    window = Attention(sm=90, window_left=4096, window_right=0, cp=2)
    assert "a2a or all_gather" in failed_assertions(window)[0].text
    assert not failed_assertions(replace(window, cp=1))
    assert not failed_assertions(replace(window, cp_comm="a2a"))
    assert "divisible by cp" in failed_assertions(replace(window, cp_comm="a2a", groups=1))[0].text


def test_every_reason_has_its_lines():
    for reason in (*FLASH2, *FLASH3, *FUSED, *UNFUSED):
        first, _, last = reason.lines.partition("-")
        assert 390 < int(first) <= int(last) < 1130
    assert reasons_against(UNFUSED, Attention(sm=90, cp=2))[0].text == "context parallelism"
