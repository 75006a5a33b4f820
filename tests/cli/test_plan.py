"""The planner on the command line: what it says, what a program reads, exit codes, and no torch."""

import csv
import json
import subprocess
import sys

import pytest

SMALL = ("llama3_8b", "--gpu", "h100", "--gpus", "16", "--gbs", "64")


def said(recipes_cli, *words, code=0, **how):
    done = recipes_cli(*words, **how)
    assert done.returncode == code, done.stderr + done.stdout
    assert "Traceback" not in done.stderr
    return done.stdout


def test_plan_ranks_and_says_why(recipes_cli):
    text = said(recipes_cli, "plan", *SMALL, "--top", "3", "--compare-rules")
    lines = text.splitlines()
    assert "legal layouts" in lines[0]
    assert "fit" in lines[0]
    assert lines[1].startswith("layout")
    seconds = [float(line.split()[-5]) for line in lines[2:5]]
    assert seconds == sorted(seconds)
    assert "of the step" in text
    assert "the textbook's rules choose" in text


@pytest.mark.parametrize("more", [[], ["--precision", "auto"], ["--gpus", "8", "--gbs", "32"]], ids=" ".join)
def test_plan_fits_a_terminal_of_80_columns(more, recipes_cli):
    text = said(recipes_cli, "plan", *SMALL, "--top", "30", "--compare-rules", *more, env={"COLUMNS": "80"})
    assert "--layout" in text
    assert [line for line in text.splitlines() if len(line) > 80] == []


def test_plan_json_is_what_contracts_says(recipes_cli):
    plan = json.loads(said(recipes_cli, "plan", *SMALL, "--json", "--top", "4"))
    assert plan["schema"] == 1
    assert plan["candidates"] > 100
    assert plan["query"]["gpus"] == 16
    assert len(plan["layouts"]) == 4
    for each in plan["layouts"]:
        assert sum(each["terms_s"].values()) == pytest.approx(each["step_time_s"])
        assert [stage["rank"] for stage in each["stages"]] == list(range(each["layout"]["pp"]))
        assert all(size >= 0 for stage in each["stages"] for size in stage["bytes"].values())
        assert each["tokens_per_s_per_gpu"] == pytest.approx(64 * 8192 / each["step_time_s"] / 16)
        assert 0 < each["mfu"] < 1
        assert each["checkpoint_bytes"] > 8e9 * 2
        assert each["why"]
        assert each["verdict"] == "ok"


def test_auto_precision_tries_what_the_gpu_has(recipes_cli):
    plan = json.loads(said(recipes_cli, "plan", *SMALL, "--precision", "auto", "--json"))
    assert set(plan["query"]["precision"]) == {"bf16", "fp8cs"}
    seconds = [each["step_time_s"] for each in plan["layouts"]]
    assert seconds == sorted(seconds)


def test_a_plan_that_fits_nowhere_says_what_would_help_and_exits_with_2(recipes_cli):
    text = said(recipes_cli, "plan", "llama31_405b", "--gpu", "h100", "--gpus", "8", "--gbs", "8", code=2)
    assert "nothing fits; closest is" in text
    assert "GiB short" in text


def test_plan_starts_from_another_tool_s_file_and_names_what_is_left_out(recipes_cli, tmp_path):
    (tmp_path / "ds.json").write_text(
        json.dumps({"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}, "steps_per_print": 10})
    )
    text = said(recipes_cli, "plan", *SMALL, "--from", "ds.json", cwd=tmp_path)
    assert "yours, DP only, mbs 1, zero3" in " ".join(text.split())
    assert "left out: steps_per_print" in " ".join(text.split())


def test_check_refuses_with_the_rule_the_numbers_and_the_next_move(recipes_cli):
    words = ("check", "llama3_70b", "--gpu", "h100", "--nodes", "6", "--layout", "tp=8,pp=4,cp=2")
    text = said(recipes_cli, *words, code=2)
    assert "tp 8 x pp 4 x cp 2 = 64 must divide the number of GPUs, which is 48" in text
    assert "next: " in text
    report = json.loads(said(recipes_cli, *words, "--json", code=2))
    assert report["verdict"] == "illegal"
    assert report["broken"][0]["rule"]


@pytest.mark.parametrize("name", ["llama3_8b_pretrain_h100_bf16", "llama31_405b_pretrain_h100_bf16", "tiny_llama3"])
def test_the_recipes_of_this_project_pass_their_own_check(recipes_cli, name):
    assert "ok: legal;" in said(recipes_cli, "check", name)


@pytest.mark.parametrize(
    ("words", "code", "advised"),
    [
        (["llama3_70b", "--gpu", "h100", "--gpus", "16"], 2, True),
        (["llama3_70b", "--gpu", "h100", "--gpus", "16", "--layout", "tp=3"], 2, True),
        (["llama3_8b", "--gpu", "h100", "--gpus", "16", "--layout", "tp=2"], 0, False),
        (["llama31_405b_pretrain_h100_bf16", "--layout", "tp=1"], 2, False),
    ],
)
def test_check_of_a_model_knows_who_finds_a_layout(words, code, advised, recipes_cli):
    text = said(recipes_cli, "check", *words, code=code)
    assert ("next: recipes plan llama3_70b --gpu h100 --gpus 16 ranks" in text) == advised


def test_check_says_what_makes_a_run_fit(recipes_cli):
    text = said(recipes_cli, "check", "llama3_70b", "--gpu", "h100", "--nodes", "8", "--layout", "tp=4,pp=2", code=2)
    assert "GiB short" in text
    assert "frees" in text


def test_memory_shows_every_stage(recipes_cli):
    words = ("memory", "llama3_70b_pretrain_h100_bf16", "--layout", "tp=4,pp=4,vp=5,cp=2,sp")
    text = said(recipes_cli, *words)
    assert [line.split()[1] for line in text.splitlines() if line.startswith("rank")] == ["0", "1", "2", "3"]
    stages = json.loads(said(recipes_cli, *words, "--json"))["stages"]
    assert stages[0]["bytes"]["activations"] > stages[3]["bytes"]["activations"] > 0


def test_explain_adds_up_to_the_step(recipes_cli):
    text = said(recipes_cli, "explain", "llama3_70b_pretrain_h100_bf16")
    shares = [float(line.split("%")[0]) for line in text.splitlines() if line.strip()[0].isdigit()]
    assert 95 < sum(shares) < 101
    assert "bound by" in text


def test_cost_and_scale(recipes_cli):
    words = ("cost", "llama3_70b_pretrain_h100_bf16", "--tokens", "1T", "--price", "2", "--json")
    cost = json.loads(said(recipes_cli, *words))
    assert cost["gpu_hours"] == pytest.approx(1e12 / cost["tokens_per_s_per_gpu"] / 3600)
    assert cost["money"] == pytest.approx(2 * cost["gpu_hours"])
    points = json.loads(said(recipes_cli, "scale", "llama3_8b", "--gpu", "h100", "--gpus", "8,16", "--json"))
    assert [(p["kind"], p["gpus"], p["gbs"]) for p in points] == [
        *(("strong", 8, 512), ("strong", 16, 512), ("weak", 8, 512), ("weak", 16, 1024))
    ]
    assert points[0]["efficiency"] == pytest.approx(1)


def test_predict_writes_a_row_for_every_row(recipes_cli, tmp_path):
    (tmp_path / "rows.csv").write_text("id,model,gpu,gpus,tp,gbs\n1,llama3_8b,h100,16,2,64\n2,nothing,h100,16,2,64\n")
    assert "1 ok, 1 unsupported" in said(recipes_cli, "predict", "--from", "rows.csv", "--out", "o.csv", cwd=tmp_path)
    with (tmp_path / "o.csv").open() as file:
        assert [row["verdict"] for row in csv.DictReader(file)] == ["ok", "unsupported"]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["plan", "llama3_8c", "--gpu", "h100", "--gpus", "8"], "no model is called 'llama3_8c'"),
        (["plan", "llama3_8c", "--gpu", "h100", "--gpus", "8"], "did you mean llama3_8b or"),
        (["plan", "llama3_8b"], "say on which GPU"),
        (["plan", "llama3_8b", "--gpu", "h1000", "--gpus", "8"], "no node is called 'h1000'"),
        (["plan", "llama3_8b", "--gpu", "h100"], "say on how many GPUs"),
        (["plan", "llama3_8b", "--gpu", "h100", "--gpus", "0"], "--gpus is 0"),
        (["plan", *SMALL, "--gbs", "-5"], "--gbs is -5"),
        (["plan", *SMALL, "--precision", "fp7"], "no precision is called 'fp7'"),
        (["plan", *SMALL, "--fix", "tq=3"], "no layout key that can be fixed is called 'tq'"),
        (["plan", *SMALL, "--memory-cap", "nan"], "--memory-cap is nan"),
        (["plan", *SMALL, "--from", "no such file"], "no such file cannot be read"),
        (["plan", *SMALL, "--hardware", "/nowhere.toml"], "/nowhere.toml cannot be read"),
        (["plan", *SMALL, "--option", "moment=bf16"], "no option is called 'moment'"),
        (["plan", *SMALL, "--option", "moments=9"], "moments"),
        (["check", "llama3_8b", "--gpu", "h100", "--nodes", "1", "--layout", "tp=x"], "tp takes a whole number"),
        (["check", "llama3_8b", "--gpu", "h100", "--nodes", "1", "--layout", "tp=1,tp=2"], "tp twice"),
        (["check", "llama3_8b_pretrain_h100_bf15"], "llama3_8b_pretrain_h100_bf16"),
        (["memory", "llama3_8b", "--gpu", "h100", "--nodes", "1", "--layout", "tp=3"], "tp 3"),
        (["cost", "tiny_llama3", "--tokens", "lots"], "--tokens is 'lots'"),
        (["scale", "llama3_8b", "--gpu", "h100", "--gpus", "8,,x"], "--gpus is '8,,x'"),
        (["predict", "--from", "none.csv", "--out", "o.csv"], "none.csv cannot be read"),
        (["plan", "layers=2,hidden=64,heads=3,vocab=10", "--gpu", "h100", "--gpus", "8"], "hidden 64 is no multiple"),
        (["plan", "layers=2,hidden", "--gpu", "h100", "--gpus", "8"], "hidden"),
    ],
)
def test_a_mistake_is_one_message_and_exit_code_2(words, says, recipes_cli, tmp_path):
    done = recipes_cli(*words, cwd=tmp_path)
    assert done.returncode == 2, done.stdout + done.stderr
    assert says in " ".join(done.stderr.split())
    assert "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("words", [["plan", *SMALL], ["check", "llama3_8b_pretrain_h100_bf16"]], ids=" ".join)
def test_planning_needs_no_torch(words):
    command = [sys.executable, "-X", "importtime", "-m", "superpod.cli", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    imported = {line.rpartition("|")[2].strip().partition(".")[0] for line in done.stderr.splitlines() if "|" in line}
    assert "numpy" in imported
    assert not imported & {"torch", "nemo", "nemo_run", "megatron", "lightning", "transformers", "scipy", "matplotlib"}
