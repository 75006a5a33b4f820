"""Every planning verb shows the interval of a time, and says where no published run is as large."""

import pytest

from tests.cli.planning.small_plans import printed

LARGE = ("llama3_8b", "--gpu", "h100", "--gpus", "4096", "--gbs", "4096")
WORDS = {
    "plan": (),
    "check": ("--layout", "tp=2"),
    "explain": ("--layout", "tp=2"),
    "scale": (),
    "cost": ("--tokens", "1T"),
}


@pytest.mark.parametrize("verb", WORDS)
def test_a_run_beyond_all_published_ones_has_its_interval_and_a_warning(recipes_cli, verb):
    text = " ".join(printed(recipes_cli, verb, *LARGE, *WORDS[verb]).split())
    assert "extrapolated: no published run of the fit has more than 3,072 GPUs" in text
    assert "-" in text.partition(" (")[2].partition(")")[0]


def test_a_row_beyond_all_published_ones_says_so_in_its_reason(recipes_cli, tmp_path):
    (tmp_path / "rows.csv").write_text(
        "id,model,gpu,gpus,tp,gbs\n1,llama3_8b,h100,4096,2,4096\n2,llama3_8b,h100,8,2,64\n"
    )
    large, small = printed(recipes_cli, "predict", "--from", "rows.csv", "--json", cwd=tmp_path).splitlines()
    assert "extrapolated" in large
    assert "extrapolated" not in small
