"""The configuration made for a model that came from no Hugging Face folder says what NeMo's own recipes compute."""

import pytest

from superpod.collection.registry import recipes

pytestmark = [pytest.mark.nemo, pytest.mark.long, pytest.mark.filterwarnings("ignore")]

FAMILIES = ("llama2", "llama3", "llama31_8b", "llama31_70b", "llama31_405b", "llama32", "nemotron3", "nemotron4")
FAMILIES += ("qwen", "mistral", "mixtral", "deepseek_v2_lite", "deepseek_v3", "gemma", "gpt_oss", "starcoder2", "phi3")
MODELS = {
    recipe.model.name: recipe
    for name, recipe in recipes().items()
    if name.endswith("pretrain_h100_bf16") and recipe.model.name.startswith(FAMILIES) and "nemotron_" not in name
}


@pytest.fixture
def without_gpu_settings(monkeypatch):
    """Megatron's configurations without the fusions of Transformer Engine, as conversions on a CPU make them."""
    from megatron.core.transformer.transformer_config import TransformerConfig

    from superpod.rehearsal.patches.gpu_settings import switch_off_gpu_only

    original = TransformerConfig.__post_init__

    def post_init(self):
        switch_off_gpu_only(self)
        original(self)

    monkeypatch.setattr(TransformerConfig, "__post_init__", post_init)


@pytest.mark.parametrize("name", MODELS)
def test_the_configuration_reads_back_as_the_recipe(name, without_gpu_settings):
    import fiddle as fdl
    import torch

    from superpod.nemo2.build import partial
    from superpod.weights.families import export_config, nemo_config
    from superpod.weights.families.nemo_class import find_nemo_class

    built = partial.build(MODELS[name]).model
    model = fdl.get_callable(built)(fdl.build(built.config))
    model.config.vocab_size = model.config.vocab_size or 32_000
    nearest = find_nemo_class(export_config.build_hf_config(model, object()).to_dict())
    right = nemo_config.build_config(nearest, torch.bfloat16)
    assert nemo_config.find_differences(right, model.config, nemo_config.SHAPE_FIELDS + nemo_config.VALUE_FIELDS) == []
    assert nearest.unknown == ()
