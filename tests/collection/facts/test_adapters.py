"""Test which layers get adapters."""

from superpod.collection import registry
from superpod.collection.facts import adapters


def test_no_adapter_after_an_internal_norm():
    """NeMo's Gemma 2 and 3 have norms inside these layers; an adapter after the norm cannot be merged."""
    normed = {name for name, model in registry.models().items() if model.shape.post_norms}
    assert {"gemma2_2b", "gemma2_9b", "gemma2_27b", "gemma3_1b"} <= normed
    for name in normed:
        assert adapters.adapter_targets(registry.models()[name].shape, "lora") == ("linear_qkv", "linear_fc1")


def test_dora_excludes_replicated_layers_of_latent_attention():
    """NeMo 2.7.3 would add a rank's 768 x 7168 rows of the adapter to the replicated 1536 x 7168 weight with TP 2."""
    shape = registry.models()["deepseek_v3"].shape
    assert adapters.adapter_targets(shape, "dora") == ("linear_q_up_proj", "linear_kv_up_proj")
    assert set(adapters.DUPLICATED_LAYERS) < set(adapters.adapter_targets(shape, "lora"))
    assert adapters.adapter_targets(registry.models()["llama3_8b"].shape, "dora") == ("linear_qkv", "linear_fc1")
