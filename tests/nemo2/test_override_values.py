"""Test the parsing of override values; no text is evaluated as code."""
# ruff: noqa: UP007, UP045 - the forms that annotations of NeMo and Megatron have

import datetime
from typing import Any, Literal, Optional, Union

import pytest

pytest.importorskip("nemo_run")
pytestmark = [pytest.mark.nemo, pytest.mark.filterwarnings("ignore")]


def parse(text, *taken):
    from superpod.nemo2 import override_values

    return override_values.parse(text, taken)


@pytest.mark.parametrize(
    ("text", "annotation", "value"),
    [
        ("(4096,0)", Optional[tuple[int, int]], (4096, 0)),
        ("[4096,0]", Optional[tuple[int, int]], (4096, 0)),
        ("[1e-2,1e-4]", Union[float, list[float]], [0.01, 0.0001]),
        ("3", float, 3.0),
        ("-1.5", float, -1.5),
        ("None", Optional[int], None),
        ("null", Optional[int], None),
        ("true", bool, True),
        ("0", bool, False),
        ("1", Union[list[int], str, int], 1),
        ("4h", Union[str, int], "4h"),
        ("bf16-mixed", str, "bf16-mixed"),
        ("'quoted'", str, "quoted"),
        ("link", Union[bool, Literal["link"], None], "link"),
        ("datetime.timedelta(hours=1)", Optional[datetime.timedelta], datetime.timedelta(hours=1)),
        ("timedelta(minutes=30)", datetime.timedelta, datetime.timedelta(minutes=30)),
        ("{'hours':4}", Union[str, dict[str, int]], {"hours": 4}),
    ],
)
def test_converts_to_the_type_of_the_field(text, annotation, value):
    found = parse(text, annotation)
    assert (found, type(found)) == (value, type(value))


def test_dotted_names():
    from collections.abc import Callable

    import torch

    assert parse("torch.nn.functional.gelu", Callable) is torch.nn.functional.gelu
    assert parse("torch.bfloat16", torch.dtype) is torch.bfloat16


def test_constructor_becomes_a_configuration():
    import nemo_run as run
    from megatron.core.distributed import DistributedDataParallelConfig

    found = parse(
        "megatron.core.distributed.DistributedDataParallelConfig(bucket_size=5)", DistributedDataParallelConfig
    )
    assert found == run.Config(DistributedDataParallelConfig, bucket_size=5)


@pytest.mark.parametrize(
    "text",
    [
        "os.system",
        "__import__('os').system('touch executed')",
        "torch.nn.functional.torch.os.system",
        "torch.nn.functional.__builtins__",
        "lambda x: x",
        "[open('executed', 'w') for x in (1,)]",
        "open('executed', 'w') if True else None",
        "nemo.collections.llm.api.os.system",
        "torch.nn.functional.handle_torch_function(1)",
        "timedelta(hours=open('executed', 'w'))",
    ],
)
def test_does_not_evaluate_code(text, tmp_path, monkeypatch):
    from collections.abc import Callable

    from superpod.nemo2 import override_values

    monkeypatch.chdir(tmp_path)
    for annotation in (Callable, Optional[list[Any]], int, datetime.timedelta):
        with pytest.raises(override_values.NotAValue):
            parse(text, annotation)
    assert not list(tmp_path.iterdir())


def test_accepts_types_of_base_classes():
    """NeMo's Mixtral narrows `moe_aux_loss_coeff` to float, but Megatron also accepts a list."""
    from nemo.collections.llm.gpt.model.mixtral import MixtralConfig8x7B

    from superpod.nemo2 import override_values

    taken = override_values.field_types(MixtralConfig8x7B, "moe_aux_loss_coeff")
    assert override_values.parse("[1e-2,1e-4]", taken) == [0.01, 0.0001]
    assert override_values.parse("0.02", taken) == 0.02
