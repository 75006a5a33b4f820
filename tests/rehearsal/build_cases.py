"""Cases that build without training: dry builds, attention on its own, what `rehearse` changes."""

from __future__ import annotations

import itertools
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from superpod.common import cpu_threads

if TYPE_CHECKING:
    from megatron.core.transformer.dot_product_attention import DotProductAttention
    from torch import Tensor


def attention_values(_: Path, without: frozenset[str]) -> dict[str, float]:
    """The largest difference between our attention and Megatron's own; and between two draws of one dropout."""
    import torch
    from megatron.core.tensor_parallel import get_cuda_rng_tracker
    from megatron.core.transformer.dot_product_attention import DotProductAttention

    from superpod.rehearsal import install
    from superpod.rehearsal.proof.meta_build import fake_ranks

    theirs = DotProductAttention.forward
    install(without=without)
    query, key, value = (torch.randn(12, 2, heads, 8) for heads in (4, 2, 2))
    mask = torch.ones(12, 12, dtype=torch.bool).triu(1)
    outside = mask | torch.ones(12, 12, dtype=torch.bool).tril(-4)  # a window of 3 tokens before
    with fake_ranks(rank=0, world_size=1):
        plain, windowed, dropping = attention(), attention(window_size=(3, 0)), attention(attention_dropout=0.5)
        tracker: Any = get_cuda_rng_tracker()
        states = tracker.get_states()
        first = dropping(query, key, value)
        tracker.set_states(states)
        second = dropping(query, key, value)
        ours, expected = plain(query, key, value), theirs(plain, query, key, value, mask[None, None])
        packed, one_by_one = _packed(plain)
        sinks = attention(softmax_type="learnable")
        sinks.softmax_offset.data.uniform_(-2, 2)
        expected_windowed = theirs(windowed, query, key, value, outside[None, None])
        return {
            "causal": (ours - expected).abs().max().item(),
            "packed": (packed - one_by_one).abs().max().item(),
            "sinks": (sinks(query, key, value) - theirs(sinks, query, key, value, mask[None, None])).abs().max().item(),
            "window": (windowed(query, key, value) - expected_windowed).abs().max().item(),
            "dropout from the same state": (first - second).abs().max().item(),
            "dropout changes nothing": float(torch.allclose(first, ours)),
        }


def _packed(layer: DotProductAttention) -> tuple[Tensor, Tensor]:
    """The output for samples of 5, 3 and 4 tokens in one row; and for each by itself."""
    import torch
    from megatron.core.packed_seq_params import PackedSeqParams

    starts = torch.tensor([0, 5, 8, 12], dtype=torch.int32)
    query, key, value = (torch.randn(12, heads, 8) for heads in (4, 2, 2))
    params = PackedSeqParams(qkv_format="thd", cu_seqlens_q=starts, cu_seqlens_kv=starts)
    ends = starts.tolist()
    one_by_one = [
        layer(*(t[start:end].unsqueeze(1) for t in (query, key, value))).squeeze(1)
        for start, end in itertools.pairwise(ends)
    ]
    return layer(query, key, value, packed_seq_params=params), torch.cat(one_by_one)


def attention(**settings: Any) -> DotProductAttention:
    from megatron.core.transformer.dot_product_attention import DotProductAttention
    from megatron.core.transformer.enums import AttnMaskType
    from megatron.core.transformer.transformer_config import TransformerConfig

    shape = {"num_layers": 1, "hidden_size": 32, "num_attention_heads": 4, "num_query_groups": 2}
    config = TransformerConfig(**{**shape, "attention_dropout": 0.0, **settings})
    return DotProductAttention(config, 1, AttnMaskType.causal, "self")


def dry(
    _: Path, without: frozenset[str], model: str, world_size: int, ranks: list[int], **layout: object
) -> dict[str, Any]:
    """Parameters of each chunk of each of these ranks of a stock recipe, and the seconds they took."""
    import importlib
    import time

    from superpod.rehearsal import dry_build, install

    install(without=without)
    recipe = importlib.import_module(f"nemo.collections.llm.recipes.{model}").pretrain_recipe()
    for name, value in layout.items():
        setattr(recipe.trainer.strategy, name, value)
    started = time.time()
    counts = [dry_build(recipe, rank, world_size) for rank in ranks]
    return {"counts": counts, "seconds": time.time() - started}


def dry_step(_: Path, without: frozenset[str]) -> dict[str, list[str]]:
    """Micro-batches of a group -> what Megatron's schedule says on the first, a middle and the last of 4 stages."""
    from nemo.collections.llm.recipes import llama3_70b

    from superpod.rehearsal import dry_build

    def answer(rank: int) -> str:
        try:
            return str(len(dry_build(recipe, rank, 64, step=True)))
        except (RuntimeError, ValueError) as refused:
            return str(refused)

    answers: dict[str, list[str]] = {}
    for group in (None, 2, 12):
        recipe = llama3_70b.pretrain_recipe()
        recipe.trainer.strategy.microbatch_group_size_per_vp_stage = group
        answers[str(group)] = [answer(rank) for rank in (0, 32, 63)]
    return answers


def dry_fp8(folder: Path, without: frozenset[str]) -> list[int]:
    """A recipe in FP8, whose precision plugin writes into a configuration that has been built already."""
    from nemo.collections.llm.recipes import llama3_8b
    from nemo.collections.llm.recipes.precision.mixed_precision import bf16_with_fp8_mixed

    from superpod.rehearsal import dry_build

    recipe = llama3_8b.pretrain_recipe()
    recipe.trainer.plugins = bf16_with_fp8_mixed()
    return dry_build(recipe, 0, 8)


def settings(_: Path, without: frozenset[str]) -> dict[str, list[str]]:
    """GPU-only names that this Megatron lacks; and what is dropped from a configuration that requests all of them."""
    from nemo.collections.llm import GPTConfig

    from superpod.rehearsal import install
    from superpod.rehearsal.patches.gpu_settings import GPU_ONLY, dropped

    install(without=without)
    requested: dict[str, Any] = {name: True for name, (neutral, _) in GPU_ONLY.items() if neutral is False}
    requested |= {"fp8": "hybrid", "cuda_graph_impl": "local", "moe_token_dispatcher_type": "flex"}
    requested |= {"recompute_granularity": "selective", "recompute_modules": ["moe_act", "core_attn"]}
    config: Any = GPTConfig(
        num_layers=2, hidden_size=32, num_attention_heads=4, num_moe_experts=4, add_bias_linear=False, **requested
    )
    unknown = sorted(set(GPU_ONLY) - set(GPTConfig.__dataclass_fields__))
    kept = [name for name, (neutral, _) in GPU_ONLY.items() if getattr(config, name) != neutral]
    unlisted = sorted(set(requested) - set(dropped) - {"recompute_granularity"})
    return {"unknown": unknown, "kept": kept, "unlisted": unlisted, "recompute": config.recompute_modules}


def dry_twice(folder: Path, without: frozenset[str]) -> list[list[int]]:
    """Building leaves nothing behind: not the process group, the random state, nor Megatron's variables."""
    import torch
    import torch.distributed as dist
    from megatron.core import parallel_state

    cpu_threads.set_passive_waiting()  # the first build does, for the whole process
    state, environment = torch.get_rng_state(), dict(os.environ)
    first = dry(folder, without, "llama3_8b", 8, [0])
    second = dry(folder, without, "gemma3_1b", 1, [0])  # it wants another attention backend
    assert not dist.is_initialized()
    assert not parallel_state.model_parallel_is_initialized()
    assert torch.equal(state, torch.get_rng_state())
    assert environment == dict(os.environ)
    return first["counts"] + second["counts"]


def dry_vocabulary(_: Path, without: frozenset[str]) -> dict[str, int]:
    """Where the vocabulary comes from: {source: parameters of a 1-layer llama3_8b on one rank}."""
    import nemo_run as run
    from nemo.collections.common.tokenizers.huggingface.auto_tokenizer import AutoTokenizer
    from nemo.collections.common.tokenizers.null_tokenizer import NullTokenizer
    from nemo.collections.llm.recipes import llama3_8b

    from superpod.rehearsal import dry_build

    recipe = llama3_8b.pretrain_recipe()
    recipe.trainer.strategy.context_parallel_size = 1
    recipe.model.config.num_layers = 1
    counts = {"stand-in": sum(dry_build(recipe, 0, 1))}
    recipe.data.tokenizer = run.Config(AutoTokenizer, "not-an-organisation/not-a-model")
    counts["not on this machine"] = sum(dry_build(recipe, 0, 1))
    recipe.data.tokenizer = run.Config(NullTokenizer, vocab_size=1000)
    counts["tokenizer"] = sum(dry_build(recipe, 0, 1))
    counts["argument"] = sum(dry_build(recipe, 0, 1, vocab_size=64))
    recipe.model.config.vocab_size = 500
    counts["config"] = sum(dry_build(recipe, 0, 1))
    return counts


def refuses_gpu(_: Path, without: frozenset[str]) -> dict[str, object] | None:
    """install() on a machine with a GPU, and a rehearsal there."""
    from unittest.mock import patch

    import torch

    from superpod.rehearsal import install

    before = dict(vars(torch.cuda))
    with patch("torch.cuda.is_available", lambda: True):
        install()
        from superpod.rehearsal import entry

        changed = [name for name, value in vars(torch.cuda).items() if value is not before.get(name)]
        try:
            pretrain: Any = entry.pretrain
            pretrain(None, None, None)
        except Exception as error:
            return {"changed": changed, "error": f"{type(error).__name__}: {error}"}


def changes(_: Path, without: frozenset[str]) -> list[list[str]]:
    """The changes that `rehearse` lists for a stock recipe full of GPU features; the recipe itself stays the same."""
    import fiddle as fdl
    import nemo_run as run
    from nemo.collections.llm.recipes import llama3_8b
    from nemo.collections.llm.recipes.precision.mixed_precision import bf16_with_fp8_mixed
    from nemo.lightning.pytorch.callbacks import NsysCallback
    from nemo_run.core.serialization.zlib_json import ZlibJSONSerializer

    from superpod.rehearsal import rehearse

    recipe = llama3_8b.pretrain_recipe(num_nodes=4)
    recipe.trainer.plugins = bf16_with_fp8_mixed()
    recipe.trainer.callbacks.append(run.Config(NsysCallback, start_step=1, end_step=2))
    recipe.optim.config.use_precision_aware_optimizer = True
    serializer = ZlibJSONSerializer()
    before = serializer.serialize(recipe)
    rehearsal, listed = rehearse(recipe, devices=2)
    assert serializer.serialize(recipe) == before
    read = serializer.deserialize(serializer.serialize(rehearsal))  # as a torchrun child reads it
    assert fdl.get_callable(read).__module__ == "superpod.rehearsal.entry"
    return [[change.path, str(change.old), str(change.new)] for change in listed]


def options(_: Path, without: frozenset[str], precisions: tuple[str, ...]) -> dict[str, Any]:
    """What the rules say of every option on a recipe of each kind in these precisions, and what it changes."""
    from superpod.rehearsal import install
    from superpod.rehearsal.options import option_cases, option_outcomes

    install(without=without)
    import superpod.nemo2.build.partial  # noqa: F401

    return {
        case.key: option_outcomes.check_case(case) for case in option_cases.list_cases() if case.precision in precisions
    }
