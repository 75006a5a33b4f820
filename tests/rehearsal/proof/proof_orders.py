"""Run as a script, with TE's layers: proves sets of recipes in several orders, with constructors that refuse what only
a part of a configuration says. Prints the verdicts as JSON, and which fields of a configuration no key has.
"""

import copy
import dataclasses
import functools
import itertools
import json
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import superpod.rehearsal.te.import_te  # noqa: F401 - before NeMo

# isort: split
import fiddle as fdl
import nemo_run as run
from nemo.collections.llm import LlamaModel
from nemo.collections.llm.peft import LoRA
from nemo.lightning.pytorch.callbacks.megatron_comm_overlap import MegatronCommOverlapCallback

from superpod.collection import registry
from superpod.collection.facts.environment import Variable
from superpod.nemo2 import overrides
from superpod.recipes import build
from superpod.rehearsal.proof import meta_build, proof, proof_pool, resolved
from superpod.rehearsal.te import build as te_build
from tests.rehearsal.proof.proof_stub import InThisProcess

SETS = {
    # Same degrees of parallelism; what differs was in no key before: precision, recomputation, context parallelism.
    "precision": ("llama32_1b_sft_h100_bf16", "llama32_1b_sft_h100_fp8ds", "llama32_1b_sft_h100_fp8cs"),
    "recompute": ("llama32_1b_pretrain_h100_bf16", "llama32_1b_pretrain_h100_bf16+full"),
    "context": ("llama32_1b_pretrain_h100_bf16", "llama32_1b_pretrain_h100_bf16+cp"),
    "generation": ("llama32_1b_lora_h100_bf16", "llama32_1b_lora_b200_bf16"),
}
REFUSES = {
    "precision": lambda config: config.fp8_recipe == "delayed" and config.fp8,
    "recompute": lambda config: config.recompute_granularity == "full",
    "context": lambda config: config.context_parallel_size == 2,
    "generation": lambda _: te_build.device.current_gpu().major == 10,
}
CHANGES = {"full": {"recompute": "full"}, "cp": {"cp": 2}}


def recipe(name):
    """The smallest size of a recipe, its layout changed as the name says."""
    base, _, change = name.partition("+")
    whole = registry.find(base)
    nodes = whole.nodes[0]
    return dataclasses.replace(whole, layouts={nodes: whole.layout().replace(**CHANGES.get(change, {}))})


def verdicts(names, folder):
    """Which of these fail, proven one call after the other in one file."""
    failed = []
    for name in names:
        chosen = recipe(name)
        proven = proof.prove([chosen], cache_file=Path(folder) / "proof.json")
        failed += [name for failure in proven.failures if "planted" in failure.why]
        assert all("planted" in failure.why for failure in proven.failures), proven.failures
    return sorted(failed)


def orders(kind):
    """The verdicts of a set in every order, and of each recipe alone."""
    real = meta_build.build_chunks

    def chunks(partial, config, **how):
        if REFUSES[kind](config):
            raise AssertionError(f"planted: {kind}")
        return real(partial, config, **how)

    runs = [*itertools.permutations(SETS[kind]), *((name,) for name in SETS[kind])]
    with mock.patch.object(meta_build, "build_chunks", chunks):
        results = []
        for names in runs:
            with tempfile.TemporaryDirectory() as folder:
                results.append((names, verdicts(names, folder)))
    return results


def fields_in_no_key():
    """Fields of the resolved objects whose change leaves the digest as it was."""
    chosen = recipe("llama32_1b_pretrain_h100_fp8ds")
    nodes = chosen.nodes[0]
    partial = build(chosen.name, nodes)
    world = nodes * chosen.gpus_per_node
    missing = []
    with te_build.connect(partial, 0, world, "sm90") as (strategy, model, _):
        for part in (model.config, model.optim.config, strategy.ddp_config):
            before = resolved.digest({"part": resolved.to_json(part)})
            for field in dataclasses.fields(part):
                changed = copy.copy(part)
                setattr(changed, field.name, "changed")
                if resolved.digest({"part": resolved.to_json(changed)}) == before:
                    missing.append(field.name)
        whole = resolved._settings(strategy)
        settings = [name for name in ("ddp_config", "_fsdp", "expert_model_parallel_size") if name not in whole]
    return missing + settings


def keys_of_changes():
    """Digests of one recipe, with a change of each kind that overrides, layouts and GPUs can make."""
    chosen = recipe("llama32_1b_pretrain_h100_bf16")
    nodes = chosen.nodes[0]
    changes = {
        "": "",
        "model": "model.config.rotary_base=1",
        "attention": "model.config.softmax_scale=0.5",
        "strategy": "trainer.strategy.use_te_rng_tracker=True",
        "ddp": "trainer.strategy.ddp.check_for_nan_in_grad=False",
        "precision": "trainer.plugins.grad_reduce_in_fp32=False",
        "optimizer": "optim.config.use_precision_aware_optimizer=True",
    }
    digests = {}
    for name, change in changes.items():
        partial = build(chosen.name, nodes)
        if change:
            overrides.apply(partial, [change])
        digests[name] = resolved.digest(resolved.resolve(chosen, nodes, partial))
    other = dataclasses.replace(chosen, gpu="b200")
    digests["generation"] = resolved.digest(resolved.resolve(other, nodes, build(chosen.name, nodes)))
    return digests


def parts_of_the_key():
    """Part of the key -> the parts that differ after a change of what it says."""
    chosen = recipe("llama32_1b_pretrain_h100_bf16")
    adapted = recipe("llama32_1b_lora_h100_bf16")
    (nodes,) = chosen.layouts

    def parts(recipe=chosen, change=lambda partial: None):
        partial = build(recipe.name, nodes)
        change(partial)
        return resolved.resolve(recipe, nodes, partial)

    def laid_out(**changes):
        return dataclasses.replace(chosen, layouts={nodes: chosen.layout().replace(**changes)})

    def sets(path, value, recipe=chosen):
        def change(partial):
            *owners, name = path.split(".")
            setattr(functools.reduce(getattr, owners, partial), name, value)

        return lambda: parts(recipe, change)

    def with_variable():
        with mock.patch.object(resolved.environment, "variables", return_value=[Variable("NEW", "1", "")]):
            return parts()

    cases = {
        "model": lambda: parts(change=lambda partial: fdl.update_callable(partial.model, OtherModel)),
        "config": sets("model.config.rotary_base", 1),
        "optimizer": sets("optim.config.use_precision_aware_optimizer", True),
        "transform": sets("model.model_transform", run.Config(LoRA, dim=2)),
        "strategy": sets("trainer.strategy.use_te_rng_tracker", True),
        "callbacks": sets(
            "trainer.callbacks", [run.Config(MegatronCommOverlapCallback, tp_comm_bootstrap_backend="x")]
        ),
        "peft": sets("peft.dim", 2, adapted),
        "task": lambda: parts(dataclasses.replace(chosen, task="sft")),
        "vocabulary": sets("data.tokenizer", SimpleNamespace(vocab_size=7)),
        "micro_batch": sets("data.micro_batch_size", chosen.layout().mbs * 2),
        "stages": lambda: parts(laid_out(pp=2)),
        "one_or_several": lambda: parts(dataclasses.replace(chosen, gpus_per_node=1)),
        "generation": lambda: parts(dataclasses.replace(chosen, gpu="b200")),
        "environment": with_variable,
    }
    assert parts() == parts()
    differing = {}
    for name, changed in cases.items():
        before, after = parts(adapted if name == "peft" else chosen), changed()
        differing[name] = [part for part in before.keys() | after.keys() if before.get(part) != after.get(part)]
    return {"whole": list(before), "differing": differing}


def main():
    proof_pool.Workers = InThisProcess
    answer = {
        "orders": {kind: orders(kind) for kind in SETS},
        "fields_in_no_key": fields_in_no_key(),
        "keys": keys_of_changes(),
        "parts": parts_of_the_key(),
    }
    json.dump(answer, sys.stdout)


class OtherModel(LlamaModel):
    """A Llama by another name."""


if __name__ == "__main__":
    main()
