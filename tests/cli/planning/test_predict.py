"""`recipes predict`."""

import csv
import json

from tests.cli.planning.small_plans import printed


def test_predict_writes_a_row_per_input_row(recipes_cli, tmp_path):
    (tmp_path / "rows.csv").write_text("id,model,gpu,gpus,tp,gbs\n1,llama3_8b,h100,16,2,64\n2,nothing,h100,16,2,64\n")
    assert "1 ok, 1 unsupported" in printed(
        recipes_cli, "predict", "--from", "rows.csv", "--out", "o.csv", cwd=tmp_path
    )
    with (tmp_path / "o.csv").open() as file:
        assert [row["verdict"] for row in csv.DictReader(file)] == ["ok", "unsupported"]


def test_predict_prints_json_with_own_hardware_and_megatron_pipeline_layouts(recipes_cli, tmp_path):
    (tmp_path / "mine.toml").write_text('[gpu.mine]\nlike = "h100"\nhbm_gb = 141\nhbm_usable_gib = 139.8\n')
    shape = '"layers=15,hidden=1024,heads=16,ffn=4096,vocab=50000"'
    row = f"{shape},mine,8,1,2,64,pipeline-model-parallel-layout=Et*3|(tt|)*6L\n"
    (tmp_path / "rows.csv").write_text(f"id,model,gpu,gpus,tp,pp,gbs,flags\na,{row}b,{row[:-1]},17\n")
    text = printed(recipes_cli, "predict", "--from", "rows.csv", "--json", "--hardware", "mine.toml", cwd=tmp_path)
    first, second = map(json.loads, text.splitlines())
    assert (first["id"], first["verdict"], first["pipeline_layout"]) == ("a", "ok", "Et*3|(tt|)*6L")
    assert first["layout"]["chunks"] == [3, 2, 2, 2, 2, 2, 2, 0]
    assert (second["verdict"], "17" in second["reason"]) == ("illegal", True)


def test_predict_reads_model_names_as_check_does(recipes_cli, tmp_path):
    spellings = ("Llama-3-8B", "meta-llama/Meta-Llama-3-8B", "LLAMA3-8B", "llama-8b")
    lines = [f"{name},h100,8,2,64" for name in ("llama3_8b", *spellings)]
    (tmp_path / "rows.csv").write_text("\n".join(["model,gpu,gpus,tp,gbs", *lines]))
    text = printed(recipes_cli, "predict", "--from", "rows.csv", "--json", cwd=tmp_path)
    *known, ambiguous = map(json.loads, text.splitlines())
    assert known == [known[0]] * 4
    assert ambiguous["verdict"] == "unsupported"
    assert "ambiguous" in ambiguous["reason"]


def test_a_misspelt_column_gives_a_note(recipes_cli, tmp_path):
    (tmp_path / "rows.csv").write_text("id,model,gpu,gpus,tp,gbs,precison\n1,llama3_8b,h100,16,2,64,fp8cs\n")
    done = recipes_cli("predict", "--from", "rows.csv", "--out", "o.csv", cwd=tmp_path)
    assert done.returncode == 0
    assert done.stderr.startswith("note: column 'precison' is ignored; did you mean precision?")
    assert "1 ok" in done.stdout
