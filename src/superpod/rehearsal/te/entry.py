"""Makes this process one with Transformer Engine: import it before NeMo, in a process of its own.

Never together with `superpod.rehearsal.entry`, whose patches put local layers in place of Transformer Engine's.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import importlib.metadata
import os
import sys
import types

from superpod.rehearsal.te import absent, cuda, device, extension, source, variables

_DISTRIBUTIONS = {
    "transformer_engine": source.VERSION,
    "transformer_engine_torch": source.VERSION,
    "transformer_engine_cu12": source.VERSION,
    "flash_attn": device.FLASH_ATTENTION,
}
"""What importlib.metadata answers for packages of NVIDIA's images that are not here."""
_state = {"installed": False}


def installed() -> bool:
    """Whether this process has Transformer Engine's layers."""
    return _state["installed"]


def install() -> None:
    """Import Transformer Engine over the stand-in for its compiled part; once.

    Raises:
        RuntimeError: NeMo or Megatron has been imported before, or a rehearsal's patches are in this process.
        UserError: Transformer Engine's Python is not installed.
    """
    if installed():
        return
    folder = source.folder()
    if early := [name for name in ("nemo", "megatron.core", "superpod.rehearsal.entry") if name in sys.modules]:
        raise RuntimeError(f"{early[0]} was imported before Transformer Engine: begin with superpod.rehearsal.te.entry")
    os.environ["TORCHDYNAMO_DISABLE"] = "1"  # Megatron's fused functions are compiled at their first call
    sys.path.append(str(folder))
    _tell_versions()
    import torch._dynamo  # noqa: F401 - before triton's stand-in, which torch would take for a compiler

    absent.install()
    sys.modules[extension.NAME] = extension.Extension()
    cuda.install()
    with variables.left_out(), device.generation("sm90"), absent.during_import():
        _import_common(str(folder))
        importlib.import_module("transformer_engine.pytorch")
    cuda.transformer_engine_on_meta()
    _state["installed"] = True


def _tell_versions() -> None:
    """Answer for the packages of the compiled part, which are not installed."""
    real = importlib.metadata.version

    def version(name: str) -> str:
        return _DISTRIBUTIONS.get(name.replace("-", "_")) or real(name)

    importlib.metadata.version = version


def _import_common(folder: str) -> None:
    """Transformer Engine's two top packages, without the lines that load shared libraries."""
    common = types.ModuleType("transformer_engine.common")
    common.__path__ = [f"{folder}/transformer_engine/common"]
    common.__file__ = f"{folder}/transformer_engine/common/__init__.py"
    os.environ["NVTE_PROJECT_BUILDING"] = "1"  # TE's own switch: common/__init__.py then loads no library
    try:
        with open(common.__file__) as code:
            exec(compile(code.read(), common.__file__, "exec"), common.__dict__)
    finally:
        del os.environ["NVTE_PROJECT_BUILDING"]
    setattr(common, "load_framework_extension", lambda _framework: None)  # noqa: B010
    package = types.ModuleType("transformer_engine")
    package.__path__ = [f"{folder}/transformer_engine"]
    package.__file__ = f"{folder}/transformer_engine/__init__.py"
    package.__spec__ = importlib.machinery.ModuleSpec("transformer_engine", None, is_package=True)
    setattr(package, "__version__", source.VERSION)  # noqa: B010
    setattr(package, "common", common)  # noqa: B010
    sys.modules |= {"transformer_engine": package, "transformer_engine.common": common}
    # NeMo reads transformer_engine.pytorch as an attribute, as the real package's import makes it one.


install()
