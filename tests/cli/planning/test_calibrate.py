"""`recipes calibrate`, and `--hardware` with the file that it writes."""

import csv
import json
import re
import shlex
from dataclasses import replace
from pathlib import Path

import pytest

from superpod.cli import app
from superpod.cli.options import hardware_option
from superpod.cli.planning import calibrate
from superpod.collection import recipe_job
from superpod.collection.registry import find
from superpod.common import collection
from superpod.common.json_files import append_line, write_json
from superpod.errors import UserError
from superpod.planner import hardware, plans
from superpod.planner.formats import config_files
from superpod.planner.tables import measured, published
from superpod.planner.timing import steptime
from superpod.reports import measured_runs
from superpod.runtime.runs.run_folder import RunFolder
from tests.cli.planning.small_plans import printed

HEAD = "id,model,gpu,gpus,precision,seq,gbs,mbs,tp,pp,vp,outcome,tokens_per_s_per_gpu\n"
ROWS = (("a", 16, 2, 1, ""), ("b", 64, 2, 1, ""), ("c", 64, 4, 2, "2"))
ROOT = Path(__file__).parents[3]
RECIPE = "llama3_8b_pretrain_h100_bf16"


@pytest.fixture
def rows(tmp_path):
    """Write a table of three runs that took 1.3 times the planned time, a failed one and one of an unknown model."""
    path = tmp_path / "runs.csv"
    lines = [HEAD]
    for name, gpus, tp, pp, vp in ROWS:
        row = f"{name},llama3_8b,h100,{gpus},bf16,8192,128,1,{tp},{pp},{vp},ok,"
        job = published.job(next(csv.DictReader([HEAD, row])))
        lines.append(f"{row}{job.tokens / plans.seconds(job) / job.gpus / 1.3:.6g}\n")
    lines += ["d,llama3_8b,h100,16,bf16,8192,128,1,2,1,,failed,1\n", "e,nothing,h100,16,bf16,8192,128,1,2,1,,ok,1\n"]
    path.write_text("".join(lines))
    return path


@pytest.fixture
def slower(tmp_path, monkeypatch):
    """Write a hardware file in which an H100 takes twice as long."""
    monkeypatch.setenv(collection.HARDWARE, "")
    path = tmp_path / "slower.toml"
    path.write_text("[calibration.h100]\ngeneral = 2.0\n")
    yield path
    monkeypatch.setenv(collection.HARDWARE, "")
    hardware.builtin.cache_clear()


def step_time(recipes_cli, *words, **how):
    return json.loads(printed(recipes_cli, *words, "--json", **how))["step_time_s"]


@pytest.mark.slow
def test_a_calibration_makes_plans_match_the_table(recipes_cli, rows, tmp_path):
    done = recipes_cli("calibrate", "--from", "runs.csv", "--out", "mine.toml", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert re.search(r"h100, 3 runs: median error 23\.1% with the defaults, [01]\.\d% calibrated", done.stdout)
    shown = re.search(r"general (1\.(?:29|3)\d*)", done.stdout)
    assert shown
    assert "skipped: e: there is no model" in done.stderr
    written = config_files.read_toml(tmp_path / "mine.toml")["calibration"]["h100"]["general"]
    assert written == pytest.approx(1.3, rel=0.03)
    assert float(shown[1]) == pytest.approx(written, abs=0.01)
    words = ("check", "llama3_8b", "--gpu", "h100", "--gpus", "16", "--gbs", "128", "--layout", "tp=2,sp")
    shipped = step_time(recipes_cli, *words, cwd=tmp_path)
    assert step_time(recipes_cli, *words, "--hardware", "mine.toml", cwd=tmp_path) == pytest.approx(
        1.3 * shipped, rel=0.02
    )
    printed(
        recipes_cli, "predict", "--from", "runs.csv", "--out", "p.csv", "--hardware", "mine.toml", cwd=tmp_path, code=0
    )
    with (tmp_path / "p.csv").open() as predictions, rows.open() as table:
        for mine, row in list(zip(csv.DictReader(predictions), csv.DictReader(table), strict=True))[:3]:
            assert float(mine["tokens_per_s_per_gpu"]) == pytest.approx(float(row["tokens_per_s_per_gpu"]), rel=0.02)


def test_failed_rows_are_skipped(rows):
    runs, problems = measured.read(rows)
    assert [run.name for run in runs] == ["a", "b", "c"]
    assert len(problems) == 1


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("id,model,gpu,tp\n1,llama3_8b,h100,1\n", "has no column step_time_s or tokens_per_s_per_gpu"),
        ("id,step_time_s\n1,2\n", "has no column model, gpu, tp"),
        ("model,gpu,tpp,step_time_s\nllama3_8b,h100,2,1\n", "has no column tp"),
        ("model;gpu;tp;step_time_s\nllama3_8b;h100;2;1\n", "has semicolons between its cells"),
        ("model,gpu,tp,tp,step_time_s\nllama3_8b,h100,2,1,1\n", "has two columns named tp"),
        ("", "is empty"),
    ],
)
def test_a_table_with_wrong_columns_is_refused(text, words, tmp_path):
    (tmp_path / "t.csv").write_text(text)
    with pytest.raises(UserError, match=words) as refused:
        measured.read(tmp_path / "t.csv")
    assert refused.value.hint
    if "tpp" in text:
        assert "column 'tpp' is ignored; did you mean tp?" in refused.value.hint


@pytest.mark.parametrize("cell", ["0", "-1", "nan", "inf", "fast"])
def test_an_invalid_time_is_reported_for_its_row(cell, tmp_path):
    (tmp_path / "t.csv").write_text(f"id,model,gpu,gpus,tp,step_time_s\nx,llama3_8b,h100,16,2,{cell}\n")
    runs, problems = measured.read(tmp_path / "t.csv")
    assert runs == []
    assert "x: step_time_s must be" in problems[0]


def test_calibrate_without_runs_is_refused(recipes_cli, tmp_path):
    done = recipes_cli("calibrate", cwd=tmp_path)
    assert done.returncode == 2
    assert "calibrate needs measured runs" in done.stderr


def run_folder(tmp_path, slower_by: float) -> RunFolder:
    """Create a finished run that is slower than its plan by a factor."""
    job = recipe_job.job(find(RECIPE), None)
    run = RunFolder.create(tmp_path / "runs", RECIPE, facts={}, recipe_lines=[])
    plan = plans.describe_run(job)
    write_json(run.path / "plan.json", plan)
    rate = plan["layouts"][0]["tokens_per_s_per_gpu"] / slower_by
    for step in range(1, 8):
        speed = {"step_time_s": 1.0, "tokens": 1000 * step, "tokens_per_s_per_gpu": rate}
        append_line(run.path / "metrics.jsonl", {"t": 1.0, "attempt": "001", "step": step, "loss": 1.0, **speed})
    attempt = run.new_attempt()
    (run.path / "done").touch()
    attempt.finish("done", exit_code=0, started=1.0)
    return run


def test_a_run_folder_is_a_measurement(tmp_path):
    run = run_folder(tmp_path, 1.25)
    one = measured_runs.measure_run(run)
    assert one.job == recipe_job.job(find(RECIPE), None)
    assert one.seconds == pytest.approx(1.25 * plans.seconds(one.job))


@pytest.mark.slow
def test_a_report_far_from_its_plan_suggests_calibration(recipes_cli, tmp_path):
    run = run_folder(tmp_path, 1.25)
    report = printed(recipes_cli, "report", str(run.path), cwd=tmp_path, env={"COLUMNS": "300"})
    assert f"recipes calibrate {run.path} --out mine.toml" in report
    assert "1 run: median error 20.0%" in printed(
        recipes_cli, "calibrate", str(run.path), "--out", "mine.toml", cwd=tmp_path
    )
    assert (tmp_path / "mine.toml").read_text().count("[calibration.h100]") == 1
    near = run_folder(tmp_path / "near", 1.02)
    assert "recipes calibrate" not in printed(recipes_cli, "report", str(near.path), cwd=tmp_path)


def test_a_rehearsal_is_refused(tmp_path):
    run = run_folder(tmp_path, 1.0)
    write_json(run.path / "run.json", {**run.facts, "rehearsal": True})
    with pytest.raises(UserError, match="is a rehearsal"):
        measured_runs.measure_run(run)


def test_use_hardware_changes_plans_of_recipes(slower):
    before = plans.seconds(recipe_job.job(find(RECIPE), None))
    hardware_option.use_hardware(slower)
    after = plans.seconds(recipe_job.job(find(RECIPE), None))
    assert after > 1.7 * before
    assert slower in dict(collection.all_files()).values()


@pytest.mark.parametrize("verb", ["submit", "render"])
def test_submit_and_render_accept_hardware(verb, slower):
    with pytest.raises(UserError, match="no recipe"):
        app.COMMANDS["Slurm"][verb](name="nothing_at_all", cluster="dgx_h100", hardware=slower)
    assert hardware.gpu("h100").calibrated_as == "h100?general=2.0"


def test_an_invalid_hardware_file_is_refused_with_its_name(tmp_path, slower):
    slower.write_text("[calibration.h100]\ngeneral = 0\n")
    with pytest.raises(
        UserError, match=r"slower.toml:1 \[calibration.h100\]: general must be a number between 0.01 and 200, not 0"
    ):
        hardware_option.use_hardware(slower)


def test_a_missing_table_and_a_misspelt_column_are_reported(recipes_cli, rows, tmp_path):
    missing = recipes_cli("calibrate", "--from", "missing.csv", cwd=tmp_path)
    assert missing.returncode == 2
    assert "missing.csv does not exist" in missing.stderr
    assert "pass a table of measured runs" in missing.stderr
    (tmp_path / "typo.csv").write_text(rows.read_text().replace(",precision,", ",precison,"))
    done = recipes_cli("calibrate", "--from", "typo.csv", cwd=tmp_path)
    assert "column 'precison' is ignored; did you mean precision?" in done.stderr


@pytest.mark.parametrize("name", ["rows", "env.sh"])
def test_another_file_is_not_overwritten(recipes_cli, rows, name, tmp_path):
    target = rows if name == "rows" else tmp_path / name
    target.write_text(target.read_text() if target.exists() else "export A=1\n")
    before = target.read_text()
    done = recipes_cli("calibrate", "--from", rows, "--out", target)
    assert done.returncode == 2
    assert "not written by `recipes calibrate`" in done.stderr
    assert target.read_text() == before


def changed_rates(rows, **rates):
    """Replace the rates of some rows of the table."""
    lines = [
        ",".join([*line.split(",")[:-1], rates.get(line[0], line.split(",")[-1])])
        for line in rows.read_text().splitlines()
    ]
    rows.write_text("\n".join(lines) + "\n")


@pytest.mark.parametrize(
    ("rate", "words"),
    [
        ("1e9", r"b: 1,000,000,000 tokens/s/GPU .* the dense bf16 peak of the h100 is 989"),
        ("25000", r"b: 25,000 tokens/s/GPU \(a step of 0.655\d? s\) need 1,2\d\d TFLOP/s .* of the h100"),
        ("-3", "b: tokens_per_s_per_gpu must be a number greater than 0, not '-3'"),
        ("0", "b: tokens_per_s_per_gpu must be a number greater than 0, not '0'"),
        ("nan", "b: tokens_per_s_per_gpu must be a number greater than 0, not 'nan'"),
        ("1e300", r"b: a step of \d.\d\de-2\d\d s is under a microsecond"),
        ('"6,0"', "b: tokens_per_s_per_gpu must be a number with a decimal point, not '6,0'; use 6.0"),
        ("6,0", "b: the row has 14 cells, but the header has 13 columns: the extra cells are '0'"),
        ("1e-3", r"b: a step of .* s is over 200 times the planned .* s"),
    ],
)
@pytest.mark.slow
def test_an_impossible_rate_is_refused_with_the_numbers(recipes_cli, rows, rate, words, tmp_path):
    changed_rates(rows, b=rate)
    done = recipes_cli("calibrate", "--from", "runs.csv", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert re.search(f"skipped: ({words})", done.stderr), done.stderr
    assert "h100, 2 runs: median error 23" in done.stdout


def test_a_table_of_impossible_rows_is_refused(recipes_cli, rows, tmp_path):
    changed_rates(rows, a="1e9", b="1e9", c="1e9")
    done = recipes_cli("calibrate", "--from", "runs.csv", "--out", "mine.toml", cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.count("peak of the h100 is 989") == 3
    assert "next: correct the skipped rows above" in done.stderr
    assert not (tmp_path / "mine.toml").exists()


def test_packed_fine_tuning_may_exceed_the_peak(rows):
    """At 131,072 tokens most FLOPs are attention, which packed samples of a few thousand tokens hardly need."""
    unpacked = measured.read(rows)[0][0]
    job = unpacked.job.replace(seq=131_072)
    at_peak = unpacked.seconds * float(steptime.mfu(job, unpacked.seconds))
    just_above = replace(unpacked, job=job, seconds=at_peak / 1.01)
    assert "989" in measured_runs.explain_impossible(just_above)
    assert measured_runs.explain_impossible(replace(just_above, seconds=at_peak * 1.01)) == ""
    packed = replace(just_above, job=job.replace(task="sft"))
    assert measured_runs.explain_impossible(packed) == ""
    assert measured_runs.explain_impossible(replace(packed, seconds=at_peak / 10))


@pytest.mark.parametrize("table", ["step_time.csv", "nanotron.csv"])
@pytest.mark.slow
def test_published_rows_are_possible(table):
    runs, _ = measured.read(ROOT / "benchmarks" / "reference" / table)
    assert len(runs) > 600
    assert [run.name for run in runs if measured_runs.explain_impossible(run)] == []


@pytest.mark.parametrize(
    ("count", "words"),
    [(1, "warning: 1 run cannot"), (2, "warning: 2 runs cannot"), (3, "")],
)
@pytest.mark.slow
def test_fewer_than_three_runs_give_a_warning(recipes_cli, rows, count, words, tmp_path):
    rows.write_text("".join(rows.read_text().splitlines(keepends=True)[: 1 + count]))
    shown = printed(recipes_cli, "calibrate", "--from", "runs.csv", cwd=tmp_path, env={"COLUMNS": "400"})
    assert ("cannot determine the prediction error" in shown) == bool(words)
    assert words in shown


@pytest.mark.slow
def test_an_implausible_run_gives_a_warning(recipes_cli, rows, tmp_path):
    changed_rates(rows, c="100")
    shown = printed(recipes_cli, "calibrate", "--from", "runs.csv", cwd=tmp_path, env={"COLUMNS": "400"})
    (line,) = [line for line in shown.splitlines() if "times its planned step" in line]
    assert line.strip().startswith("warning: c took ")


def test_a_run_folder_above_the_peak_is_refused(tmp_path):
    run = run_folder(tmp_path, 1e-6)
    with pytest.raises(UserError, match=r"need .* TFLOP/s .* the dense bf16 peak of the h100 is 989") as refused:
        measured_runs.measure_run(run)
    assert refused.value.hint


def test_an_illegal_row_is_skipped_and_the_next_command_is_quoted(recipes_cli, tmp_path):
    rows = ["model,gpu,gpus,precision,seq,gbs,mbs,tp,pp,tokens_per_s_per_gpu"]
    rows += [f"llama3_8b,h100,{gpus},bf16,8192,128,1,{tp},1,8000" for gpus, tp in ((16, 2), (64, 3), (32, 2))]
    (tmp_path / "runs.csv").write_text("\n".join(rows) + "\n")
    out = tmp_path / "it's mine.toml"
    done = recipes_cli("calibrate", "--from", "runs.csv", "--out", out, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "skipped: line 3: tp 3 x pp 1 x cp 1 = 3 must divide the number of GPUs, which is 64" in done.stderr
    assert done.stdout.rstrip().endswith(f"--hardware {shlex.quote(str(out))}")


COLUMNS = "id,model,gpu,gpus,precision,seq,gbs,mbs,tp,recompute,step_time_s,tokens_per_s_per_gpu,allocated_gib_max"
"""Columns of the tables below."""
FINE = "fine,llama3_8b,h100,16,bf16,8192,128,1,2,,9,,"
OTHER = "other,llama3_8b,h100,32,bf16,8192,128,1,4,,5,,"


def calibrate_rows(capsys, tmp_path, *rows: str) -> tuple[str, str]:
    """Calibrate with such rows; return what is printed on stdout and stderr."""
    (tmp_path / "t.csv").write_text("\n".join([COLUMNS, *rows]) + "\n")
    calibrate.calibrate(rows=tmp_path / "t.csv")
    shown = capsys.readouterr()
    return shown.out, shown.err


@pytest.mark.parametrize(
    ("row", "words"),
    [
        (
            "x,llama3_8b,h100,16,bf16,8192,128,1,2,,9,,5000",
            "5,000 GiB allocated, but the h100 has 79.18 GiB",
        ),
        (
            "x,llama3_8b,h100,16,bf16,8192,128,1,2,,9,8000,",
            "step_time_s is 9, but tokens_per_s_per_gpu 8000 means 8.192 at gbs 128 x seq 8192 on 16 GPUs",
        ),
        ("x,llama3_8b,h1000,16,bf16,8192,128,1,2,,9,,", "there is no GPU 'h1000'; did you mean h100"),
        ("x,lama3_8b,h100,16,bf16,8192,128,1,2,,9,,", "there is no model 'lama3_8b'; did you mean llama3_8b"),
        ("x,llama3_8b,h100,16,bf16,8192,128,1,2,,1e-300,,", "a step of 1e-300 s is under a microsecond"),
        (
            'x,llama3_8b,h100,16,bf16,8192,128,1,2,,"8,0",,',
            "step_time_s must be a number with a decimal point, not '8,0'; use 8.0",
        ),
    ],
)
def test_an_impossible_row_is_skipped_with_its_numbers(capsys, tmp_path, row, words):
    findings, skipped = calibrate_rows(capsys, tmp_path, FINE, row)
    assert f"skipped: x: {words}" in skipped
    assert "h100, 1 run:" in findings
    assert "bytes that a rank allocates" not in findings


def test_times_that_differ_by_rounding_are_consistent(capsys, tmp_path):
    findings, skipped = calibrate_rows(capsys, tmp_path, FINE, "x,llama3_8b,h100,16,bf16,8192,128,1,2,,9,7300,")
    assert (skipped, "h100, 2 runs:" in findings) == ("", True)


@pytest.mark.slow
def test_rows_that_ran_but_do_not_fit_as_planned_are_named(capsys, tmp_path):
    findings, warned = calibrate_rows(capsys, tmp_path, FINE, "x,llama3_70b,h100,16,bf16,8192,128,1,2,,90,,")
    assert re.search(r"warning: .* out of memory for 1 measured run: x \(\d+\.\d GiB more than", warned)
    assert "recompute and allocated_gib_max" in warned
    assert "h100, 2 runs:" in findings
    assert calibrate_rows(capsys, tmp_path, FINE, OTHER)[1] == ""


def test_runs_of_a_single_layout_give_a_warning(capsys, tmp_path):
    twice = FINE.replace("fine", "twice").replace(",9,", ",9.01,")
    assert "all 2 runs have the same layout" in calibrate_rows(capsys, tmp_path, FINE, twice)[0]
    assert "the same layout" not in calibrate_rows(capsys, tmp_path, FINE, OTHER)[0]
    assert "the same layout" not in calibrate_rows(capsys, tmp_path, FINE)[0]


def test_a_table_without_a_finished_run_is_refused(tmp_path):
    (tmp_path / "t.csv").write_text(f"{COLUMNS}\n{FINE.replace(',9,', ',,')}\n")
    with pytest.raises(UserError, match="has no row") as refused:
        calibrate.calibrate(rows=tmp_path / "t.csv")
    assert "step_time_s or tokens_per_s_per_gpu" in refused.value.hint


def test_more_than_five_skipped_rows_are_counted(capsys, tmp_path):
    wrong = "x,nothing,h100,16,bf16,8192,128,1,2,,9,,"
    assert "skipped: 1 more row\n" in calibrate_rows(capsys, tmp_path, FINE, *[wrong] * 6)[1]


def test_a_row_without_an_id_is_reported_by_its_line(tmp_path):
    lines = [
        'id,model,gpu,tp,step_time_s,"notes',
        'of mine"',
        "",
        '"a",llama3_8b,h100,1,0,"two',
        'lines"',
        ",x,h100,1,1,",
    ]
    (tmp_path / "t.csv").write_text("\n".join(lines))
    problems = measured.read(tmp_path / "t.csv")[1]
    assert [problem.partition(":")[0] for problem in problems] == ["a", "line 6"]
