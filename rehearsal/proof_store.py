"""What proofs have shown: the committed file (`recipes/facts/proven.json`), and a cache of one machine.

Both are keyed by content. The committed file has, for each size of a recipe, the digest of its inputs (the resolved
configuration, and what the planner expects of it) and the digest of what was built and received from them. Code that
changes neither changes nothing here; what `differences` compares comes from execution (decision 14).
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import re
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypedDict

from superpod import collection
from superpod.errors import UserError
from superpod.recipes import registry
from superpod.recipes.facts import proof_level
from superpod.recipes.facts.proof_level import NOT_RECORDED, facts
from superpod.recipes.registry import Recipe
from superpod.rehearsal.te import source

if TYPE_CHECKING:
    from superpod.rehearsal.proof import Proof

Size = tuple[str, int]
"""A recipe's name and a number of nodes."""
ROOT = Path(__file__).resolve().parent.parent
REHEARSALS = ROOT / "docs" / "rehearsals.json"
PACKAGES = ("nemo_toolkit", "megatron-core", "nemo-run", "fiddle", "torch")
CODE = ("planner/**/*.py", "planner/data/**/*", "recipes/**/*.py", "src/superpod/*.py", "rehearsal/**/*.py")
"""What resolves and builds; a recipe's layout is in its own key."""
SAVE_EVERY_S = 10
"""Seconds between two writes of the cache while results arrive."""
KEPT = 3
"""Versions of the code whose results stay in the cache: going back to the last branch costs nothing."""


class Resolution(TypedDict, total=False):
    """What a size of a recipe resolves to."""

    digest: str
    error: str
    """with which Megatron or NeMo refuses the configuration"""
    missing: str


class Outcome(TypedDict, total=False):
    """Result of building the models of a resolved configuration."""

    parameters: list[list[int]]
    """Of each pipeline rank that was built, the parameters of each of its chunks."""
    layers: list[str]
    """Digests of the distinct TE layers."""
    built: str
    """Digest of parameters, layers, process groups and what was communicated, of each pipeline rank."""
    world: list[str]
    """Process groups that the constructors measured and whose size follows from the number of GPUs."""
    error: str
    missing: str
    """what the model needs that only a machine with a GPU has"""


@cache
def versions() -> dict[str, str]:
    """Library -> its version.

    Raises:
        UserError: one of them is not installed.
    """
    source.folder()
    try:
        # Without a local label such as +cpu: shapes are the same, whatever torch was compiled for.
        installed = {name: importlib.metadata.version(name).partition("+")[0] for name in PACKAGES}
    except importlib.metadata.PackageNotFoundError as missing:
        raise UserError(
            f"a proof builds NeMo's models, and {missing.name} is not installed",
            "pip install -c constraints.txt -e '.[nemo]'; `recipes doctor` shows what is there",
        ) from missing
    return installed | {"transformer_engine": source.VERSION}


def digest(value: object) -> str:
    """Of anything that JSON can say: 8 hexadecimal digits, which tell a change from none."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:8]


# -- the cache of this machine ---------------------------------------------------------------------------------------


class ProofCache:
    """Results of this code, by facts of sizes and by resolved configurations; `save` writes the file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        code, known = _code(), _read(path)
        mine = known.pop(code, {"resolved": {}, "built": {}})
        self._all = dict(list(known.items())[-KEPT + 1 :]) | {code: mine}
        self._saved = time.monotonic()
        self.resolved: dict[str, Resolution] = mine["resolved"]
        self.built: dict[str, Outcome] = mine["built"]

    def save_now_and_then(self) -> None:
        """`save`, unless it was done in the last seconds: the file has megabytes."""
        if time.monotonic() - self._saved > SAVE_EVERY_S:
            self.save()

    def save(self) -> None:
        """Write the file completely, or leave it as it was.

        Raises:
            OSError: no space, or no permission.
        """
        self._path.parent.mkdir(parents=True, exist_ok=True)
        _replace(self._path, json.dumps({"proof": self._all}, separators=(",", ":")))
        self._saved = time.monotonic()


def _read(path: Path) -> dict[str, Any]:
    """The cache's results by code; nothing of a file that cannot be read, or that an older version has written."""
    try:
        known = json.loads(path.read_text())["proof"]
        return known if all(set(results) == {"resolved", "built"} for results in known.values()) else {}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}


@cache
def _code() -> str:
    """Hash of the code, the data and the libraries on which cached results depend."""
    files = {path for pattern in CODE for path in ROOT.glob(pattern) if path.is_file() and path.suffix != ".pyc"}
    total = hashlib.sha256(repr(sorted(versions().items())).encode())
    named = {str(path.relative_to(ROOT)): path for path in files} | dict(collection.all_files())
    for name, path in sorted(named.items()):
        total.update(f"{name}\0".encode() + path.read_bytes() + b"\0")
    return total.hexdigest()[:24]


def _replace(path: Path, text: str) -> None:
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        partial.write_text(text)
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


# -- the committed file ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Written:
    """What has become of the committed file, in sizes."""

    path: Path
    proven: int
    """built and recorded"""
    earlier: int
    """unchanged since an earlier proof, which did not record what was built"""
    changed: int
    """no longer in the file: they resolve otherwise than what was built"""


class Shown(NamedTuple):
    """What a proof has shown of a size."""

    facts: str
    """Digest of the recipe's own facts at that size: the key in the file."""
    inputs: str
    """Digest of the resolved configuration, and of what is expected."""
    built: str
    """Digest of what was built; `NOT_RECORDED` where it was not built now."""


def standing(known: Mapping[str, Any], shown: Mapping[Size, Shown]) -> dict[Size, Shown]:
    """The sizes that the file has with these inputs, and what was built from them with the installed libraries."""
    entries = _entries(known) if known.get("versions") == versions() else {}
    same = {size: entries[one.facts] for size, one in shown.items() if one.facts in entries}
    return {
        size: shown[size]._replace(built=built)
        for size, (inputs, built) in same.items()
        if inputs == shown[size].inputs and built != NOT_RECORDED
    }


def differences(known: Mapping[str, Any], shown: Mapping[Size, Shown]) -> list[str]:
    """Where the file says otherwise than what was executed, as lines; [] = nowhere.

    Of a size that the file does not have it says nothing, and so nothing wrong.
    """
    if known.get("versions") != versions():
        return [f"proven with {known.get('versions')}, and {versions()} is installed"]
    entries, lines = _entries(known), []
    for (name, nodes), one in shown.items():
        inputs, built = entries.get(one.facts, (NOT_RECORDED, NOT_RECORDED))
        if inputs not in (NOT_RECORDED, one.inputs):
            lines.append(f"{name} at {nodes} nodes resolves otherwise than what was proven")
        elif NOT_RECORDED not in (built, one.built) and built != one.built:
            lines.append(f"{name} at {nodes} nodes is built otherwise than what was proven")
    return lines


def write(proof: Proof, recipes: Iterable[Recipe]) -> Written:
    """Write what a proof has shown of these recipes' declared sizes, and keep what the file says of others.

    Raises:
        UserError: collections are in use; or the file has other recipes, proven with other libraries.
    """
    recipes = list(recipes)
    refuse_to_write(recipes)
    old = proof_level.read()
    if old.get("versions") != proof.versions:
        old = {}
    every = {facts(recipe, nodes) for recipe in registry.recipes().values() for nodes in recipe.nodes}
    mine = {facts(recipe, nodes) for recipe in recipes for nodes in recipe.nodes}
    before = _entries(old)
    new: dict[str, str] = {}
    for one in proof.shown.values():
        inputs, built = before.get(one.facts, ("", ""))
        if one.built != NOT_RECORDED:
            new[one.facts] = f"{one.inputs} {one.built}"
        elif inputs == one.inputs:
            new[one.facts] = f"{inputs} {built}"
    sizes = {key: " ".join(entry) for key, entry in before.items() if key in every - mine} | new
    names, models = {recipe.name for recipe in recipes}, {recipe.model.name for recipe in recipes}
    kept = {name: why for name, why in old.get("unproven", {}).items() if name not in models}
    written = {
        "versions": proof.versions,
        "unproven": kept | proof.unproven,
        "broken": _broken(old, proof, names),
        "rehearsed": rehearsed(registry.recipes().values()),
        "sizes": dict(sorted(sizes.items())),
    }
    _replace(proof_level.EVIDENCE, json.dumps(written, indent=1) + "\n")
    earlier = sum(value.endswith(NOT_RECORDED) for value in new.values())
    return Written(proof_level.EVIDENCE, len(new) - earlier, earlier, len(before.keys() & (mine - new.keys())))


def refuse_to_write(recipes: Iterable[Recipe]) -> None:
    """Refuse, before a proof that takes long, what `write` would refuse after it. Raises UserError."""
    if folders := collection.folders():
        raise UserError(f"--write keeps the proof without collections, and {folders[0]} is one", "unset it")
    old = proof_level.read()
    others = registry.recipes().keys() - {recipe.name for recipe in recipes}
    if others and old and old.get("versions") != versions():
        raise UserError(
            f"{proof_level.EVIDENCE.name} was proven with {old.get('versions')}, which this would drop",
            "prove all recipes: `recipes prove --write`",
        )


def _entries(known: Mapping[str, Any]) -> dict[str, tuple[str, str]]:
    """Facts of a size -> digest of its inputs, and of what was built."""
    return {key: (value.partition(" ")[0], value.partition(" ")[2]) for key, value in known.get("sizes", {}).items()}


def _broken(old: Mapping[str, Any], proof: Proof, names: set[str]) -> list[dict[str, Any]]:
    """Failures by their reasons, known ones too: why, and the recipes with their sizes; of other recipes the file's."""
    groups: dict[str, dict[str, list[int]]] = defaultdict(lambda: defaultdict(list))
    for group in old.get("broken", ()):
        for name, sizes in group["recipes"].items():
            if name not in names and name in registry.recipes():
                groups[group["why"]][name] += sizes
    for failure in (*proof.failures, *proof.known):
        if failure.recipe in names:
            groups[failure.why][failure.recipe].append(failure.nodes)
    return [{"why": why, "recipes": sizes} for why, sizes in groups.items()]


def rehearsed(recipes: Iterable[Recipe]) -> dict[str, list[int]]:
    """Recipe -> sizes at which it was rehearsed in the topology that it has there today, and no rehearsal failed."""
    ours = {recipe.name: recipe for recipe in recipes}
    results = json.loads(REHEARSALS.read_text()).values() if REHEARSALS.is_file() else ()
    verdicts: dict[str, dict[int, list[bool]]] = defaultdict(lambda: defaultdict(list))
    for result in results:
        recipe, nodes = ours.get(result["recipe"]), result["nodes"]
        if recipe and nodes in recipe.nodes:
            same = _degrees(result.get("topology", "")) == _todays_degrees(recipe, nodes)
            if same or not result["passed"]:
                verdicts[recipe.name][nodes].append(result["passed"])
    passed = {name: sorted(n for n, runs in sizes.items() if all(runs)) for name, sizes in sorted(verdicts.items())}
    return {name: sizes for name, sizes in passed.items() if sizes}


def _degrees(topology: str) -> set[str]:
    """{"TP8", "SP", "DP4"} of `TP2 SP DP2, folded: TP 8 -> 2, DP 4 -> 2`: the degrees before they were folded."""
    short, _, folded = topology.partition(", ")
    degrees = dict(re.findall(r"([A-Z]+)(\d*)", short))
    degrees.update(re.findall(r"([A-Z]+) (\d+) -> ", folded))
    return {f"{name}{size}" for name, size in degrees.items()}


def _todays_degrees(recipe: Recipe, nodes: int) -> set[str]:
    layout = recipe.layout(nodes)
    dp = layout.dp(nodes * recipe.gpus_per_node)
    short = layout.short() if layout.model_parallel * layout.ep > 1 else ""
    return _degrees(f"{short} DP{dp}" if dp > 1 else short)
