import csv
import json
import os
import subprocess

import pytest

from superpod.errors import UserError
from superpod.planner.tables import csv_rows

HEADER = "id,model,gpu,gpus,precision,seq,gbs,mbs,tp,pp\n"
ROWS = (
    "a,llama3_8b,h100-80gb,8,bf16,8192,128,1,2,1\n"
    "b,llama3_70b,h100-80gb,8,bf16,8192,128,1,1,1\n"
    "c,llama3_70b,h100-80gb,64,bf16,8192,128,1,3,4\n"
    "d,gpt9,h100-80gb,64,bf16,8192,128,1,4,4\n"
    "e,llama3_8b,h100-80gb,8,bf16,8192,-1,1,1,1\n"
    "f,llama3_8b,h100-80gb,nan,bf16,8192,8,1,1,1\n"
    "g,llama3_8b,a100-80gb,8,fp8,8192,128,1,1,1\n"
)


def predicted(tmp_path, text):
    source, out = tmp_path / "rows.csv", tmp_path / "out.csv"
    source.write_text(text)
    csv_rows.predict(source, out)
    with out.open() as file:
        return {row["id"]: row for row in csv.DictReader(file)}


def test_every_row_gets_its_verdict_in_order(tmp_path):
    rows = predicted(tmp_path, HEADER + ROWS)
    verdicts = {key: row["verdict"] for key, row in rows.items()}
    assert list(rows) == list("abcdefg")
    assert verdicts == {
        "a": "ok", "b": "oom", "c": "illegal", "d": "unsupported", "e": "illegal", "f": "illegal", "g": "illegal",
    }  # fmt: skip
    assert "tp 3" in rows["c"]["reason"]
    assert "gpt9" in rows["d"]["reason"]


def test_figures_stand_for_oom_too_and_the_breakdown_adds_up(tmp_path):
    rows = predicted(tmp_path, HEADER + ROWS)
    for key in "ab":
        row = rows[key]
        terms = [float(part.partition("=")[2]) for part in row["terms_s"].split()]
        owners = [float(part.partition("=")[2]) for part in row["owners_gib"].split()]
        assert sum(terms) == pytest.approx(float(row["step_time_s"]), rel=1e-2)
        assert sum(owners) == pytest.approx(float(row["allocated_gib_max"]), rel=1e-2)
        assert float(row["reserved_gib_max"]) > float(row["allocated_gib_max"]) > 0
        tokens = 128 * 8192 / float(row["step_time_s"]) / 8
        assert float(row["tokens_per_s_per_gpu"]) == pytest.approx(tokens, rel=1e-4)
    assert rows["c"]["step_time_s"] == ""


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "has no column model, gpu, tp"),
        ("a,b\n1,2\n", "has no column model"),
        (HEADER, "has no rows"),
        ("", "is empty: it has no column"),
        (",,,\n1,2\n", "is blank: it has no column model, gpu, tp"),
        ("model;gpu;tp\nllama3_8b;h100;2\n", "has semicolons between its cells"),
        ("model\tgpu\ttp\nllama3_8b\th100\t2\n", "has tabs between its cells"),
    ],
)
def test_another_kind_of_file_is_refused_and_nothing_is_written(tmp_path, text, says):
    with pytest.raises(UserError, match=says) as refused:
        predicted(tmp_path, text)
    assert ("llama3_8b,h100,8,2" if text == HEADER else "model,gpu,gpus,tp") in refused.value.hint
    assert sorted(p.name for p in tmp_path.iterdir()) == ["rows.csv"]


def test_a_file_that_is_not_there_is_said(tmp_path):
    with pytest.raises(UserError, match=r"none\.csv does not exist"):
        csv_rows.predict(tmp_path / "none.csv", tmp_path / "out.csv")


def test_a_place_that_cannot_be_written_is_said(tmp_path):
    source = tmp_path / "rows.csv"
    source.write_text(HEADER + ROWS)
    with pytest.raises(UserError, match="does not exist"):
        csv_rows.predict(source, tmp_path / "no folder" / "out.csv")


def test_the_table_that_is_read_is_not_written_over(tmp_path):
    source = tmp_path / "rows.csv"
    source.write_text(HEADER + ROWS)
    with pytest.raises(UserError, match="is also the input"):
        csv_rows.predict(source, source)
    assert source.read_text() == HEADER + ROWS


def test_a_device_is_written_to_and_stays_one(tmp_path):
    source, pipe = tmp_path / "rows.csv", tmp_path / "pipe"
    source.write_text(HEADER + ROWS)
    os.mkfifo(pipe)
    reader = subprocess.Popen(["cat", pipe], stdout=subprocess.PIPE, text=True)
    csv_rows.predict(source, pipe)
    assert len(reader.communicate(timeout=30)[0].splitlines()) == 8
    assert pipe.is_fifo()


@pytest.mark.parametrize(
    "row",
    [
        "x,llama3_8b,h100,8,bf16,8192,128,1,2,2147483648\n",
        "x,llama3_8b,h100,8,bf16,8192,128,99999999999999999999999,2,1\n",
        "x,llama3_8b,h100,8,bf16,8192,128,1,0,1\n",
        "x,llama3_8b,h100,8,bf16,1e400,128,1,2,1\n",
    ],
)
def test_one_bad_row_spoils_no_other(tmp_path, row):
    rows = predicted(tmp_path, HEADER + ROWS.splitlines(keepends=True)[0] + row)
    assert rows["a"]["verdict"] == "ok"
    assert rows["x"]["verdict"] == "illegal"
    assert rows["x"]["reason"]


@pytest.mark.parametrize("row", ["x,llama3_8b,h100,8,2,99999999,", "x,llama3_8b,h100,8,2,,99999999"])
def test_a_batch_beyond_the_largest_spoils_no_other_row_in_csv_and_in_json(tmp_path, row):
    text = f"id,model,gpu,gpus,tp,gbs,num_microbatches\n{row}\na,llama3_8b,h100,8,2,64,\n"
    assert [row["verdict"] for row in predicted(tmp_path, text).values()] == ["illegal", "ok"]
    csv_rows.predict(tmp_path / "rows.csv", tmp_path / "out.json", csv_rows.RowOptions(as_json=True))
    wrong, right = map(json.loads, (tmp_path / "out.json").read_text().splitlines())
    assert (wrong["verdict"], right["verdict"]) == ("illegal", "ok")
    assert "gbs must be at most 16,777,216" in wrong["reason"]


def test_a_quote_that_is_not_closed_swallows_no_row_up_to_the_next_quote(tmp_path):
    right = "llama3_8b,h100,8,2,64"
    lines = ["id,model,gpu,gpus,tp,gbs", f'a,"{right}', f"b,{right}", f'c,"llama3_8b"{right[9:]}', f"d,{right}"]
    rows = predicted(tmp_path, "\n".join(lines) + "\n")
    assert [row["verdict"] for row in rows.values()] == ["illegal", "ok", "ok", "ok"]
    assert rows["a"]["reason"] == "a quote in line 2 is not closed"


def test_a_quote_that_a_later_row_closes_is_reported_with_both_lines(tmp_path):
    lines = [
        "id,model,gpu,gpus,tp,gbs",
        'a,"llama3_8b,h100,8,2,64',
        'b,llama3_8b",h100,8,2,64',
        "c,llama3_8b,h100,8,2,64",
    ]
    rows = predicted(tmp_path, "\n".join(lines) + "\n")
    assert rows["a"]["verdict"] == "illegal"
    assert "a quote in line 2 is closed in line 3, but model must be on one line" in rows["a"]["reason"]
    assert rows["c"]["verdict"] == "ok"


def test_many_batches_are_predicted_in_order(tmp_path, monkeypatch):
    monkeypatch.setattr(csv_rows, "BATCH", 3)
    rows = predicted(tmp_path, HEADER + ROWS)
    assert list(rows) == list("abcdefg")


def test_data_parallelism_that_the_gpus_contradict_is_said(tmp_path):
    header = "id,model,gpu,gpus,tp,pp,ep,dp,gbs\n"
    rows = predicted(tmp_path, header + "a,llama3_8b,h100,16,2,1,1,8,64\nb,llama3_8b,h100,16,2,1,1,4,64\n")
    assert rows["a"]["verdict"] == "ok"
    assert rows["b"]["verdict"] == "illegal"
    assert "tp 2 x pp 1 x cp 1 x dp 4 = 8, but gpus is 16" in rows["b"]["reason"]
    experts = predicted(tmp_path, header + "c,mixtral_8x7b,h100,64,2,4,8,1,64\n")  # data parallelism of the experts
    assert experts["c"]["verdict"] == "ok"


def test_stages_that_no_row_prints_are_said(tmp_path):
    header = "id,model,gpu,gpus,tp,pp,vp,gbs\n"
    layouts = "a,llama3_70b,h100,64,4,4,5,64\nb,llama3_70b,h100,64,4,4,3,64\nc,llama3_70b,h100,112,4,7,,112\n"
    rows = predicted(tmp_path, header + layouts)
    assert rows["a"]["reason"] == ""
    assert rows["b"]["verdict"] == "illegal"  # as `check` and `plan` say: 20 layers of a rank over 3 chunks
    assert rows["c"]["verdict"] == "ok"
    assert "80 layers are not divisible by 7 chunks" in rows["c"]["reason"]


def test_text_that_csv_quotes_comes_through(tmp_path):
    name = 'a "b", c'
    rows = predicted(tmp_path, HEADER + '"a ""b"", c"' + ROWS.splitlines()[0][1:] + "\n")
    assert rows[name]["verdict"] == "ok"
