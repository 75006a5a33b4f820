"""Read hardware files with tables `[gpu.X]`, `[node.X]`, `[fabric.X]`, `[generation.X]` and `[calibration.GPU]`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, fields, replace
from functools import partial
from typing import Any

from superpod.common import collection
from superpod.errors import UserError, did_you_mean
from superpod.planner.calibration import corrections
from superpod.planner.formats.config_files import find_line, parse_toml
from superpod.planner.hardware.devices import Fabric, Gpu, Hardware, Kind, Node, pick
from superpod.planner.hardware.precisions import SCALED

NAMED_SECTIONS = ("generation", "gpu", "node", "fabric")
SECTIONS = (*NAMED_SECTIONS, "calibration")
TEXT = {
    **dict.fromkeys(("generation", "fitted_as", "source", "gpu", "calibrated_as", "cuda"), ()),
    "kind": ("infiniband", "ethernet"),
}
"""Key with a string value -> allowed values; () = any."""
LISTS: dict[str, tuple[str, ...]] = {"scaled_formats": SCALED, "aliases": ()}
"""Key with a list of strings -> allowed values; () = any."""
_TYPES = {field.name: field.type for kind in (Gpu, Node, Fabric) for field in fields(kind)}
FLAGS = tuple(name for name, kind in _TYPES.items() if kind == "bool")
INTEGERS = tuple(name for name, kind in _TYPES.items() if kind == "int")
ZERO_ALLOWED = (
    *("nvlink_gb_per_s", "tf32_tflops", "fp8_tflops", "nvfp4_tflops"),
    *("rails", "scalable_unit", "host_gb", "nics"),
)
OWN_KEYS = ("name", "source", "aliases")
"""Fields that `like` does not copy."""
Value = str | bool | float | tuple[str, ...]


@dataclass(frozen=True)
class Place:
    """The location of a table in a file, for messages."""

    file: str
    text: str
    section: str
    name: str = ""

    def at(self, key: str = "") -> str:
        """Return `file:line [section.name]` with the line of the key, or of the table if the key is absent."""
        keys = [key for key in (self.section, self.name, key) if key]
        table = f" [{self.section}.{self.name}]" if self.name else ""
        return f"{self.file}:{find_line(self.text, keys)}{table}"


def add(text: str, where: str, base: Hardware, *, new_names: bool = False) -> Hardware:
    """Return `base` with the tables of a hardware file added.

    Args:
        text: content of the file.
        where: name of the file, for messages.
        base: hardware that the tables extend.
        new_names: whether the names must not exist in `base`.

    Raises:
        UserError: the message has file, line, table, key and the valid values.
    """
    tables = parse_toml(text, where)
    if not any(tables.values()):
        example = '[node.mine], like = "h100", gpus = 4 (each on its own line)'
        raise UserError(f"{where} contains no tables", f"add one, such as {example}")
    for section in tables:
        if section not in SECTIONS:
            hint = did_you_mean(section, list(SECTIONS)) or f"sections: {', '.join(SECTIONS)}"
            raise UserError(f"{Place(where, text, section).at()}: there is no section {section!r}", hint)
    tables_by_section = {section: _tables(tables, Place(where, text, section)) for section in NAMED_SECTIONS}
    if new_names and where != str(collection.hardware_path()):
        _require_new_names(tables_by_section, base, where, text)
    hardware = replace(base, generations={**base.generations, **tables_by_section["generation"]})
    places = {section: partial(Place, where, text, section) for section in NAMED_SECTIONS}
    hardware = replace(
        hardware, gpus={**base.gpus, **_section(Gpu, tables_by_section["gpu"], places["gpu"], hardware.gpus, hardware)}
    )
    nodes = {**base.nodes, **_section(Node, tables_by_section["node"], places["node"], base.nodes, hardware)}
    for name in (
        n.lower() for n in tables_by_section["gpu"]
    ):  # a GPU with `like` gets a node like that of the other GPU
        like = base.nodes.get(corrections.decode(hardware.gpus[name].calibrated_as)[0])
        if name not in nodes and like is not None:
            nodes[name] = like.replace(name=name, gpu=hardware.gpus[name])
    fabrics = {
        **base.fabrics,
        **_section(Fabric, tables_by_section["fabric"], places["fabric"], base.fabrics, hardware),
    }
    hardware = replace(hardware, nodes=nodes, fabrics=fabrics)
    return _apply_calibrations(
        hardware, _tables(tables, Place(where, text, "calibration")), partial(Place, where, text, "calibration")
    )


def _apply_calibrations(
    hardware: Hardware, tables: dict[str, dict[str, Any]], place: Callable[[str], Place]
) -> Hardware:
    """Apply the `[calibration.GPU]` tables of `recipes calibrate` to GPUs and their nodes."""
    for name, table in tables.items():
        gpu = pick(hardware.gpus, hardware.gpu_name(name), "GPU", f"{place(name).at()}: ")
        base, _ = corrections.decode(gpu.calibrated_as or gpu.name)
        values = corrections.validate(table, place(name).at())
        gpu = gpu.replace(calibrated_as=corrections.encode(base, values))
        nodes = {
            key: node.replace(gpu=gpu) if node.gpu.name == gpu.name else node for key, node in hardware.nodes.items()
        }
        hardware = replace(hardware, gpus={**hardware.gpus, gpu.name: gpu}, nodes=nodes)
    return hardware


def _tables(tables: dict[str, Any], place: Place) -> dict[str, dict[str, Any]]:
    """Return name -> table in a section."""
    named_tables = tables.get(place.section, {})
    if not isinstance(named_tables, dict) or not all(isinstance(table, dict) for table in named_tables.values()):
        raise UserError(
            f"{place.at()}: {place.section} must contain tables", f"add a header such as [{place.section}.my_name]"
        )
    return named_tables


def _require_new_names(entries: Mapping[str, dict[str, Any]], base: Hardware, where: str, text: str) -> None:
    existing_names = {"generation": base.generations, "gpu": base.gpus, "node": base.nodes, "fabric": base.fabrics}
    for section, tables in entries.items():
        for name in tables:
            if name.lower() in existing_names[section] or (section == "gpu" and base.gpu_name(name) != name.lower()):
                hint = "choose a different name; to change a built-in entry for one command, use a --hardware file"
                raise UserError(f"{Place(where, text, section, name).at()}: {name} already exists", hint)


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
        values = {key: getattr(model, key) for key in keys if key not in OWN_KEYS} | values
        if isinstance(model, Gpu):
            values["calibrated_as"] = model.calibrated_as or model.name
            values["hbm_usable_gib"] = _usable_gib(model, table, place)
    shared = known.generations.get(str(table.get("generation")), {}) if kind is Gpu else {}
    for key, value in {**shared, **table}.items():  # the GPU's table overrides that of its generation
        if key == "like":
            continue
        if key not in keys:
            hint = did_you_mean(key, keys) or f"keys: {', '.join(keys)}"
            raise UserError(f"{place.at(key)}: there is no key {key!r}", hint)
        values[key] = _validate(key, value, place.at(key), known)
    for key in _required_fields(kind):
        if key not in values:
            raise UserError(f"{place.at()}: {key} is missing", 'set it, or copy a GPU or node: like = "h100"')
    if isinstance(values.get("gpu"), str):
        values["gpu"] = pick(known.gpus, known.gpu_name(values["gpu"]), "GPU", f"{place.at('gpu')}: gpu: ")
    if kind is Gpu and values["hbm_usable_gib"] > values["hbm_gb"]:
        raise UserError(
            f"{place.at('hbm_usable_gib')}: hbm_usable_gib {values['hbm_usable_gib']:g} exceeds hbm_gb "
            f"{values['hbm_gb']:g}",
            "set both: hbm_usable_gib as reported by nvidia-smi, hbm_gb from the data sheet",
        )
    return kind(**values)


def _usable_gib(like: Gpu, table: dict[str, Any], place: Place) -> float:
    """Return the usable memory of a GPU with `like`: the same share of `hbm_gb`, if the table changes that."""
    hbm_gb = _number("hbm_gb", table.get("hbm_gb", like.hbm_gb), place.at("hbm_gb"))
    return like.hbm_usable_gib * (hbm_gb / like.hbm_gb)


def _required_fields(kind: type[Kind]) -> list[str]:
    """Return the fields without a default."""
    return [f.name for f in fields(kind) if f.default is MISSING and f.default_factory is MISSING and f.name != "name"]


def _validate(key: str, value: object, where: str, known: Hardware) -> Value:
    """Return the value of a key in the type of its field. Raises UserError if it is invalid."""
    if key in TEXT:
        allowed = tuple(known.generations) if key in ("generation", "fitted_as") else TEXT[key]
        if not isinstance(value, str) or (allowed and value not in allowed):
            expected = f"one of {', '.join(allowed)}" if allowed else "a string"
            raise UserError(f"{where}: {key} must be {expected}, not {value!r}")
        return _validate_calibration(value, where) if key == "calibrated_as" else value
    if key in LISTS:
        allowed = LISTS[key]
        items = value if isinstance(value, (list, tuple)) else [None]
        if not all(isinstance(item, str) and (not allowed or item in allowed) for item in items):
            expected = f"values from {', '.join(allowed)}" if allowed else "strings"
            raise UserError(f"{where}: {key} must be a list of {expected}, not {value!r}")
        return tuple(str(item) for item in items)
    if key in FLAGS:
        if not isinstance(value, bool):
            raise UserError(f"{where}: {key} must be true or false, not {value!r}")
        return value
    return _number(key, value, where)


def _number(key: str, value: object, where: str) -> float:
    is_integer = key in INTEGERS
    if isinstance(value, bool) or not isinstance(value, int if is_integer else (int, float)):
        raise UserError(f"{where}: {key} must be {'an integer' if is_integer else 'a number'}, not {value!r}")
    too_small = value < 0 if key in ZERO_ALLOWED else value < (1 if is_integer else 1e-9)
    if too_small or not value < 1e9:
        expected = "at least 0" if key in ZERO_ALLOWED else "greater than 0"
        raise UserError(f"{where}: {key} must be {expected} and finite, not {value}")
    return value if is_integer else float(value)


def _validate_calibration(text: str, where: str) -> str:
    """Check and return a value of `calibrated_as`: a GPU, optionally with corrections after a question mark."""
    try:
        _, values = corrections.decode(text)
    except ValueError:
        raise UserError(
            f"{where}: calibrated_as {text!r} is invalid", "use the form h100 or h100?general=1.2&launches=3"
        ) from None
    corrections.validate(values, f"{where}: calibrated_as")
    return text
