"""`recipes plan`: its output, JSON and exit codes."""

import json

import pytest

from superpod.cli.planning import plan
from superpod.planner.layout import Layout
from tests.cli.planning.small_plans import SMALL, printed


def test_plan_ranks_and_explains_layouts(recipes_cli):
    text = printed(recipes_cli, "plan", *SMALL, "--top", "3", "--compare-rules")
    lines = text.splitlines()
    assert "legal layouts" in lines[0]
    assert "fit" in lines[0]
    assert lines[1].startswith("layout")
    seconds = [float(line.split()[-6]) for line in lines[2:5]]
    assert seconds == sorted(seconds)
    assert "of the step" in text
    assert "the textbook rules choose" in text


@pytest.mark.parametrize(
    "words", [SMALL, [*SMALL, "--precision", "auto"], [*SMALL[:-4], "--gpus", "8", "--gbs", "32"]], ids=" ".join
)
def test_plan_fits_a_terminal_of_80_columns(words, recipes_cli):
    text = printed(recipes_cli, "plan", *words, "--top", "30", "--compare-rules", env={"COLUMNS": "80"})
    assert "--layout" in text
    assert [line for line in text.splitlines() if len(line) > 80] == []


def test_plan_json_has_the_documented_keys(recipes_cli):
    plan = json.loads(printed(recipes_cli, "plan", *SMALL, "--json", "--top", "4"))
    assert plan["schema"] == 1
    assert plan["candidates"] > 100
    assert plan["query"]["gpus"] == 16
    assert len(plan["layouts"]) == 4
    for entry in plan["layouts"]:
        assert sum(entry["terms_s"].values()) == pytest.approx(entry["step_time_s"])
        assert [stage["rank"] for stage in entry["stages"]] == list(range(entry["layout"]["pp"]))
        assert all(size >= 0 for stage in entry["stages"] for size in stage["bytes"].values())
        assert entry["tokens_per_s_per_gpu"] == pytest.approx(64 * 8192 / entry["step_time_s"] / 16)
        assert 0 < entry["mfu"] < 1
        assert entry["checkpoint_bytes"] > 8e9 * 2
        assert entry["why"]
        assert entry["verdict"] == "ok"
        fullest = max(sum(stage["bytes"].values()) for stage in entry["stages"])
        assert entry["allocated_gib"] == pytest.approx(fullest / 2**30)
        assert entry["allocated_high_gib"] >= entry["allocated_gib"]


@pytest.mark.slow
def test_the_rows_have_distinct_degrees(recipes_cli):
    degrees = ("tp", "pp", "cp", "ep")
    plan = json.loads(printed(recipes_cli, "plan", *SMALL, "--json"))
    shown = [tuple(entry["layout"][key] for key in degrees) for entry in plan["layouts"]]
    assert len(shown) == len(set(shown)) == 10
    every = json.loads(printed(recipes_cli, "plan", *SMALL, "--json", "--variants", "--top", "1000"))["layouts"]
    best = {}
    for entry in every:
        best.setdefault(tuple(entry["layout"][key] for key in degrees), entry["layout"])
    listed = [entry["layout"] for entry in plan["layouts"]]
    assert listed[: len(best)] == [*best.values()][:10]


def test_auto_precision_tries_the_precisions_of_the_gpu(recipes_cli):
    plan = json.loads(printed(recipes_cli, "plan", *SMALL, "--precision", "auto", "--json"))
    assert set(plan["query"]["precision"]) == {"bf16", "fp8cs"}
    seconds = [entry["step_time_s"] for entry in plan["layouts"]]
    assert seconds == sorted(seconds)


def test_auto_precision_leaves_out_a_precision_in_which_no_layout_is_legal(recipes_cli):
    words = ("nemotronh_4b", "--gpu", "b200", "--gpus", "8", "--precision", "auto", "--json")
    assert set(json.loads(printed(recipes_cli, "plan", *words))["query"]["precision"]) == {"bf16", "fp8cs"}


@pytest.mark.parametrize("verb", ["fit", "scale"])
def test_fit_and_scale_choose_the_precision_as_plan_does(recipes_cli, verb):
    words = (verb, "llama3_8b", "--gpu", "h100", "--gpus", "8", "--precision", "auto", "--json")
    entry = json.loads(printed(recipes_cli, *words))[0]
    assert (entry if verb == "scale" else entry["pretrain"])["precision"] == "fp8cs"


def test_a_command_for_one_layout_says_where_auto_precision_applies(recipes_cli):
    words = ("explain", "llama3_8b", "--gpu", "h100", "--gpus", "8", "--precision", "auto")
    done = recipes_cli(*words)
    assert done.returncode == 2
    assert "plan, fit, scale and cost accept auto" in " ".join(done.stderr.split())


def test_a_plan_without_a_fitting_layout_exits_with_2_and_advice(recipes_cli):
    text = printed(recipes_cli, "plan", "llama31_405b", "--gpu", "h100", "--gpus", "8", "--gbs", "8", code=2)
    assert "no layout fits; the one with the least memory is" in text
    assert "GiB short" in text


def test_a_plan_without_a_legal_layout_suggests_no_search(recipes_cli):
    words = ("llama3_8b", "--gpu", "h100")
    text = " ".join(printed(recipes_cli, "plan", *words, "--nodes", "1", "--memory-cap", "5", code=2).split())
    more = "use more GPUs or raise the memory cap of 5 GiB"
    assert f"no single change is enough: {more}" in text
    cap = ("--option", "memory_cap=5.", "--json")
    points = json.loads(printed(recipes_cli, "scale", *words, "--gpus", "8", *cap))
    assert points[0]["reason"].endswith(more)
    assert "recipes plan" not in text + points[0]["reason"]


def test_layouts_that_differ_only_in_etp_have_distinct_labels():
    alike = [Layout(tp=2, sp=True, ep=4), Layout(tp=2, sp=True, ep=4, etp=1), Layout(tp=4, sp=True)]
    assert plan._layout_labels(alike) == ["TP2 EP4 SP, mbs 1, etp 2", "TP2 EP4 SP, mbs 1, etp 1", "TP4 SP, mbs 1"]
    two_precisions = [Layout(tp=2, sp=True, ep=4, etp=1)] * 2
    assert plan._layout_labels(two_precisions) == ["TP2 EP4 SP, mbs 1"] * 2


def test_plan_imports_a_configuration_and_lists_ignored_settings(recipes_cli, tmp_path):
    (tmp_path / "ds.json").write_text(
        json.dumps({"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}, "steps_per_print": 10})
    )
    text = printed(recipes_cli, "plan", *SMALL, "--from", "ds.json", cwd=tmp_path)
    assert "your configuration, DP only, mbs 1, zero3" in " ".join(text.split())
    assert "ignored settings, which the planner does not have: steps_per_print" in " ".join(text.split())


def test_a_model_without_a_kernel_is_refused_with_the_reason(recipes_cli):
    for words in (["deepseek_v3_sft_a100_bf16"], ["gemma_2b", "--gpu", "b300", "--gpus", "8"]):
        done = recipes_cli("plan", *words)
        assert done.returncode == 2
        assert "no attention backend" in " ".join(done.stderr.split())


def test_context_parallelism_of_a_learned_softmax_uses_all_to_all(recipes_cli):
    words = ["gpt_oss_20b", "--gpu", "h100", "--gpus", "16", "--seq", "65536", "--gbs", "64"]
    done = recipes_cli("memory", *words, "--layout", "cp=8,ep=8")
    assert done.returncode in (0, 2), done.stderr  # 2: it does not fit
    assert "backend" not in done.stdout + done.stderr


def test_a_calibration_of_other_gpus_prints_a_note(recipes_cli, tmp_path):
    (tmp_path / "my b200.toml").write_text("[calibration.b200]\ngeneral = 1.2\n")
    done = recipes_cli("plan", *SMALL, "--hardware", "my b200.toml", cwd=tmp_path)
    gpu = SMALL[SMALL.index("--gpu") + 1]
    assert f"note: my b200.toml calibrates only b200; {gpu} is planned with the built-in calibration" in done.stderr
    assert done.returncode == 0
    (tmp_path / "own.toml").write_text(f"[calibration.{gpu}]\ngeneral = 1.2\n")
    assert "built-in calibration" not in recipes_cli("plan", *SMALL, "--hardware", "own.toml", cwd=tmp_path).stderr


def test_a_tight_layout_is_marked_in_the_table(recipes_cli):
    text = printed(
        recipes_cli, "plan", "llama3_8b", "--gpu", "h100", "--nodes", "1", "--memory-cap", "20", env={"COLUMNS": "300"}
    )
    assert "no sharding, tight" in text
    assert "faster, but is tight" in text
