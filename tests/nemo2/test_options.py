"""Test that refusals suggest only options which the recipe can have."""

import re
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest

from superpod.errors import UserError
from superpod.nemo2 import options
from superpod.nemo2.validation import sharded
from superpod.nemo2.validation.reading import Reader
from superpod.requests.request import Request


def partial(*, adapters: bool, shards: bool, stages: int, fsdp: bool = False) -> Any:
    return SimpleNamespace(
        peft="lora" if adapters else None,
        optim=SimpleNamespace(config=SimpleNamespace(use_distributed_optimizer=shards)),
        trainer=SimpleNamespace(
            strategy=SimpleNamespace(
                pipeline_model_parallel_size=stages,
                fsdp="megatron" if fsdp else None,
                ddp=SimpleNamespace(use_megatron_fsdp=fsdp, use_distributed_optimizer=shards),
            )
        ),
        resume=SimpleNamespace(restore_config="weights"),
    )


RECIPES = [partial(adapters=a, shards=s, stages=n) for a, s, n in product((False, True), (False, True), (1, 2))]


@pytest.mark.parametrize("name", [name for name, option in options.OPTIONS.items() if option.instead])
def test_suggested_options_are_possible(name):
    hints = [(recipe, hint) for recipe in RECIPES if (hint := refused(recipe, name))]
    assert hints
    named = [(recipe, word) for recipe, hint in hints for word in re.findall(r"with=(\w+)", hint)]
    assert named
    assert [word for recipe, word in named if options.OPTIONS[word].refusal(recipe)] == []


def refused(recipe: Any, name: str) -> str | None:
    if not options.OPTIONS[name].refusal(recipe):
        return None
    with pytest.raises(UserError, match=name) as error:
        options.apply(recipe, name)
    return error.value.hint


@pytest.mark.parametrize(("adapters", "offered"), [(True, False), (False, True)])
def test_suggestions_for_fsdp_with_adapters(adapters, offered):
    (broken,) = sharded.check_fsdp_weights(Reader(partial(adapters=adapters, shards=True, stages=1, fsdp=True)))
    assert ("with=precision_aware" in broken.fix) == offered
    assert "with=offload_activations" in broken.fix


@pytest.mark.parametrize("text", ["with=", "with= ", "with=fsdp,,fp16", "with=fsdp,", "with=,fsdp"])
def test_refuses_empty_option(text):
    with pytest.raises(UserError, match="empty option name") as error:
        Request("llama3_8b_pretrain_h100_bf16", (text,)).check()
    assert "full_recompute, offload_optimizer" in error.value.hint
