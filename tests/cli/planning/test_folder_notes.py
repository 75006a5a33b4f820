"""Notes of `plan` and `check` on Hugging Face folders."""

import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from superpod.cli.planning import folder_notes
from superpod.errors import UserError
from superpod.planner.formats.hf_shape import from_config

YI = {
    **{"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 4096, "intermediate_size": 11008},
    **{"num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 4, "vocab_size": 64000},
    **{"tie_word_embeddings": False, "rms_norm_eps": 1e-5, "rope_theta": 5e6, "hidden_act": "silu"},
}
OLMO = {**YI, "model_type": "olmo2", "architectures": ["Olmo2ForCausalLM"]}


def write(folder, config):
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_an_equivalent_nemo_model_is_named_with_the_commands(tmp_path):
    (line,) = folder_notes.training_notes(str(write(tmp_path / "yi", YI)))
    assert line.startswith("NeMo's LlamaModel is equivalent: `recipes ckpt convert ")
    assert folder_notes.training_notes(str(tmp_path / "yi" / "config.json")) == [line]


def test_a_model_without_an_equivalent_is_noted_with_the_reason(tmp_path):
    (line,) = folder_notes.training_notes(str(write(tmp_path / "olmo", OLMO)))
    assert "cannot be imported" in line
    assert "olmo2" in line


def test_other_names_get_no_note():
    assert folder_notes.training_notes("llama3_8b") == []
    assert folder_notes.training_notes("layers=2,hidden=64") == []


@pytest.mark.slow
def test_check_accepts_a_folder(recipes_cli, tmp_path):
    folder = write(tmp_path / "yi", YI)
    done = recipes_cli("check", folder, "--gpu", "h100", "--nodes", 1, "--layout", "sharding=zero3", "--gbs", 128)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith("yi pretrain, 8 x h100")
    assert "note: NeMo's LlamaModel is equivalent" in done.stdout


STRANGE = st.one_of(
    st.none(), st.booleans(), st.integers(-(2**70), 2**70), st.floats(), st.text(max_size=9), st.lists(st.integers())
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.sampled_from([YI, OLMO]), st.dictionaries(st.sampled_from([*YI, "sliding_window", "head_dim"]), STRANGE))
def test_arbitrary_values_are_read_or_refused(tmp_path, config, changes):
    folder = write(tmp_path / "strange", {**config, **changes})
    try:
        shape = from_config(folder)
    except UserError as refused:
        assert str(folder) in str(refused) or "strange" in str(refused)  # noqa: PT017 - a shape is as right
    else:
        assert shape.layers > 0
    assert len(folder_notes.training_notes(str(folder))) == 1


@pytest.mark.parametrize(
    "text", ["", "[]", "null", "{", '{"model_type": {"a": 1}}', '{"text_config": {"text_config": {}}}']
)
def test_an_invalid_configuration_is_refused(tmp_path, text):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(UserError):
        from_config(tmp_path)
