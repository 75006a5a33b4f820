"""Stores the results of proofs in the committed file (`collection/facts/proven.json`) and in a cache on this machine.

Both are keyed by content. For each size of a recipe, the committed file contains a digest of the inputs (the resolved
configuration and the planner's counts) and a digest of what was built from them. A change of code that affects neither
does not change the file. `differences` compares these digests with those of a new proof (decision 14).
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import re
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

from superpod.collection import registry
from superpod.collection.facts import proof_level
from superpod.collection.facts.proof_level import NOT_RECORDED, SizeDigests, facts
from superpod.collection.registry import Recipe
from superpod.common import atomic_file, collection, package_files
from superpod.errors import UserError, counted
from superpod.rehearsal import result_files
from superpod.rehearsal.te import source

if TYPE_CHECKING:
    from superpod.rehearsal.proof.proof import Proof

Size = tuple[str, int]
"""(name of a recipe, number of nodes)."""
ROOT = Path(__file__).resolve().parents[4]
REHEARSALS = ROOT / "docs" / "rehearsals.json"
FOLDERS = (
    ".",
    "common",
    "planner",
    "collection",
    "included/recipes/models",
    "included/recipes/layouts",
    "data",
    "nemo2",
    "weights",
    "rehearsal",
)
PACKAGES = ("nemo_toolkit", "megatron-core", "nemo-run", "fiddle", "torch")
"""Packages that affect the results. The layout of a recipe is part of its key."""
SAVE_EVERY_S = 10
"""Minimum number of seconds between two writes of the cache during a proof."""
MAX_VERSIONS = 3
"""Number of versions of the code whose results stay in the cache, so that switching branches needs no new builds."""


class Resolution(TypedDict, total=False):
    """The result of resolving the configuration of a recipe on a number of nodes. One of the fields is set."""

    digest: str
    """Digest of the resolved configuration."""
    error: str
    """The error with which Megatron or NeMo rejects the configuration."""
    missing: str
    """The error that shows that the model needs a package or GPU that this machine lacks."""


class Outcome(TypedDict, total=False):
    """The result of building the models of a resolved configuration."""

    parameters: list[list[int]]
    """Parameters of each model chunk, for each pipeline rank that was built."""
    layers: list[str]
    """Digests of the distinct layers of Transformer Engine."""
    built: str
    """Digest of the parameters, layers, process groups and communication of each pipeline rank."""
    world: list[str]
    """Process groups whose size depends on the number of GPUs and is read by a constructor."""
    error: str
    """The error with which Megatron, NeMo or Transformer Engine rejects the model."""
    missing: str
    """As in `Resolution`."""


@cache
def versions() -> dict[str, str]:
    """Return {package: version} of the libraries that affect a proof.

    Raises:
        UserError: a library is not installed.
    """
    source.find_folder()
    try:
        # Without a local version label such as +cpu, on which shapes do not depend.
        installed_versions = {name: importlib.metadata.version(name).partition("+")[0] for name in PACKAGES}
    except importlib.metadata.PackageNotFoundError as missing:
        raise UserError(
            f"a proof builds NeMo's models, but {missing.name} is not installed",
            "run `pip install -c constraints.txt -e '.[nemo]'`; `recipes doctor` lists the installed packages",
        ) from missing
    return installed_versions | {"transformer_engine": source.VERSION}


def digest(value: object) -> str:
    """Return the first 8 hexadecimal digits of the SHA-256 of a JSON value."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:8]


# -- the cache of this machine ---------------------------------------------------------------------------------------


class ProofCache:
    """A JSON file of results of the current code: `resolved` by facts of a size, `built` by resolved configuration."""

    def __init__(self, path: Path) -> None:
        self._path = path
        code, known = _code(), _read_cache(path)
        own_entries = known.pop(code, {"resolved": {}, "built": {}})
        self._all = dict(list(known.items())[-MAX_VERSIONS + 1 :]) | {code: own_entries}
        self._saved = time.monotonic()
        self.resolved: dict[str, Resolution] = own_entries["resolved"]
        self.built: dict[str, Outcome] = own_entries["built"]

    def save_periodically(self) -> None:
        """Call `save` at most every `SAVE_EVERY_S` seconds, because the file has several megabytes."""
        if time.monotonic() - self._saved > SAVE_EVERY_S:
            self.save()

    def save(self) -> None:
        """Write the file atomically. Raises OSError."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        atomic_file.write(self._path, json.dumps({"proof": self._all}, separators=(",", ":")))
        self._saved = time.monotonic()


def _read_cache(path: Path) -> dict[str, Any]:
    """Return {hash of the code: results} of a cache; {} if the file is unreadable or has an older format."""
    try:
        saved_proof = json.loads(path.read_text())["proof"]
        return saved_proof if all(set(results) == {"resolved", "built"} for results in saved_proof.values()) else {}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}


def _is_code(name: str) -> bool:
    """Return whether cached results depend on a file of this package; layouts are part of the results' keys instead."""
    return name.endswith(".py") or name.startswith("planner/data/")


@cache
def _code() -> str:
    """Return a hash of the code, data and library versions on which cached results depend."""
    total = hashlib.sha256(repr(sorted(versions().items())).encode())
    package = {name: path for name, path in package_files.files(FOLDERS).items() if _is_code(name)}
    files_by_name = package | dict(collection.all_files())
    for name, path in sorted(files_by_name.items()):
        total.update(f"{name}\0".encode() + path.read_bytes() + b"\0")
    return total.hexdigest()[:24]


# -- the committed file ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class WriteResult:
    """The numbers of sizes that a write has added to or removed from the committed file."""

    path: Path
    proven: int
    """Sizes that were built and recorded."""
    earlier: int
    """Sizes that have not changed since an earlier proof, which did not record what was built."""
    changed: int
    """Sizes that were removed from the file, because they no longer resolve to what was built."""


def find_unchanged(stored: Mapping[str, Any], digests: Mapping[Size, SizeDigests]) -> dict[Size, SizeDigests]:
    """Return the sizes whose inputs and library versions equal those in the committed file (`stored`).

    The result contains the stored digests of the builds.
    """
    entries = _entries(stored) if stored.get("versions") == versions() else {}
    unchanged: dict[Size, SizeDigests] = {}
    for size, own in digests.items():
        inputs, built = entries.get(own.facts, ("", NOT_RECORDED))
        if inputs == own.inputs and built != NOT_RECORDED:
            unchanged[size] = own._replace(built=built)
    return unchanged


def differences(stored: Mapping[str, Any], digests: Mapping[Size, SizeDigests]) -> list[str]:
    """Return a line for each size whose digests differ from those in the committed file; [] if there is no difference.

    Sizes that are not in the file are skipped. If it was written with other library versions, return one line.
    """
    if stored.get("versions") != versions():
        return [f"verified with {stored.get('versions')}, but {versions()} is installed"]
    entries, lines = _entries(stored), []
    for (name, nodes), own in digests.items():
        size = f"{name} on {counted(nodes, 'node')}"
        inputs, built = entries.get(own.facts, (NOT_RECORDED, NOT_RECORDED))
        if inputs not in (NOT_RECORDED, own.inputs):
            lines.append(f"{size} resolves to a different configuration than the verified one")
        elif NOT_RECORDED not in (built, own.built) and built != own.built:
            lines.append(f"{size} builds models that differ from the verified ones")
    return lines


def write_results(proof: Proof, recipes: Iterable[Recipe]) -> WriteResult:
    """Write the results of a proof of these recipes to the committed file, and keep the entries of other recipes.

    Raises:
        UserError: collections are in use, or the file contains other recipes that were verified with other versions.
    """
    recipes = list(recipes)
    refuse_to_write(recipes)
    old_proof = proof_level.read()
    if old_proof.get("versions") != proof.versions:
        old_proof = {}
    own_sizes = {facts(recipe, nodes) for recipe in recipes for nodes in recipe.nodes}
    old_entries = _entries(old_proof)
    new: dict[str, tuple[str, str]] = {}
    for digests in proof.digests.values():
        inputs, built = old_entries.get(digests.facts, ("", ""))
        if digests.built != NOT_RECORDED:
            new[digests.facts] = (digests.inputs, digests.built)
        elif inputs == digests.inputs:
            new[digests.facts] = (inputs, built)
    sizes = _group_by_recipe({key: entry for key, entry in old_entries.items() if key not in own_sizes} | new)
    names, models = {recipe.name for recipe in recipes}, {recipe.model.name for recipe in recipes}
    kept_reasons = {name: why for name, why in old_proof.get("unproven", {}).items() if name not in models}
    new_proof = {
        "versions": proof.versions,
        "unproven": kept_reasons | proof.unproven,
        "broken": _group_failures(old_proof, proof, names),
        "rehearsed": find_rehearsed(registry.recipes().values()),
        "sizes": sizes,
    }
    result_files.write(proof_level.PROOF_FILE, new_proof, levels=2)
    earlier_count = sum(built == NOT_RECORDED for _, built in new.values())
    return WriteResult(
        proof_level.PROOF_FILE,
        len(new) - earlier_count,
        earlier_count,
        len(old_entries.keys() & (own_sizes - new.keys())),
    )


def refuse_to_write(recipes: Iterable[Recipe]) -> None:
    """Raise UserError if `write_results` would refuse the results of these recipes; called before a long proof."""
    folders = collection.folders()
    if folders:
        raise UserError(
            f"--write does not support collections, but {folders[0]} is one", f"unset {collection.VARIABLE}"
        )
    old_proof = proof_level.read()
    other_recipes = registry.recipes().keys() - {recipe.name for recipe in recipes}
    if other_recipes and old_proof and old_proof.get("versions") != versions():
        raise UserError(
            f"{proof_level.PROOF_FILE.name} would lose other recipes, "
            f"which were verified with {old_proof.get('versions')}",
            "verify all recipes by building their models: `recipes prove --write`",
        )


def _group_by_recipe(entries: Mapping[str, tuple[str, str]]) -> dict[str, dict[int, str]]:
    """Return {recipe: {nodes: "facts inputs built"}} for all current recipes, from {facts: (inputs, built)}."""
    sizes: dict[str, dict[int, str]] = defaultdict(dict)
    for recipe in registry.recipes().values():
        for nodes in recipe.nodes:
            key = facts(recipe, nodes)
            if key in entries:
                sizes[recipe.name][nodes] = " ".join((key, *entries[key]))
    return dict(sorted(sizes.items()))


def _entries(saved_proof: Mapping[str, Any]) -> dict[str, tuple[str, str]]:
    """Return {facts of a size: (digest of its inputs, digest of what was built)} of the committed file's content."""
    return {digests.facts: (digests.inputs, digests.built) for digests in proof_level.list_digests(saved_proof)}


def _group_failures(saved_proof: Mapping[str, Any], proof: Proof, names: set[str]) -> list[dict[str, Any]]:
    """Group failures by reason: those of the proof's recipes (`names`), and those of other recipes in the file."""
    groups: dict[str, dict[str, list[int]]] = defaultdict(lambda: defaultdict(list))
    for group in saved_proof.get("broken", ()):
        for name, sizes in group["recipes"].items():
            if name not in names and name in registry.recipes():
                groups[group["why"]][name] += sizes
    for failure in (*proof.failures, *proof.known):
        if failure.recipe in names:
            groups[failure.why][failure.recipe].append(failure.nodes)
    return [{"why": why, "recipes": sizes} for why, sizes in groups.items()]


def find_rehearsed(recipes: Iterable[Recipe]) -> dict[str, list[int]]:
    """Return {recipe: numbers of nodes} that passed a rehearsal in the current topology, and failed none in any."""
    recipes_by_name = {recipe.name: recipe for recipe in recipes}
    results = json.loads(REHEARSALS.read_text()).values() if REHEARSALS.is_file() else ()
    passed: dict[str, dict[int, bool]] = defaultdict(dict)
    for result in results:
        recipe, nodes = recipes_by_name.get(result["recipe"]), result["nodes"]
        if recipe is None or nodes not in recipe.nodes:
            continue
        has_same_degrees = _parse_degrees(result.get("topology", "")) == _current_degrees(recipe, nodes)
        if has_same_degrees or not result["passed"]:
            passed[recipe.name][nodes] = passed[recipe.name].get(nodes, True) and result["passed"]
    sizes = {name: sorted(n for n, ok in by_nodes.items() if ok) for name, by_nodes in sorted(passed.items())}
    return {name: nodes for name, nodes in sizes.items() if nodes}


def _parse_degrees(topology: str) -> set[str]:
    """Return the degrees before folding: {"TP8", "SP", "DP4"} for `TP2 SP DP2, folded: TP 8 -> 2, DP 4 -> 2`."""
    short, _, folded = topology.partition(", ")
    degrees = dict(re.findall(r"([A-Z]+)(\d*)", short))
    degrees.update(re.findall(r"([A-Z]+) (\d+) -> ", folded))
    return {f"{name}{size}" for name, size in degrees.items()}


def _current_degrees(recipe: Recipe, nodes: int) -> set[str]:
    """Return the degrees of a recipe's layout, in the form of `_parse_degrees`."""
    layout = recipe.layout(nodes)
    dp = layout.dp(nodes * recipe.gpus_per_node)
    short = layout.short() if layout.model_parallel * layout.ep > 1 else ""
    return _parse_degrees(f"{short} DP{dp}" if dp > 1 else short)
