"""Mamba 2, its hybrids (Nemotron-H, Nemotron Nano 2) and Hyena: pretraining and full fine-tuning, as in NeMo.

Learning rates and warm-up are NeMo 2.7.3's. Steps: 3 trillion tokens (Mamba 2, arXiv:2406.07887), 15 and 20 trillion
(Nemotron-H, arXiv:2504.03624), at the recipe's global batch; Hyena's are forty times NeMo's warm-up.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from superpod.collection.registry import model, nemo

if TYPE_CHECKING:
    import nemo_run as run

NO_GPU = "Megatron-Core builds Mamba layers with Transformer Engine and mamba-ssm, which are CUDA packages"
MAMBA = {"seq": 4096, "lr": 3e-4, "min_lr": 3e-5, "warmup_steps": 2000, "max_steps": 715_256, "unproven": NO_GPU}
NOT_NEMOTRON = "its importer for Hugging Face folders supports only Nemotron-H (gpt/model/ssm.py:605)"
WEIGHT_FILE = (
    "import its weight file: llm.import_ckpt(MODEL, 'pytorch:///PATH/pytorch_model.bin', output_path=...), and set "
    "resume.restore_config.path to the result"
)
PYTORCH = {"not_imported": NOT_NEMOTRON, "import_instead": WEIGHT_FILE}
HYBRID = MAMBA | {"seq": 8192, "max_steps": 2_384_186}
HYENA = MAMBA | {"seq": 8192, "max_steps": 100_000, "unproven": "NeMo's Hyena layers need Transformer Engine"}


@model(**MAMBA, **PYTORCH, hf="state-spaces/mamba2-130m")
def mamba2_130m() -> run.Config:
    """Mamba 2 130M: state-space layers only."""
    return nemo("MambaModel", "BaseMambaConfig130M")


@model(**MAMBA, **PYTORCH, hf="state-spaces/mamba2-370m")
def mamba2_370m() -> run.Config:
    """Mamba 2 370M: state-space layers only."""
    return nemo("MambaModel", "BaseMambaConfig370M")


@model(**MAMBA, **PYTORCH, hf="state-spaces/mamba2-780m")
def mamba2_780m() -> run.Config:
    """Mamba 2 780M: state-space layers only."""
    return nemo("MambaModel", "BaseMambaConfig780M")


@model(**MAMBA, **PYTORCH, hf="state-spaces/mamba2-1.3b")
def mamba2_1_3b() -> run.Config:
    """Mamba 2 1.3B: state-space layers only."""
    return nemo("MambaModel", "BaseMambaConfig1_3B")


@model(**MAMBA, **PYTORCH, hf="state-spaces/mamba2-2.7b")
def mamba2_2_7b() -> run.Config:
    """Mamba 2 2.7B: state-space layers only."""
    return nemo("MambaModel", "BaseMambaConfig2_7B")


@model(**MAMBA, **PYTORCH, hf="nvidia/mamba2-8b-3t-4k")
def mamba2_8b() -> run.Config:
    """Mamba 2 8B: state-space layers only."""
    return nemo("MambaModel", "NVIDIAMambaConfig8B")


@model(**MAMBA, **PYTORCH, hf="nvidia/mamba2-hybrid-8b-3t-4k")
def mamba2_hybrid_8b() -> run.Config:
    """Mamba 2 hybrid 8B: state-space, attention and MLP layers."""
    return nemo("MambaModel", "NVIDIAMambaHybridConfig8B")


@model(**HYBRID, hf="nvidia/Nemotron-H-4B-Base-8K")
def nemotronh_4b() -> run.Config:
    """Nemotron-H 4B: Mamba 2, attention and MLP layers."""
    return nemo("MambaModel", "NemotronHConfig4B")


@model(**HYBRID, hf="nvidia/Nemotron-H-8B-Base-8K")
def nemotronh_8b() -> run.Config:
    """Nemotron-H 8B: Mamba 2, attention and MLP layers."""
    return nemo("MambaModel", "NemotronHConfig8B")


@model(**HYBRID, hf="nvidia/Nemotron-H-47B-Base-8K")
def nemotronh_47b() -> run.Config:
    """Nemotron-H 47B: Mamba 2, attention and MLP layers."""
    return nemo("MambaModel", "NemotronHConfig47B")


@model(**HYBRID, hf="nvidia/Nemotron-H-56B-Base-8K")
def nemotronh_56b() -> run.Config:
    """Nemotron-H 56B: Mamba 2, attention and MLP layers."""
    return nemo("MambaModel", "NemotronHConfig56B")


@model(**HYBRID, hf="nvidia/NVIDIA-Nemotron-Nano-9B-v2")
def nemotron_nano_9b_v2() -> run.Config:
    """Nemotron Nano 9B v2: Mamba 2, attention and MLP layers."""
    return nemo("MambaModel", "NemotronNano9Bv2")


@model(**HYBRID, hf="nvidia/NVIDIA-Nemotron-Nano-12B-v2-Base")
def nemotron_nano_12b_v2() -> run.Config:
    """Nemotron Nano 12B v2: Mamba 2, attention and MLP layers."""
    return nemo("MambaModel", "NemotronNano12Bv2")


@model(**HYENA)
def hyena_1b() -> run.Config:
    """Hyena 1B: Evo 2's convolutions, a few attention layers, byte tokens."""
    return nemo("HyenaModel", "Hyena1bConfig")


@model(**HYENA)
def hyena_7b() -> run.Config:
    """Hyena 7B: Evo 2's convolutions, a few attention layers, byte tokens."""
    return nemo("HyenaModel", "Hyena7bConfig")


@model(**HYENA)
def hyena_40b() -> run.Config:
    """Hyena 40B: Evo 2's convolutions, a few attention layers, byte tokens."""
    return nemo("HyenaModel", "Hyena40bConfig")
