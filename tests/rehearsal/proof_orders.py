"""Run as a script, with TE's layers: proves sets of recipes in several orders, with constructors that refuse what only
a part of a configuration says. Prints the verdicts as JSON, and which fields of a configuration no key has.
"""

import copy
import dataclasses
import itertools
import json
import sys
import tempfile
from pathlib import Path
from unittest import mock

import superpod.rehearsal.te.entry  # noqa: F401 - before NeMo

# isort: split
from superpod.recipes import build, overrides, registry
from superpod.rehearsal import meta_build, proof, proof_pool, resolved
from superpod.rehearsal.te import build as te_build

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
    "generation": lambda _: te_build.device.current().major == 10,
}
CHANGES = {"full": {"recompute": "full"}, "cp": {"cp": 2}}


class InThisProcess:
    """For proof_pool.Workers."""

    def __init__(self, count):
        pass

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def run(self, work, wanted, batch):
        for key, size in wanted.items():
            yield {key: work([size])[0]}


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
    real = meta_build.chunks

    def chunks(partial, config, **how):
        if REFUSES[kind](config):
            raise AssertionError(f"planted: {kind}")
        return real(partial, config, **how)

    runs = [*itertools.permutations(SETS[kind]), *((name,) for name in SETS[kind])]
    with mock.patch.object(meta_build, "chunks", chunks):
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
    with te_build.connected(partial, 0, world, "sm90") as (strategy, model, _):
        for part in (model.config, model.optim.config, strategy.ddp_config):
            before = resolved.digest({"part": resolved.plain(part)})
            for field in dataclasses.fields(part):
                changed = copy.copy(part)
                setattr(changed, field.name, "changed")
                if resolved.digest({"part": resolved.plain(changed)}) == before:
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
        digests[name] = resolved.digest(resolved.resolved(chosen, nodes, partial))
    other = dataclasses.replace(chosen, gpu="b200")
    digests["generation"] = resolved.digest(resolved.resolved(other, nodes, build(chosen.name, nodes)))
    return digests


def main():
    proof_pool.Workers = InThisProcess
    answer = {
        "orders": {kind: orders(kind) for kind in SETS},
        "fields_in_no_key": fields_in_no_key(),
        "keys": keys_of_changes(),
    }
    json.dump(answer, sys.stdout)


if __name__ == "__main__":
    main()
