"""Makes Transformer Engine available in this process: import this module before NeMo, in a separate process.

Do not combine it with `superpod.rehearsal.entry`, whose patches replace Transformer Engine's layers with local ones.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import importlib.metadata
import os
import sys
import types

from superpod.rehearsal.te import cuda, device, package_stubs, source, variables
from superpod.rehearsal.te.compiled import extension

_DISTRIBUTIONS = {
    "transformer_engine": source.VERSION,
    "transformer_engine_torch": source.VERSION,
    "transformer_engine_cu12": source.VERSION,
    "flash_attn": device.FLASH_ATTENTION,
}
"""Versions that importlib.metadata reports for packages in NVIDIA's images that are not installed."""
_state = {"installed": False}


def is_installed() -> bool:
    """Return whether Transformer Engine's layers are available in this process."""
    return _state["installed"]


def install() -> None:
    """Import Transformer Engine with a substitute for its compiled part, once per process.

    Raises:
        RuntimeError: NeMo, Megatron or the patches of a rehearsal have already been imported.
        UserError: Transformer Engine's Python package is not installed.
    """
    if is_installed():
        return
    folder = source.find_folder()
    early_imports = [name for name in ("nemo", "megatron.core", "superpod.rehearsal.entry") if name in sys.modules]
    if early_imports:
        raise RuntimeError(
            f"{early_imports[0]} was imported before Transformer Engine: import superpod.rehearsal.te.import_te first"
        )
    os.environ["TORCHDYNAMO_DISABLE"] = "1"  # otherwise, Megatron's fused functions would be compiled at the first call
    sys.path.append(str(folder))
    _patch_versions()
    import torch._dynamo  # noqa: F401 - before the stub of triton, which torch would mistake for the compiler

    package_stubs.install()
    sys.modules[extension.NAME] = extension.Extension()
    cuda.install()
    with variables.unset_run_variables(), device.generation("sm90"), package_stubs.install_during_import():
        _import_common(str(folder))
        importlib.import_module("transformer_engine.pytorch")
    cuda.patch_transformer_engine()
    _state["installed"] = True


def _patch_versions() -> None:
    """Make importlib.metadata report the versions of `_DISTRIBUTIONS` for packages that are not installed."""
    real_version = importlib.metadata.version

    def version(name: str) -> str:
        return _DISTRIBUTIONS.get(name.replace("-", "_")) or real_version(name)

    importlib.metadata.version = version


def _import_common(folder: str) -> None:
    """Create the modules transformer_engine and transformer_engine.common without loading shared libraries."""
    common = types.ModuleType("transformer_engine.common")
    common.__path__ = [f"{folder}/transformer_engine/common"]
    common.__file__ = f"{folder}/transformer_engine/common/__init__.py"
    os.environ["NVTE_PROJECT_BUILDING"] = "1"  # TE's own switch to load no library in common/__init__.py
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
    # NeMo reads transformer_engine.pytorch as an attribute, which the import of the real package sets.


install()
