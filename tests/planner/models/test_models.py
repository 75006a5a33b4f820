import csv

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from superpod.errors import UserError
from superpod.planner import columns, hardware, legality, models
from superpod.planner.layout import Layout
from superpod.planner.memory import model_states
from superpod.planner.memory.units import MemoryUnits
from superpod.planner.models import ModelShape, Split
from superpod.planner.models.counts import block_parameters
from superpod.planner.planned_job import PlannedJob
from tests.conftest import ROOT

REFERENCE = ROOT / "benchmarks" / "reference"
GENERIC = {"gpt", "moe", "(see issue)", "Mixtral-8x2B (reduced, model_configs/test_small.yaml)"}

# Parameters of the safetensors files, as the model cards on huggingface.co print them.
ON_THE_CARD = {
    "llama2_7b": 6_738_415_616,
    "llama3_8b": 8_030_261_248,
    "llama3_70b": 70_553_706_496,
    "llama31_405b": 405_853_388_800,
    "llama32_1b": 1_235_814_400,
    "mistral_7b": 7_241_732_096,
    "mixtral_8x7b": 46_702_792_704,
    "gemma_7b": 8_537_680_896,
    "gemma2_27b": 27_227_128_320,
    "gemma3_1b": 999_885_952,
    "qwen25_7b": 7_615_616_512,
    "qwen3_8b": 8_190_735_360,
    "qwen3_235b_a22b": 235_093_634_560,
    "phi3_mini": 3_821_079_552,
    "starcoder2_15b": 15_957_889_024,
    "deepseek_v2_lite": 15_706_484_224,
    "gpt_oss_120b": 116_829_156_672,
    "nemotron_nano_9b_v2": 8_888_227_328,
    "nemotron3_nano": 31_577_937_344,
    "qwen3_next_80b_a3b": 79_674_391_296,
    "qwen3.5_122b_a10b": 122_111_526_912,
    "qwen3.5_397b_a17b": 396_346_350_336,
    "qwen3.6_35b_a3b": 34_660_610_688,
}

# The same with the layers of multi-token prediction that the files contain: number of layers, parameters.
WITH_PREDICTION = {
    "qwen3_next_80b_a3b": (1, 81_324_862_720),
    "qwen3.5_397b_a17b": (1, 396_346_350_336 + 6_595_568_128),
    "nemotron3_super": (1, 123_611_012_096),  # one layer, applied twice
    "glm5": (1, 753_864_139_008 - 76 * 256),  # the files also hold a bias per expert in 76 routers
}


@pytest.mark.parametrize("name", ON_THE_CARD)
def test_the_whole_model_counts_what_its_card_says(name):
    assert models.find(name).total_parameters() == ON_THE_CARD[name]


@pytest.mark.parametrize("name", WITH_PREDICTION)
def test_the_prediction_layers_count_what_the_card_says(name):
    layers, parameters = WITH_PREDICTION[name]
    assert models.find(name).replace(mtp_layers=layers).total_parameters() == parameters


@pytest.mark.parametrize(
    ("name", "total", "active"),
    [
        *(("deepseek_v3", 671e9, 37e9), ("kimi_k2", 1.04e12, 32e9), ("llama4_maverick", 400e9, 17e9)),
        *(("glm5", 744e9, 40e9), ("nemotron3_ultra", 550e9, 55e9), ("qwen3.5_397b_a17b", 397e9, 17e9)),
    ],
)
def test_a_mixture_counts_what_its_authors_say(name, total, active):
    model = models.find(name)
    assert model.total_parameters() == pytest.approx(total, rel=0.015)
    assert model.active_parameters() == pytest.approx(active, rel=0.05)


@pytest.mark.parametrize(
    ("name", "published"),
    [
        ("mamba2_8b", 8.3e9),  # arXiv:2406.07887
        ("mamba2_hybrid_8b", 8.66e9),
        ("hyena_1b", 1.1e9),  # Evo 2
        ("hyena_7b", 6.5e9),
        ("hyena_40b", 40.3e9),
        ("llama33_nemotron_super_49b", 49.9e9),
        ("llama31_nemotron_ultra_253b", 253e9),
        ("bert_110m", 110e6),
        ("bert_340m", 340e6),
        ("e5_340m", 335_142_400),
        ("t5_220m", 220e6),
    ],
)
def test_a_model_counts_about_what_its_authors_say(name, published):
    assert models.find(name).total_parameters() == pytest.approx(published, rel=0.02)


def test_the_published_mamba_2_is_tied():
    assert models.find("mamba2_130m").replace(tied=True).parameters().total == 128_989_632


def test_every_published_model_is_here_or_named_as_not_modelled():
    for file in ("step_time.csv", "memory.csv"):
        with (REFERENCE / file).open() as rows:
            named = {row["model"] for row in csv.DictReader(rows)} - GENERIC
        assert not named - set(models.names()) - set(models.unsupported_models())


def test_every_model_of_the_table_names_its_source_and_computes():
    for name in models.names():
        model = models.find(name)
        assert model.source != "given by hand"
        assert model.active_parameters() <= model.total_parameters()
        assert 6 * model.active_parameters() < model.flops_per_token(65536, causal=True) * 1.5


def test_flops_follow_the_two_published_conventions():
    llama = models.find("llama3_8b")
    assert round(llama.flops_per_token(8192, causal=False) / 1e9, 1) == 57.9
    assert round(llama.flops_per_token(8192, causal=True) / 1e9, 1) == 51.5


def test_flops_of_a_gpt_are_the_papers_formula():
    layers, h, s, vocab = 96, 12288, 2048, 51200
    gpt = ModelShape.from_shape(style="gpt", layers=layers, hidden=h, heads=96, vocab=vocab)
    formula = 72 * layers * h**2 * (1 + s / (6 * h) + vocab / (12 * layers * h))  # arXiv:2104.04473 without recompute
    assert gpt.flops_per_token(s, causal=False) == pytest.approx(formula, rel=1e-12)


def test_a_window_bounds_the_scores():
    windowed, plain = models.find("mistral_7b"), models.find("mistral_7b").replace(window=0)
    assert windowed.flops_per_token(4096, causal=True) == plain.flops_per_token(4096, causal=True)
    assert windowed.flops_per_token(65536, causal=True) < plain.flops_per_token(65536, causal=True)


def test_the_vocabulary_is_padded_as_megatron_pads_it():
    assert models.find("gpt3_175b").padded_vocab(tp=1) == 50304
    assert models.find("gpt3_175b").padded_vocab(tp=8) == 51200
    assert models.find("mixtral_8x7b").padded_vocab(tp=8) == 32768
    assert models.find("qwen3_8b").padded_vocab(tp=4) == 151_936


def test_the_readmes_of_a_split():
    split = Split.from_layout(Layout(tp=8, pp=4, vp=5, embedding_as_layer=True, loss_as_layer=True))
    chunks = split.stage_layers(78, 0)
    assert [len(chunk) for chunk in chunks] == [3, 4, 4, 4, 4]
    assert chunks[1] == range(15, 19)
    assert [len(r) for r in split.stage_layers(78, 3)] == [4, 4, 4, 4, 3]


@settings(max_examples=60, deadline=None)
@given(
    pp=st.sampled_from([1, 2, 3, 4]),
    vp=st.sampled_from([1, 2]),
    per_chunk=st.integers(1, 3),
    tied=st.booleans(),
    ep=st.sampled_from([1, 2, 4]),
)
def test_the_stages_add_up_to_the_model(pp, vp, per_chunk, tied, ep):
    vp = vp if pp > 1 else 1
    shape = {"layers": pp * vp * per_chunk, "hidden": 64, "heads": 4, "ffn": 128, "vocab": 1000, "tied": tied}
    model = ModelShape.from_shape(**shape, experts=8, topk=2, expert_ffn=32, dense_first=1)
    whole, split = model.parameters(), Split(pp=pp, vp=vp, ep=ep)
    stages = [model.parameters(split, stage) for stage in range(pp)]
    copied = model.padded_vocab() * model.hidden if tied and pp > 1 else 0
    assert sum(stage.dense for stage in stages) == whole.dense + copied
    assert sum(stage.experts for stage in stages) * ep == whole.experts


def test_blocks_take_arrays_of_degrees():
    numpy = pytest.importorskip("numpy")
    model, tp = models.find("mixtral_8x7b"), numpy.array([1, 2, 4, 8])
    for kind in ("attention", "moe"):
        one_by_one = [block_parameters(model, kind, int(t), 8, int(t)).total for t in tp]
        assert numpy.asarray(block_parameters(model, kind, tp, 8, tp).total).tolist() == one_by_one


@pytest.mark.parametrize(
    ("split", "says"),
    [
        ({"tp": 16}, "kv_heads 8 must be divisible by tp 16"),
        ({"pp": 7}, "32 layers = 32 must be divisible by pp 7"),
        ({"pp": 4, "vp": 3}, "8 layers of pipeline rank 0 must be divisible by vp 3"),
        ({"ep": 8}, "ep 8 requires a mixture of experts, but this model is dense"),
        ({"pp": 4, "first_layers": 9}, "leave 23 layers for 3 stages"),
        ({"pp": 4, "first_layers": 9, "loss_as_layer": True}, "cannot be combined with embedding_as_layer"),
        ({"pp": 2, "chunks": (1, 2)}, "add up to 32 layers"),
        ({"pp": 10**9}, "exceeds the 32 layers"),
        ({"tp": 0}, "tp must .*0"),
        ({"vp": "2"}, "vp must .*'2'"),
    ],
)
def test_a_split_that_does_not_divide_is_refused_with_the_numbers(split, says):
    with pytest.raises(UserError, match=says):
        models.find("llama3_8b").parameters(Split(**split))


SHAPE = {"layers": 2, "hidden": 64, "heads": 4, "vocab": 100, "ffn": 128}


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"hiden": 64}, "there is no model key 'hiden'"),
        ({"hidden": 65}, "hidden 65 must be divisible by heads 4"),
        ({"hidden": 64.0}, "hidden must be an integer, not 64.0"),
        ({"hidden": float("nan")}, "hidden must be an integer"),
        ({"tied": 1}, "tied must be true or false"),
        ({"layers": -1}, "layers must .*-1"),
        ({"layers": 10**12}, "layers must .*1000000000000"),
        ({"layers": 0}, "layers is 0"),
        ({"ffn": 0}, "ffn is missing"),
        ({"experts": 8}, "topk is missing"),
        ({"experts": 8, "topk": 9, "expert_ffn": 1}, "topk 9 exceeds experts 8"),
        ({"kv_heads": 3}, "heads 4 must be divisible by kv_heads 3"),
        ({"kv_lora": 16}, "qk_nope_dim is missing"),
        ({"pattern": "MX"}, "the pattern contains 'X'"),
        ({"pattern": "M"}, "the pattern has 1 layers, but layers is 2"),
        ({"runs": "2x128 x64"}, "runs contains 'x64'"),
        ({"runs": "3x128"}, "the runs have 3 layers, but layers is 2"),
        ({"runs": "2x128", "pattern": "M-"}, "runs cannot be combined with pattern"),
        ({"norm": "batch"}, "norm must be rms or layer, not 'batch'"),
        ({"style": "bert"}, "style must .*'bert'"),
    ],
)
def test_a_shape_that_contradicts_itself_is_refused(change, says):
    with pytest.raises(UserError, match=says):
        ModelShape.from_shape(**{**SHAPE, **change})


@pytest.mark.parametrize(
    ("part", "hint"),
    [
        ("31_8b", "did you mean llama31_8b?"),
        ("70b", "did you mean llama2_70b or llama3_70b or "),
        ("llama3_9b", "did you mean llama3_8b"),
        ("zzz", "pass the path of a Hugging Face config.json"),
    ],
)
def test_a_part_of_a_name_is_answered_with_the_names_that_have_it(part, hint):
    with pytest.raises(UserError, match=f"there is no model '{part}'") as refused:
        models.find(part)
    assert refused.value.hint.startswith(hint)


def test_an_unknown_model_is_answered_with_the_closest():
    with pytest.raises(UserError, match="there is no model 'llama3_9b'") as refused:
        models.find("llama3-9B")
    assert "llama3_8b" in refused.value.hint
    with pytest.raises(UserError, match="deepseek_v4_flash is not supported"):
        models.find("deepseek_v4_flash")
    assert models.find("llama31_8b") is models.find("llama3_8b")


def test_a_users_file_of_models(tmp_path):
    path = tmp_path / "models.toml"
    path.write_text('[mine]\nstyle = "gpt"\nlayers = 2\nhidden = 64\nheads = 4\nffn = 256\nvocab = 100\n')
    assert models.load(path)["mine"].norm == "layer"
    path.write_text("[mine]\nlayers = 2\n")
    with pytest.raises(UserError, match=r"models.toml \[mine\]: hidden is missing"):
        models.load(path)
    path.write_text("layers = 2\n")
    with pytest.raises(UserError, match="is outside a table"):
        models.load(path)


def test_a_cut_model_keeps_its_ends():
    cut = models.find("llama3_70b").replace(layers=12)
    assert cut.parameters().embedding == models.find("llama3_70b").parameters().embedding
    assert models.find("nemotronh_8b").replace(layers=6).blocks == (("mamba",), ("mlp",)) * 3


RUNS = {"layers": 6, "hidden": 64, "heads": 4, "vocab": 100, "ffn": 128, "runs": "2x128 2x64- 1x0- 1x256"}


def test_layers_that_differ_in_their_mlp():
    model = ModelShape.from_shape(**RUNS)
    assert model.widths == (128, 128, 64, 64, 0, 256)
    assert model.count_blocks(range(6)) == {"attention": 3, "mlp": 5.0}
    first, last = (model.parameters(Split(pp=3), stage) for stage in (0, 2))
    assert (first.mlp, last.mlp) == (2 * 3 * 64 * 128, 3 * 64 * 256)
    assert last.norms == 3 * 64  # attention, MLP and the final one: the layer that passes its input on has none
    whole = model.parameters()
    assert model.flops_per_token(1, causal=False) == 6 * (whole.attention + whole.mlp + 100 * 64) + 3 * 2 * 2 * 64 * 3


def test_runs_of_one_width_are_a_plain_model():
    plain = ModelShape.from_shape(**{**RUNS, "runs": ""})
    runs = ModelShape.from_shape(**{**RUNS, "runs": "1x128 5x128"})
    assert runs.chunk_parameters(Split(tp=2, pp=3), 1) == plain.chunk_parameters(Split(tp=2, pp=3), 1)
    assert runs.flops_per_token(4096, causal=True) == plain.flops_per_token(4096, causal=True)
    assert runs.replace(layers=2).parameters() == plain.replace(layers=2).parameters()


def test_what_a_shape_simplifies_is_said_as_a_warning():
    for name, warned in (("t5_220m", True), ("llama32_1b", False)):
        model, node = models.find(name), hardware.builtin().node("h100")
        fabric = hardware.builtin().fabric_of(node)
        job = PlannedJob(model=model, node=node, fabric=fabric, gpus=8, seq=512, precision="bf16", layout=Layout())
        assert any("planned approximately" in warning.message for warning in legality.warnings(job)) == warned


@pytest.mark.parametrize("name", ["llama33_nemotron_super_49b", "llama31_nemotron_ultra_253b"])
def test_memory_holds_what_each_stage_of_different_widths_holds(name):
    model, node = models.find(name), hardware.builtin().node("h100")
    layout = Layout(tp=8, pp=2, sp=True, gbs=16)
    job = PlannedJob(model, node, hardware.builtin().fabric_of(node), 16, 8192, "bf16", layout)
    held = model_states.rank_parameters(MemoryUnits(job, columns.from_job(job)))
    exact = [model.parameters(Split.from_layout(layout), rank).total for rank in (0, 1)]
    assert held.dense.tolist() == pytest.approx(exact, rel=1e-4)


def test_layers_of_different_widths_take_no_virtual_stages():
    split = Split(pp=2, vp=2)
    with pytest.raises(UserError, match="virtual stages"):
        models.find("llama33_nemotron_super_49b").parameters(split)
