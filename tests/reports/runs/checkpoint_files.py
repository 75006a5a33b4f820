"""Checkpoint folders as Megatron and NeMo write them, made without either: the pickle names torch's classes."""

import io
import json
import pickle
import sys
import types
import zipfile
from pathlib import Path
from typing import Any
from unittest import mock

TORCH = "torch.distributed.checkpoint.metadata"


def pickled(
    tensors: dict[str, tuple[tuple[int, ...], list[tuple[int, ...]]]], files: dict[str, int], *, fsdp: bool = False
) -> bytes:
    """`.metadata` of tensors (shape, shapes of the chunks) and of files that need so many bytes.

    With `fsdp` the sizes of chunks are tuples, as Megatron-FSDP has them, and not torch's.
    """
    modules = {name: types.ModuleType(name) for name in ("torch", TORCH, "torch.distributed.checkpoint.filesystem")}

    def make(module: str, name: str, **state: Any) -> Any:
        known: Any = getattr(modules[module], name, None) or type(
            name, (), {"__module__": module, "__qualname__": name}
        )
        setattr(modules[module], name, known)
        made = known()
        made.__dict__.update(state)
        return made

    class Size:
        def __init__(self, given: tuple[int, ...]) -> None:
            self.shape = given

        def __reduce__(self) -> Any:
            return Size, (self.shape,)

    def bfloat16() -> None:
        """Torch's own is no class either."""

    for thing, module in ((Size, "torch"), (bfloat16, "torch")):
        thing.__module__, thing.__qualname__ = module, thing.__name__
        setattr(modules[module], thing.__name__, thing)
    held = {
        name: make(
            TORCH,
            "TensorStorageMetadata",
            properties=make(TORCH, "TensorProperties", dtype=bfloat16),
            size=Size(shape),
            chunks=[
                make(TORCH, "ChunkStorageMetadata", offsets=Size((0,)), sizes=size if fsdp else Size(size))
                for size in chunks
            ],
        )
        for name, (shape, chunks) in tensors.items()
    }
    places = {
        name: make(
            "torch.distributed.checkpoint.filesystem", "_StorageInfo", relative_path=name, offset=8, length=n - 8
        )
        for name, n in files.items()
    }
    whole = make(TORCH, "Metadata", state_dict_metadata=held, storage_data=places)
    with mock.patch.dict(sys.modules, modules):
        return pickle.dumps(whole)


def write(
    path: Path, *, files: int = 2, adapter: bool = False, optimizer: bool = True, step: int | None = None
) -> Path:
    """A complete checkpoint folder, saved with TP 2 by four ranks; its contents are those of a `step`, where given."""
    weights, context = path / "weights", path / "context"
    weights.mkdir(parents=True)
    context.mkdir()
    held = {f"__{rank}_0.distcp": bytes(8) + _archive(f"tensor {rank}" + _of(step)) for rank in range(files)}
    names = {name: len(data) for name, data in held.items()}
    tensors: dict[str, Any] = {"decoder.weight": ((4, 6), [(2, 6), (2, 6)])}
    if optimizer:
        tensors["optimizer.state.exp_avg.decoder.weight"] = ((24,), [(24,)])
    common = pickle.dumps({"global_step": step}) if step is not None else "common"
    (weights / "common.pt").write_bytes(_archive(common, "common/data.pkl"))  # in Megatron's order
    for name, data in held.items():
        (weights / name).write_bytes(data)
    (weights / ".metadata").write_bytes(pickled(tensors, names))
    (weights / "metadata.json").write_text('{"sharded_backend": "torch_dist"}')
    if adapter:
        base = path.with_name("base")
        (base / "weights").mkdir(parents=True)
        (weights / "adapter_metadata.json").write_text(json.dumps({"model_ckpt_path": str(base)}))
    (context / "io.json").write_text(
        json.dumps({"objects": {"a": _config("trainer.strategy"), "b": _config("trainer")}})
    )
    return path


def _of(step: int | None) -> str:
    return "" if step is None else f" of step {step:6d}"


def _archive(content: str | bytes, name: str = "data") -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr(name, content)
    return buffer.getvalue()


def _config(name: str) -> dict[str, Any]:
    values = {
        "trainer": {"devices": 2, "num_nodes": 2},
        "trainer.strategy": {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 1},
    }[name]
    items = [
        [f"Attr(name='{key}')", {"value": value, "paths": [f"<root>.{name}.{key}"]}] for key, value in values.items()
    ]
    return {"items": items}
