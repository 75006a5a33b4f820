"""`recipes predict`: a table in, a table out."""

import csv

from tests.cli.planning import printed


def test_predict_writes_a_row_for_every_row(recipes_cli, tmp_path):
    (tmp_path / "rows.csv").write_text("id,model,gpu,gpus,tp,gbs\n1,llama3_8b,h100,16,2,64\n2,nothing,h100,16,2,64\n")
    assert "1 ok, 1 unsupported" in printed(
        recipes_cli, "predict", "--from", "rows.csv", "--out", "o.csv", cwd=tmp_path
    )
    with (tmp_path / "o.csv").open() as file:
        assert [row["verdict"] for row in csv.DictReader(file)] == ["ok", "unsupported"]
