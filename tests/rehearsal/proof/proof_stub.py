"""Stands for the processes of a proof: digests and outcomes by rule, in this process, without NeMo."""

import hashlib
import subprocess
from pathlib import Path

from superpod.collection import registry
from superpod.collection.facts import proof_level
from superpod.collection.recipe_job import job
from superpod.rehearsal.proof import parameter_counts, proof_store, rank_models


def rotating(count, *, encoders=True, changed=0):
    """So many recipes, others with every commit, and before them as many that have changed since the file was written.

    Encoders are built only in processes of their own.
    """
    head = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, cwd=Path(__file__).parent)
    recipes = [r for r in registry.recipes().values() if encoders or r.model.family != "encoders"]
    recipes.sort(key=lambda r: hashlib.sha256(f"{head.stdout}{r.name}".encode()).digest())
    known = {digests.facts for digests in proof_level.list_digests(proof_level.read())}
    stale = [r for r in recipes if not r.model.broken and any(proof_level.facts(r, n) not in known for n in r.nodes)]
    return list(dict.fromkeys([*stale[:changed], *recipes[:count]]))


def planned_counts(size):
    recipe = size.find()
    built = proof_store.digest([size.recipe, size.layout.short()])
    return {
        "built": built,
        "parameters": [[count] for count in parameter_counts._count(recipe.task, job(recipe, size.nodes))],
    }


class InThisProcess:
    """For `proof_pool.Workers`: the real work, in this process, which has Transformer Engine's layers."""

    def __init__(self, count):
        pass

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def run(self, work, wanted, batch):
        for key, size in wanted.items():
            yield {key: work([size])[0]}


class StubWorkers:
    """`resolve` and `build` take a size; `calls` are the sizes that were given to each, in order."""

    def __init__(self, resolve, build=planned_counts, interrupt_after=None):
        self.resolve, self.build, self.interrupt_after = resolve, build, interrupt_after
        self.calls = {"resolve_all": [], "build_all": []}

    def __call__(self, count):
        return self

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def run(self, work, wanted, batch):
        one = self.resolve if work is rank_models.resolve_all else self.build
        for key, size in wanted.items():
            if self.interrupt_after == len(self.calls[work.__name__]):
                raise KeyboardInterrupt
            self.calls[work.__name__].append((size.recipe, size.nodes))
            yield {key: one(size)}


def by_precision(size):
    """A digest as it should be: sizes with one layout but for the batch, in one precision, are one model."""
    recipe = registry.find(size.recipe)
    kept = vars(size.layout.replace(gbs=1))
    return {"digest": f"{recipe.model.name} {recipe.task} {recipe.precision} {recipe.gpu} {sorted(kept.items())}"}
