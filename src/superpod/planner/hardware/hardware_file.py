"""Hardware files: `[gpu.NAME]`, `[node.NAME]`, `[fabric.NAME]`, `[generation.NAME]` and `[calibration.GPU]` tables."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, fields, replace
from functools import partial
from typing import Any

from superpod.common import collection
from superpod.errors import UserError, did_you_mean
from superpod.planner.calibration import corrections
from superpod.planner.formats.files import find_line, parse_toml
from superpod.planner.hardware.devices import Fabric, Gpu, Hardware, Kind, Node, pick
from superpod.planner.hardware.precisions import SCALED

NAMED = ("generation", "gpu", "node", "fabric")
SECTIONS = (*NAMED, "calibration")
TEXT = {"generation": (), "kind": ("infiniband", "ethernet"), "source": (), "gpu": (), "calibrated_as": (), "cuda": ()}
"""Keys that hold words, and which ones; () = any."""
WORDS: dict[str, tuple[str, ...]] = {"scaled_formats": SCALED, "aliases": ()}
"""Keys that hold lists of words, and which ones; () = any."""
_TYPES = {field.name: field.type for kind in (Gpu, Node, Fabric) for field in fields(kind)}
FLAGS = tuple(name for name, kind in _TYPES.items() if kind == "bool")
WHOLE = tuple(name for name, kind in _TYPES.items() if kind == "int")
"""Keys that hold true or false, and whole numbers: by the type of their field, so that a new one stands once."""
NONE = ("nvlink_gb_per_s", "tf32_tflops", "fp8_tflops", "nvfp4_tflops", "rails", "scalable_unit", "host_gb", "nics")
"""Keys that may be 0: the hardware has none."""
OWN = ("name", "source", "aliases")
"""Fields that `like` does not take over."""
Value = str | bool | float | tuple[str, ...]


@dataclass(frozen=True)
class Place:
    """A table in a file, for messages."""

    file: str
    text: str
    section: str
    name: str = ""

    def at(self, key: str = "") -> str:
        """`file:line [section.name]`: the line of the key, or of the table where there is none."""
        keys = [key for key in (self.section, self.name, key) if key]
        table = f" [{self.section}.{self.name}]" if self.name else ""
        return f"{self.file}:{find_line(self.text, keys)}{table}"


def add(text: str, where: str, base: Hardware, *, new_names: bool = False) -> Hardware:
    """`base` with what a hardware file's text gives; `where` is the file, for messages.

    Args:
        new_names: refuse a GPU, node, fabric or generation that `base` has already.

    Raises:
        UserError: naming file, line, table and key, and what the key may hold.
    """
    tables = parse_toml(text, where)
    if not any(tables.values()):
        example = '[node.mine], like = "h100", gpus = 4 (each on a line of its own)'
        raise UserError(f"{where} holds no table: it changes nothing", f"write one, such as {example}")
    for section in tables:
        if section not in SECTIONS:
            hint = did_you_mean(section, list(SECTIONS)) or f"sections: {', '.join(SECTIONS)}"
            raise UserError(f"{Place(where, text, section).at()}: no section is called {section!r}", hint)
    named = {section: _tables(tables, Place(where, text, section)) for section in NAMED}
    if new_names and where != str(collection.own_hardware()):
        _all_new(named, base, where, text)
    known = replace(base, generations={**base.generations, **named["generation"]})
    places = {section: partial(Place, where, text, section) for section in NAMED}
    known = replace(known, gpus={**base.gpus, **_section(Gpu, named["gpu"], places["gpu"], known.gpus, known)})
    nodes = {**base.nodes, **_section(Node, named["node"], places["node"], base.nodes, known)}
    for name in (n.lower() for n in named["gpu"]):  # a GPU like another has a node like that one's
        like = base.nodes.get(corrections.decode(known.gpus[name].calibrated_as)[0])
        if name not in nodes and like is not None:
            nodes[name] = like.replace(name=name, gpu=known.gpus[name])
    fabrics = {**base.fabrics, **_section(Fabric, named["fabric"], places["fabric"], base.fabrics, known)}
    known = replace(known, nodes=nodes, fabrics=fabrics)
    return _calibrated(
        known, _tables(tables, Place(where, text, "calibration")), partial(Place, where, text, "calibration")
    )


def _calibrated(known: Hardware, tables: dict[str, dict[str, Any]], place: Callable[[str], Place]) -> Hardware:
    """The hardware with `[calibration.GPU]` tables, of `recipes calibrate`, in its GPUs and in nodes that have them."""
    for name, table in tables.items():
        gpu = pick(known.gpus, known.gpu_name(name), "GPU", f"{place(name).at()}: ")
        base, _ = corrections.decode(gpu.calibrated_as or gpu.name)
        values = corrections.validate(table, place(name).at())
        gpu = gpu.replace(calibrated_as=corrections.encode(base, values))
        nodes = {key: node.replace(gpu=gpu) if node.gpu.name == gpu.name else node for key, node in known.nodes.items()}
        known = replace(known, gpus={**known.gpus, gpu.name: gpu}, nodes=nodes)
    return known


def _tables(tables: dict[str, Any], place: Place) -> dict[str, dict[str, Any]]:
    """The tables of a section, by name."""
    named = tables.get(place.section, {})
    if not isinstance(named, dict) or not all(isinstance(table, dict) for table in named.values()):
        raise UserError(
            f"{place.at()}: {place.section} holds tables", f"write [{place.section}.my_name] above its keys"
        )
    return named


def _all_new(named: Mapping[str, dict[str, Any]], base: Hardware, where: str, text: str) -> None:
    taken = {"generation": base.generations, "gpu": base.gpus, "node": base.nodes, "fabric": base.fabrics}
    for section, tables in named.items():
        for name in tables:
            if name.lower() in taken[section] or (section == "gpu" and base.gpu_name(name) != name.lower()):
                hint = "choose another name; to change a built-in one for a command, put it in a file for --hardware"
                raise UserError(f"{Place(where, text, section, name).at()}: {name} is taken", hint)


def _section(
    kind: type[Kind],
    tables: Mapping[str, dict[str, Any]],
    place: Callable[[str], Place],
    base: Mapping[str, Kind],
    known: Hardware,
) -> dict[str, Kind]:
    return {name.lower(): _build(kind, table, place(name), base, known) for name, table in tables.items()}


def _build(kind: type[Kind], table: dict[str, Any], place: Place, base: Mapping[str, Kind], known: Hardware) -> Kind:
    values: dict[str, Any] = {"name": place.name.lower()}
    keys = [f.name for f in fields(kind) if f.name != "name"]
    if (like := table.get("like")) is not None:
        model = pick(base, known.gpu_name(like), kind.__name__.lower(), f"{place.at('like')}: like: ")
        values = {key: getattr(model, key) for key in keys if key not in OWN} | values
        if isinstance(model, Gpu):
            values["calibrated_as"] = model.calibrated_as or model.name
    shared = known.generations.get(str(table.get("generation")), {}) if kind is Gpu else {}
    for key, value in {**shared, **table}.items():  # the GPU's own table wins over its generation's
        if key == "like":
            continue
        if key not in keys:
            hint = did_you_mean(key, keys) or f"keys: {', '.join(keys)}"
            raise UserError(f"{place.at(key)}: no key is called {key!r}", hint)
        values[key] = _checked(key, value, place.at(key), known)
    for key in _required(kind):
        if key not in values:
            raise UserError(f"{place.at()}: {key} is missing", 'give it, or take it over: like = "h100"')
    if isinstance(values.get("gpu"), str):
        values["gpu"] = pick(known.gpus, known.gpu_name(values["gpu"]), "GPU", f"{place.at('gpu')}: gpu: ")
    if kind is Gpu and values["hbm_usable_gib"] > values["hbm_gb"]:
        raise UserError(
            f"{place.at('hbm_usable_gib')}: {values['hbm_usable_gib']:g} GiB can be used of {values['hbm_gb']:g}",
            "give both: hbm_usable_gib is what nvidia-smi names, hbm_gb what the data sheet does",
        )
    return kind(**values)


def _required(kind: type[Kind]) -> list[str]:
    """Fields without a default."""
    return [f.name for f in fields(kind) if f.default is MISSING and f.default_factory is MISSING and f.name != "name"]


def _checked(key: str, value: object, where: str, known: Hardware) -> Value:
    """The value of a key, of the type that the key holds; raises UserError where it is another."""
    if key in TEXT:
        allowed = tuple(known.generations) if key == "generation" else TEXT[key]
        if not isinstance(value, str) or (allowed and value not in allowed):
            raise UserError(f"{where}: {key} is {value!r}", _one_of(allowed) or "it is a string")
        return _calibrated_as(value, where) if key == "calibrated_as" else value
    if key in WORDS:
        words = value if isinstance(value, (list, tuple)) else [None]
        if not all(isinstance(word, str) and (not WORDS[key] or word in WORDS[key]) for word in words):
            raise UserError(f"{where}: {key} is {value!r}", f"it is a list of {', '.join(WORDS[key]) or 'strings'}")
        return tuple(str(word) for word in words)
    if key in FLAGS:
        if not isinstance(value, bool):
            raise UserError(f"{where}: {key} takes true or false, not {value!r}")
        return value
    whole = key in WHOLE
    if isinstance(value, bool) or not isinstance(value, int if whole else (int, float)):
        raise UserError(f"{where}: {key} takes a {'whole ' * whole}number, not {value!r}")
    least = 0 if key in NONE else 1 if whole else 1e-9
    if not least <= value < 1e9:
        raise UserError(f"{where}: {key} is {value}; it is {'0 or more' if least == 0 else 'more than 0'}, and finite")
    return value if whole else float(value)


def _calibrated_as(text: str, where: str) -> str:
    """The text as it is: a GPU, and after a ? the corrections that a `[calibration.GPU]` table may have."""
    try:
        _, values = corrections.decode(text)
    except ValueError:
        raise UserError(f"{where}: calibrated_as is {text!r}", "write h100, or h100?general=1.2&launches=3") from None
    corrections.validate(values, f"{where}: calibrated_as")
    return text


def _one_of(allowed: tuple[str, ...]) -> str:
    return f"it is one of {', '.join(allowed)}" if allowed else ""
