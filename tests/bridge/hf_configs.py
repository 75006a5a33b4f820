"""Write config.json files in the format of Hugging Face, from NeMo's configurations. Needs NeMo and transformers."""

from pathlib import Path

from superpod.collection import registry
from superpod.weights.families import export_config

NEEDS_A_GPU = ("apply_rope_fusion", "moe_permute_fusion")
"""Fields that NeMo's configurations refuse without Transformer Engine. They do not change the model."""


def write_hf_config(model: str, folder: Path) -> None:
    """Write config.json of a model, for example `llama3_8b`, into a new folder."""
    import fiddle as fdl

    declared = registry.models()[model]
    config = declared.make()
    for name in NEEDS_A_GPU:
        setattr(config.config, name, False)
    built = fdl.build(config)
    built.config.vocab_size = built.config.vocab_size or declared.vocab_size
    folder.mkdir(parents=True)
    text = export_config.build_hf_config(built, None).to_json_string(use_diff=False)
    (folder / "config.json").write_text(text)
