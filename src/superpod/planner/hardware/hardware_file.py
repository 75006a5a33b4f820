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

SECTIONS = ("generation", "gpu", "node", "fabric", "calibration")
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
Tables = dict[str, dict[str, Any]]
"""Name -> TOML table."""


@dataclass(frozen=True)
class TableLocation:
    """The file, section and name of a table, for messages."""

    file: str
    text: str
    section: str
    name: str = ""

    def at(self, key: str = "") -> str:
        """Return `file:line [section.name]` with the line of a key, or of the table if the key is absent."""
        keys = [key for key in (self.section, self.name, key) if key]
        table = f" [{self.section}.{self.name}]" if self.name else ""
        return f"{self.file}:{find_line(self.text, keys)}{table}"


def add(text: str, where: str, base: Hardware, *, new_names: bool = False) -> Hardware:
    """Return `base` with the tables of a hardware file added.

    Args:
        text: content of the file.
        where: name of the file, for messages.
        base: hardware that the tables extend.
        new_names: require that the names in the file do not exist in `base`.

    Raises:
        UserError: the file is invalid; the message has file, line, table and key, and what is valid.
    """
    tables = parse_toml(text, where)
    if not any(tables.values()):
        example = '[node.mine], like = "h100", gpus = 4 (each on its own line)'
        raise UserError(f"{where} contains no tables", f"add one, such as {example}")
    for section in tables:
        if section not in SECTIONS:
            hint = did_you_mean(section, list(SECTIONS)) or f"sections: {', '.join(SECTIONS)}"
            raise UserError(f"{TableLocation(where, text, section).at()}: there is no section {section!r}", hint)
    places = {section: partial(TableLocation, where, text, section) for section in SECTIONS}
    sections = {section: _tables(tables, places[section]()) for section in SECTIONS}
    if new_names and where != str(collection.hardware_path()):
        _require_new_names(sections, base, places)
    hardware = replace(base, generations={**base.generations, **sections["generation"]})
    gpus = _build_all(Gpu, sections["gpu"], places["gpu"], base.gpus, hardware)
    hardware = replace(hardware, gpus={**base.gpus, **gpus})
    nodes = {**base.nodes, **_build_all(Node, sections["node"], places["node"], base.nodes, hardware)}
    for name, gpu in gpus.items():
        # A GPU defined by `like` gets a node like that of the other GPU.
        like = base.nodes.get(corrections.decode(gpu.calibrated_as)[0])
        if name not in nodes and like is not None:
            nodes[name] = like.replace(name=name, gpu=gpu)
    fabrics = {**base.fabrics, **_build_all(Fabric, sections["fabric"], places["fabric"], base.fabrics, hardware)}
    hardware = replace(hardware, nodes=nodes, fabrics=fabrics)
    return _apply_calibrations(hardware, sections["calibration"], places["calibration"])


def _apply_calibrations(hardware: Hardware, tables: Tables, place: Callable[[str], TableLocation]) -> Hardware:
    """Apply the `[calibration.GPU]` tables of `recipes calibrate` to GPUs and their nodes."""
    for name, table in tables.items():
        gpu = pick(hardware.gpus, hardware.gpu_name(name), "GPU", f"{place(name).at()}: ")
        base, _ = corrections.decode(gpu.calibrated_as or gpu.name)
        values = corrections.validate(table, place(name).at())
        gpu = gpu.replace(calibrated_as=corrections.encode(base, values))
        nodes = {key: node.replace(gpu=gpu) for key, node in hardware.nodes.items() if node.gpu.name == gpu.name}
        hardware = replace(hardware, gpus={**hardware.gpus, gpu.name: gpu}, nodes={**hardware.nodes, **nodes})
    return hardware


def _tables(tables: dict[str, Any], place: TableLocation) -> Tables:
    """Return the tables of the section `place`. Raises UserError if it contains other values."""
    named_tables = tables.get(place.section, {})
    if not isinstance(named_tables, dict) or not all(isinstance(table, dict) for table in named_tables.values()):
        raise UserError(
            f"{place.at()}: {place.section} must contain tables", f"add a header such as [{place.section}.my_name]"
        )
    return named_tables


def _require_new_names(
    sections: Mapping[str, Tables], base: Hardware, places: Mapping[str, Callable[[str], TableLocation]]
) -> None:
    """Raise UserError if a table has the name of an entry of `base`, or the alias of a GPU."""
    existing_names = {"generation": base.generations, "gpu": base.gpus, "node": base.nodes, "fabric": base.fabrics}
    for section, existing in existing_names.items():
        for name in sections[section]:
            if name.lower() in existing or (section == "gpu" and base.gpu_name(name) != name.lower()):
                hint = "choose a different name; to change a built-in entry for one command, use a --hardware file"
                raise UserError(f"{places[section](name).at()}: {name} already exists", hint)


def _build_all(
    kind: type[Kind],
    tables: Tables,
    place: Callable[[str], TableLocation],
    base: Mapping[str, Kind],
    known: Hardware,
) -> dict[str, Kind]:
    """Return name -> entry for the tables of a section; see `_build`."""
    return {name.lower(): _build(kind, table, place(name), base, known) for name, table in tables.items()}


def _build(
    kind: type[Kind], table: dict[str, Any], place: TableLocation, base: Mapping[str, Kind], known: Hardware
) -> Kind:
    """Create a GPU, node or fabric from a table.

    Args:
        kind: the class.
        table: its TOML table.
        place: location of the table, for messages.
        base: the entries that `like` can copy.
        known: the hardware to which generations and GPU names refer.

    Raises:
        UserError: a key or value is invalid, or a required key is missing.
    """
    values: dict[str, Any] = {"name": place.name.lower()}
    keys = [f.name for f in fields(kind) if f.name != "name"]
    if (like := table.get("like")) is not None:
        model = pick(base, known.gpu_name(like), kind.__name__.lower(), f"{place.at('like')}: like: ")
        values = {key: getattr(model, key) for key in keys if key not in OWN_KEYS} | values
        if isinstance(model, Gpu):
            values["calibrated_as"] = model.calibrated_as or model.name
            # The usable share of the memory stays the same if the table changes hbm_gb.
            hbm_gb = _validate_number("hbm_gb", table.get("hbm_gb", model.hbm_gb), place.at("hbm_gb"))
            values["hbm_usable_gib"] = model.hbm_usable_gib * (hbm_gb / model.hbm_gb)
    shared = known.generations.get(str(table.get("generation")), {}) if kind is Gpu else {}
    for key, value in {**shared, **table}.items():  # the GPU's table overrides that of its generation
        if key == "like":
            continue
        if key not in keys:
            hint = did_you_mean(key, keys) or f"keys: {', '.join(keys)}"
            raise UserError(f"{place.at(key)}: there is no key {key!r}", hint)
        values[key] = _validate(key, value, place.at(key), known)
    for f in fields(kind):
        if f.name not in values and f.default is MISSING and f.default_factory is MISSING:
            raise UserError(f"{place.at()}: {f.name} is missing", 'set it, or copy a GPU or node: like = "h100"')
    if isinstance(values.get("gpu"), str):
        values["gpu"] = pick(known.gpus, known.gpu_name(values["gpu"]), "GPU", f"{place.at('gpu')}: gpu: ")
    if kind is Gpu and values["hbm_usable_gib"] > values["hbm_gb"]:
        raise UserError(
            f"{place.at('hbm_usable_gib')}: hbm_usable_gib {values['hbm_usable_gib']:g} exceeds hbm_gb "
            f"{values['hbm_gb']:g}",
            "set both: hbm_usable_gib as reported by nvidia-smi, hbm_gb from the data sheet",
        )
    return kind(**values)


def _validate(key: str, value: object, where: str, known: Hardware) -> Value:
    """Return a value in the type of its field. Raises UserError if it is invalid; the message begins with `where`."""
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
    return _validate_number(key, value, where)


def _validate_number(key: str, value: object, where: str) -> float:
    """Return a number in the type of its field. Raises UserError if its type or size is invalid."""
    is_integer = key in INTEGERS
    if isinstance(value, bool) or not isinstance(value, int if is_integer else (int, float)):
        raise UserError(f"{where}: {key} must be {'an integer' if is_integer else 'a number'}, not {value!r}")
    too_small = value < 0 if key in ZERO_ALLOWED else value < (1 if is_integer else 1e-9)
    if too_small or not value < 1e9:
        expected = "at least 0" if key in ZERO_ALLOWED else "greater than 0"
        raise UserError(f"{where}: {key} must be {expected} and finite, not {value}")
    return value if is_integer else float(value)


def _validate_calibration(text: str, where: str) -> str:
    """Return a value of `calibrated_as`. Raises UserError unless it is a GPU, optionally with `?corrections`."""
    try:
        _, values = corrections.decode(text)
    except ValueError:
        raise UserError(
            f"{where}: calibrated_as {text!r} is invalid", "use the form h100 or h100?general=1.2&launches=3"
        ) from None
    corrections.validate(values, f"{where}: calibrated_as")
    return text
