"""Rows of a table as jobs: what their columns mean, and what a release's blanks do."""

import csv
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from superpod.errors import UserError
from superpod.planner import hardware, memory
from superpod.planner.tables import csv_rows, published

ROW = {"id": "x", "model": "llama3_8b", "gpu": "h100", "gpus": "16", "tp": "2", "gbs": "64", "seq": "4096"}
SHAPE = {"model": "moe", "layers": "15", "hidden": "1024", "ffn": "4096", "heads": "16", "tp": "1", "pp": "2"}
ISSUE = {**ROW, **SHAPE, "gpus": "8"}


@pytest.mark.parametrize(
    ("flags", "stages"),
    [
        ("pipeline-model-parallel-layout=Et*3|(tt|)*6L", (3, 2, 2, 2, 2, 2, 2, 0)),
        ("mtp-num-layers=1; pipeline-model-parallel-layout=Et*3|(tt|)*6mL", (3, 2, 2, 2, 2, 2, 2, 0)),
        ("--num-experts 8 --pipeline-model-parallel-layout Et*7|t*8L", (7, 8)),
    ],
)
def test_stages_that_a_row_gives_replace_those_that_its_blanks_would_mean(flags, stages):
    """15 layers do not divide over pp 2, so that the loss counted as a layer: the table ended there."""
    job = published.job({**ISSUE, "flags": flags})
    assert (job.layout.chunks, job.layout.loss_as_layer) == (stages, False)
    assert (job.layout.vp or 1) == len(stages) // 2
    [prediction] = csv_rows.predict_rows([{**ISSUE, "flags": flags}])
    assert (prediction.verdict, prediction.reason) == ("ok", "")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (
            {"flags": "pipeline-model-parallel-layout=Et*3|(tt|)*6mL"},
            "1 multi-token-prediction layers (m), but the model has 0",
        ),
        ({"flags": "pipeline-model-parallel-layout=Et*3|(tt|)*5L"}, "7 stages must be divisible by pp 2"),
        ({"flags": "pipeline-model-parallel-layout=Et*3|(tt|)*6L", "vp": "2"}, "8 stages, but pp 2 x vp 2 is 4"),
        ({"flags": "pipeline-model-parallel-layout=Et*14|L"}, "14 layers (t), but the model has 15"),
        ({"flags": "pipeline-model-parallel-layout=(t*99999|)*99999L"}, "longer than any model"),
        ({"options": "moment=bf16"}, "there is no option 'moment'"),
        ({"layout": "chunks=9+9"}, "add up to 15 layers"),
        ({"gated": "perhaps"}, "true or false"),
        ({"recompute": "ful"}, "not 'ful'; did you mean full"),
        ({"recompute": "selective mpl"}, "not 'mpl'; did you mean mlp"),
        ({"recompute": "full mlp"}, "only selective has modules"),
        ({"fsdp": "yess"}, "fsdp must be"),
        ({"num_microbatches": "5", "dp": "4"}, "num_microbatches 5 x mbs 1 x dp 4 = 20, but gbs is 64"),
        ({"num_microbatches": "16", "layout": "mbs=2"}, "num_microbatches 16 x mbs 2 x dp 4 = 128, but gbs is 64"),
        ({"num_microbatches": "16", "flags": "global-batch-size=32"}, "= 64, but gbs is 32"),
    ],
)
def test_a_cell_that_cannot_be_is_the_verdict_of_its_row_alone(change, says):
    wrong, right = csv_rows.predict_rows([{**ISSUE, **change}, ROW])
    assert wrong.verdict == "illegal"
    assert says in wrong.reason
    assert right.verdict == "ok"


def test_micro_batches_give_the_batch_size_that_a_row_leaves_blank_also_beside_a_layout():
    row = {**ROW, "gbs": "", "tp": "", "num_microbatches": "8"}
    assert published.job({**row, "layout": "tp=4,mbs=2"}).layout.gbs == 8 * 2 * 4


@pytest.mark.parametrize("text", [*published.RECOMPUTE_IN_PUBLISHED_TABLES, "selective ['layernorm', 'moe_act']"])
def test_what_published_tables_write_under_recompute_is_read(text):
    assert published.job({**ROW, "model": "mixtral_8x7b", "recompute": text})


def test_a_shape_by_hand_is_what_plan_takes():
    text = "layers=24,hidden=2048,ffn=5632,heads=16,kv_heads=4,vocab=64000"
    job = published.job({**ROW, "model": text})
    assert (job.model.layers, job.model.kv_heads, job.model.gated) == (24, 4, True)
    assert published.job({**ROW, "model": text, "vocab": "128000", "experts": ""}).model.vocab == 128_000


def test_a_shape_s_columns_change_a_named_model():
    job = published.job({**ROW, "model": "deepseek_v3", "layers": "8", "dense_first": "1", "tied": "true"})
    assert (job.model.layers, job.model.dense_first, job.model.tied, job.model.experts) == (8, 1, True, 256)


def test_options_and_a_layout_are_written_as_on_the_command_line():
    row = {**ROW, "options": "moments=bf16,lora_targets=linear_qkv+linear_proj", "layout": "sp=false,sharding=none"}
    job = published.job(row)
    assert (job.options.moments, job.options.lora_targets) == ("bf16", ("linear_qkv", "linear_proj"))
    assert (job.layout.tp, job.layout.sp, job.layout.sharding) == (2, False, "none")


def test_a_release_says_what_its_rows_leave_blank_and_options_win():
    row = {**ROW, "release": "NeMo 26.02", "precision": "fp8"}
    job = published.job(row)
    assert (job.precision, job.options.release, job.options.fp8_params) == ("fp8cs", "NeMo 26.02", True)
    assert published.job({**row, "options": "fp8_params=false"}).options.fp8_params is False
    assert published.job({**row, "precision": "bf16"}).options.fp8_params is False
    assert published.job({**row, "release": "vTrain"}).options.framework == "deepspeed"


def test_a_run_recomputes_as_needed_and_no_more():
    row = {"release": "NeMo 26.02", "model": "deepseek_v3", "gpu": "gb200", "gpus": "256", "precision": "fp8-mx",
           "seq": "4096", "gbs": "2048", "mbs": "1", "tp": "1", "pp": "4", "vp": "4", "ep": "64"}  # fmt: skip
    row |= {"mbs": "8"}
    tuned = published.job(row)
    assert memory.fit(tuned) == "fits"
    assert tuned.layout.recompute != "none"
    plain = tuned.replace(layout=tuned.layout.replace(recompute="none"))
    assert memory.fit(plain) == "does not fit"
    dense = {**row, "mbs": "1", "model": "llama3_70b", "ep": "1", "pp": "8", "tp": "4", "precision": "bf16"}
    assert published.job({**dense, "release": "", "recompute": "auto"}).layout.recompute == "none"
    assert published.job({**row, "recompute": "full"}).layout.recompute == "full"


def test_hardware_of_a_file_is_that_of_its_rows(tmp_path):
    (tmp_path / "mine.toml").write_text('[gpu.fast]\nlike = "h100"\nbf16_tflops = 2000\n')
    facts = published.Facts(hardware.load(tmp_path / "mine.toml"))
    usual, fast = (csv_rows.predict_rows([{**ROW, "gpu": gpu}], facts)[0] for gpu in ("h100", "fast"))
    assert fast.step_time_s is not None
    assert usual.step_time_s is not None
    assert fast.step_time_s < 0.9 * usual.step_time_s
    assert csv_rows.predict_rows([{**ROW, "gpu": "fast"}])[0].verdict == "unsupported"


WORDS = (
    *("", "", "0", "1", "2", "3", "8", "64", "4096", "128k", "-1", "1e9", "nan", "inf", "1e400", "٣", "9" * 30, "x,y"),
    *("full", "selective mlp", "auto", "gpt", "moe", "llama3_8b", "deepseek_v3", "layers=2,hidden=64,heads=1,vocab=99"),
    *("bf16", "fp8", "mxfp8", "h100", "b200", "true", "sft", "lora", "NeMo 26.02", "vTrain", "torchtitan", "tp=2,sp"),
    *("chunks=1+2", "moments=bf16", "swiglu; num-layers=4", "--num-experts 4 --moe-router-topk 2", "a'b", "M*-E", "."),
    *("pipeline-model-parallel-layout=Et|tL", "num-layers-per-virtual-pipeline-stage=1", "num-experts=999999999"),
    *("virtual-pipeline-model-parallel-size=0", "pipeline-model-parallel-size=-2", "tensor-model-parallel-size=0"),
)
CELL = st.sampled_from(WORDS) | st.text(max_size=12) | st.integers(-3, 2**40).map(str) | st.integers(1, 16).map(str)
ROWS = st.dictionaries(st.sampled_from(sorted({*published.COLUMNS, "recompute"})), CELL, max_size=12)


@settings(max_examples=250, deadline=None)
@given(st.lists(st.tuples(st.sampled_from([ROW, ISSUE, {}]), ROWS), min_size=1, max_size=4))
def test_every_row_has_a_verdict_whatever_is_in_it(changes):
    table = [{**base, **change} for base, change in changes]
    predictions = csv_rows.predict_rows([*table, ROW])
    assert [p.verdict in ("ok", "oom", "illegal", "unsupported") for p in predictions] == [True] * len(predictions)
    assert all(p.reason for p in predictions if p.verdict != "ok")
    assert predictions[-1].verdict == "ok"
    assert all((p.step_time_s is not None) == (p.verdict in ("ok", "oom")) for p in predictions)


@settings(max_examples=40, deadline=None)
@given(
    st.lists(
        st.lists(CELL | st.sampled_from(['"', 'a"b', "a\nb", '"a""b"', "\x00", "\udcff"]), max_size=14), max_size=6
    )
)
def test_every_line_of_a_file_has_its_line_in_the_output(tmp_path_factory, lines):
    """Cells too many or too few, quotes that nothing closes, bytes that are no text: each costs its own row."""
    folder = tmp_path_factory.mktemp("table")
    text = "\n".join([",".join(ROW), *(",".join(cells) for cells in lines), ",".join(ROW.values())])
    (folder / "in.csv").write_text(text, errors="surrogateescape")
    counts = csv_rows.predict(folder / "in.csv", folder / "out.csv")
    with (folder / "out.csv").open(newline="", errors="surrogateescape") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == sum(counts.values()) >= 1
    assert rows[-1]["verdict"] == "ok"


def test_an_extra_cell_is_an_error_of_its_row(tmp_path):
    lines = [",".join(ROW), ",".join(ROW.values()) + ",17", ",".join(ROW.values()), "y,llama3_8b,h100"]
    (tmp_path / "in.csv").write_text("\n".join(lines))
    csv_rows.predict(tmp_path / "in.csv", tmp_path / "out.csv")
    with (tmp_path / "out.csv").open() as file:
        first, second, third = csv.DictReader(file)
    assert (first["verdict"], second["verdict"], third["verdict"]) == ("illegal", "ok", "oom")  # blanks are defaults
    assert "8 cells, but the header has 7 columns: the extra cells are '17'" in first["reason"]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"gpu": "h1000"}, "there is no GPU 'h1000'; did you mean h100"),
        ({"model": "lama3_8b"}, "there is no model 'lama3_8b'; did you mean llama3_8b"),
    ],
)
def test_a_name_that_is_unknown_suggests_the_nearest(change, says):
    [prediction] = csv_rows.predict_rows([{**ROW, **change}])
    assert (prediction.verdict, says in prediction.reason) == ("unsupported", True)


def test_rows_that_fail_together_cost_no_other_its_figures(monkeypatch):
    """A mistake of ours in one row: each half by itself, down to the row."""
    from superpod.planner import predict as predicting

    real = predicting.runs

    def fails_on_tp_8(runs):
        if any(run.layout.tp == 8 for run in runs):
            raise ZeroDivisionError("by design")
        return real(runs)

    monkeypatch.setattr(predicting, "runs", fails_on_tp_8)
    table = [{**ROW, "tp": random.Random(i).choice(("1", "2", "8"))} for i in range(20)]
    for row, prediction in zip(table, csv_rows.predict_rows(table), strict=True):
        assert prediction.verdict == ("illegal" if row["tp"] == "8" else "ok")


def test_a_column_twice_is_refused(tmp_path):
    (tmp_path / "in.csv").write_text("model,gpu,tp,tp\nllama3_8b,h100,1,2\n")
    with pytest.raises(UserError, match="two columns named tp"):
        csv_rows.predict(tmp_path / "in.csv", tmp_path / "out.csv")
