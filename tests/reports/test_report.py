import dataclasses
import json
from pathlib import Path

import pytest
from rich.console import Console

from superpod.common.json_files import append_line, write_json
from superpod.reports import sweep
from superpod.reports.report import Summary, build_rows, render, save_loss_plot, summary
from superpod.runtime.runs.run_folder import RunFolder

NAME = "tiny_pretrain_h100_bf16"


@pytest.fixture
def run(tmp_path):
    return RunFolder.create(tmp_path / "runs", NAME, facts={"unigram_entropy_nats": 6.25}, recipe_lines=[])


def step(number: int, attempt: str = "001", **more: object) -> dict:
    line = {
        "t": 100.0 + number,
        "attempt": attempt,
        "step": number,
        "loss": 10.0 / number,
        "val_loss": None,
        "lr": 1e-3,
    }
    speed = {"step_time_s": 0.5, "tokens": 1000 * number, "tokens_per_s_per_gpu": 500.0, "allocated_gib": 1.0}
    return line | speed | more


def write(run: RunFolder, *lines: dict) -> None:
    for line in lines:
        append_line(run.path / "metrics.jsonl", line)


def text(run: RunFolder) -> str:
    return rendered(summary(run))


def rendered(figures: Summary) -> str:
    console = Console(width=200, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(render(figures))
    console.file.close()
    return console.export_text()


def two_attempts(run: RunFolder) -> None:
    slow = {"step_time_s": 50.0, "tokens_per_s_per_gpu": 5.0}
    write(run, step(1) | slow, step(2), step(3, val_loss=4.5), step(4, loss=99.0))
    write(run, step(4, "002") | slow, step(5, "002", step_time_s=0.25, tokens_per_s_per_gpu=1000.0), step(6, "002"))
    first, second = run.new_attempt(), run.new_attempt()
    append_line(first.path / "heartbeat" / "1.jsonl", {"t": 1.0, "step": 3, "phase": "train", "allocated_gib": 2.5})
    first.finish("failed", exit_code=1)
    second.finish("failed", exit_code=1, message="out of memory")
    for attempt, seconds in ((first, 60.0), (second, 65.0)):
        result = attempt.result  # written again with an exact duration, however slow the machine is
        write_json(attempt.path / "result.json", result | {"started": result["ended"] - seconds})


def test_summary_of_two_attempts(run):
    two_attempts(run)
    figures = summary(run)
    assert (figures.recipe, figures.path, figures.attempts, figures.steps) == (NAME, run.path, 2, 6)
    assert (figures.loss_start, figures.loss_end) == pytest.approx((10.0, 10 / 6))
    assert (figures.val_loss, figures.val_step) == (4.5, 3)
    assert figures.tokens == 6000
    assert figures.unigram_entropy_nats == 6.25
    assert figures.tokens_per_s == 2000.0  # steps 2, 3, 6 at 2000, step 5 at 4000; the first of each attempt left out
    assert figures.tokens_per_s_per_gpu == 500.0
    assert figures.peak_allocated_gib == 2.5  # another rank than the one that writes the metrics
    assert figures.wall_time_s == pytest.approx(125, abs=1)
    assert figures.status.message == "out of memory"


def test_summary_of_a_run_without_a_step(run):
    figures = summary(run)
    assert (figures.steps, figures.attempts, figures.wall_time_s, figures.status.state) == (0, 0, 0.0, "queued")
    assert figures.loss_start is figures.tokens_per_s is figures.peak_allocated_gib is None
    assert "queued" in text(run)
    assert "None" not in text(run)


def test_a_single_step_still_has_a_throughput(run):
    write(run, step(1))
    assert summary(run).tokens_per_s == 2000.0


def test_unknown_tokens_are_left_out(run):
    write(run, step(1, tokens=None, tokens_per_s_per_gpu=None), step(2, tokens=None, tokens_per_s_per_gpu=None))
    assert summary(run).tokens_per_s is None
    assert "throughput" not in text(run)
    assert "loss" in text(run)


def test_an_attempt_without_a_word_counts_until_its_last_heartbeat(run):
    attempt = run.new_attempt()
    append_line(
        attempt.path / "heartbeat" / "0.jsonl", {"t": attempt.result["started"] + 30, "step": 3, "phase": "train"}
    )
    assert summary(run).wall_time_s == pytest.approx(30)


def test_the_table_reads_as_one_looks_for_it(run):
    two_attempts(run)
    shown = text(run)
    for words in (
        NAME,
        "failed: out of memory",
        "6 in 2 attempts",
        "10.0000 -> 1.6667 nats/token",
        "4.5000 nats/token",
        "6.2500 nats/token",
        "6,000",
        "2,000 tokens/s",
        "500 tokens/s",
        "2.50 GiB per rank",
        "2.08 min",
        str(run.path),
    ):
        assert words in shown


@pytest.mark.parametrize("odd", ["a[/b]c", "p[red]m", "x[/red]", "[attempt=y]"])
def test_brackets_in_paths_and_messages_are_no_markup(tmp_path, odd):
    run = RunFolder.create(tmp_path / odd.replace("/", ""), NAME, facts={}, recipe_lines=[])
    run.new_attempt().finish("failed", exit_code=1, message=f"because {odd}")
    shown = text(run)
    assert f"failed: because {odd}" in shown
    assert str(run.path) in shown
    figures = dataclasses.replace(summary(run), recipe=odd)
    assert odd in rendered(figures)


@pytest.mark.parametrize(
    "result", [{"started": "soon"}, {"started": None}, {"started": 1.0, "ended": "x"}, {"started": [], "ended": {}}]
)
@pytest.mark.parametrize("beat", [{"t": "noon"}, {"t": [1], "allocated_gib": "much"}, {"t": None}])
def test_times_that_are_none_do_not_stop_a_report(run, result, beat):
    attempt = run.new_attempt()
    write_json(attempt.path / "result.json", {"state": "failed", **result})
    append_line(attempt.path / "heartbeat" / "0.jsonl", beat)
    (attempt.path / "heartbeat" / "1.jsonl").mkdir()
    assert summary(run).wall_time_s >= 0
    assert "failed" in text(run)


def test_lines_without_a_attempt_or_with_odd_numbers_are_drawn(run, tmp_path):
    pytest.importorskip("matplotlib")
    write(run, {"step": 1, "loss": 2.0}, step(2, tokens=2000.5), step(3, attempt=7), step(4) | {"loss": "low"})  # pyright: ignore[reportArgumentType]
    write(run, {"step": 5, "loss": 2, "step_time_s": 1, "tokens": 9000, "tokens_per_s_per_gpu": 1})
    assert summary(run).steps == 5
    assert "9,000" in text(run)
    assert save_loss_plot(run, tmp_path / "loss.png").is_file()


@pytest.mark.parametrize("steps", [0, 1, 12])
def test_the_loss_curve_is_a_picture_of_900_by_500(run, tmp_path, steps):
    pytest.importorskip("matplotlib")
    write(
        run,
        *(step(n, "001" if n < 6 else "002", val_loss=9.0 / n if n % 4 == 0 else None) for n in range(1, steps + 1)),
    )
    data = save_loss_plot(run, tmp_path / "loss.png").read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    assert (int.from_bytes(data[16:20], "big"), int.from_bytes(data[20:24], "big")) == (900, 500)


def test_what_is_drawn(run, monkeypatch, tmp_path):
    figure = pytest.importorskip("matplotlib.figure")
    drawn = []
    save = figure.Figure.savefig
    monkeypatch.setattr(figure.Figure, "savefig", lambda self, *a, **k: (drawn.append(self), save(self, *a, **k)))
    two_attempts(run)
    save_loss_plot(run, tmp_path / "loss.png")
    (axes,) = drawn[0].axes
    lines = {line.get_label(): line for line in axes.get_lines()}
    assert list(lines["training loss"].get_xdata()) == [1, 2, 3, 4, 5, 6]
    assert list(lines["training loss"].get_ydata()) == pytest.approx([10, 5, 10 / 3, 2.5, 2, 10 / 6])
    assert list(lines["validation loss"].get_xdata()) == [3]
    assert list(lines["unigram entropy 6.25"].get_ydata()) == [6.25, 6.25]
    (began,) = [line for label, line in lines.items() if label.startswith("_")]
    assert list(began.get_xdata()) == [3.5, 3.5]
    assert [words.get_text().strip() for words in axes.texts] == ["attempt 002"]
    assert axes.get_title(loc="left") == NAME
    assert axes.get_ylabel() == "loss (nats per token)"
    assert axes.get_yscale() == axes.get_xscale() == "linear"


def test_a_rehearsal_claims_no_throughput_of_a_gpu(tmp_path):
    rehearsal = RunFolder.create(tmp_path, NAME, facts={"rehearsal": True}, recipe_lines=[])
    write(rehearsal, step(1), step(2))
    assert "a rehearsal on CPUs" in text(rehearsal)
    assert "per GPU" not in text(rehearsal)


def test_several_runs_are_one_table_and_one_picture(tmp_path, recipes_cli):
    runs = [
        RunFolder.create(tmp_path / "runs", NAME, facts={"overrides": [f"optim.config.lr={rate}"]}, recipe_lines=[])
        for rate in ("1e-3", "1e-4")
    ]
    for run, factor in zip(runs, (1.0, 2.0), strict=True):
        write(run, *(step(number, loss=factor * 10.0 / number) for number in range(1, 6)))
    paths = [str(run.path) for run in runs]
    done = recipes_cli("report", *paths, "--plot", "losses.svg", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    head, *rows = [line.split() for line in done.stdout.splitlines()[1:]]
    assert head[:2] == ["lr", "state"]
    assert {row[0]: row[3] for row in rows} == {"1e-3": "2.0000", "1e-4": "4.0000"}
    picture = (tmp_path / "losses.svg").read_text()
    assert [run for run in runs if f"<!-- {run.recipe} {run.path.name} -->" in picture] == runs  # in the legend
    for colour in ("#0072b2", "#d55e00"):  # a curve and its sample in the legend
        assert len([path for path in picture.split("<path") if f"stroke: {colour}" in path]) >= 2
    printed = json.loads(recipes_cli("report", *paths, "--json", cwd=tmp_path).stdout)
    assert [row["values"]["optim.config.lr"] for row in printed] == ["1e-3", "1e-4"]


@pytest.mark.parametrize(
    ("plot", "says"), [("losses.txt", "is not a .png"), ("nowhere/losses.png", "folder nowhere does not exist")]
)
def test_a_picture_that_cannot_be_drawn_is_refused(plot, says, run, tmp_path, recipes_cli):
    write(run, step(1), step(2))
    done = recipes_cli("report", str(run.path), "--json", "--plot", plot, cwd=tmp_path)
    assert done.returncode == 2
    assert says in done.stderr


def rows_of(path: Path, *rows: str) -> None:
    path.write_text("".join(f"{row}\n" for row in rows))


def test_losses_that_are_no_number_stand_with_the_losses_and_rows_are_counted(run, recipes_cli):
    good = (json.dumps(step(n)) for n in (1, 2))
    bad = ['{"step": 3, "loss": NaN, "step_time_s": 0.5}', '{"step": 4, "loss": Infinity, "tokens": 1e999}']
    rows_of(run.path / "metrics.jsonl", *good, *bad, '{"step": 5, "loss": null}', '{"step": 6, "lo', '{"n": 1}')
    words = "10.0000 -> 5.0000 nats/token at step 2; non-finite (nan, inf) at 3 steps: steps 3 to 5, until the end"
    assert dict(build_rows(summary(run)))["loss"] == words
    assert (summary(run).steps, summary(run).loss_end, summary(run).losses.bad) == (5, None, 3)
    done = recipes_cli("report", run.path, env={"COLUMNS": "200"})
    assert words in done.stdout
    assert "2 rows of metrics.jsonl" in done.stdout
    assert "the loss has been nan since step 3" in done.stdout
    answer = json.loads(recipes_cli("report", run.path, "--json").stdout)
    assert (answer["losses"]["bad"], answer["figures"]["losses"]["bad_from"]) == (3, 3)


def test_a_run_that_recovers_says_at_which_steps_it_had_no_loss(run):
    rows_of(run.path / "metrics.jsonl", json.dumps(step(1)), '{"step": 2, "loss": NaN}', json.dumps(step(3)))
    assert summary(run).losses.text == "10.0000 -> 3.3333 nats/token; non-finite (nan, inf) at 1 step: step 2"


def test_a_member_of_a_sweep_that_ends_without_a_number_comes_last(run, tmp_path):
    members = []
    for name, losses in (("good", (9.0, 8.0)), ("diverged", (2.0, None))):
        one = RunFolder.create(tmp_path / "sweep", name, facts={}, recipe_lines=[])
        rows_of(one.path / "metrics.jsonl", *(json.dumps({"step": i, "loss": x}) for i, x in enumerate(losses, 1)))
        members.append(sweep.Member.from_run(one))
    assert [m.path.parent.name for m in sorted(members, key=lambda m: m.score)] == ["good", "diverged"]


def test_what_was_measured_stands_beside_what_was_planned(run):
    write(run, step(1), step(2), step(3))
    layout = {"tokens_per_s_per_gpu": 600.0, "why": ["bound by compute, 87% of the step"]}
    write_json(run.path / "plan.json", {"layouts": [layout]})
    assert "600 tokens/s per GPU, 20% more than measured; bound by compute, 87% of the step" in text(run)
    write_json(run.path / "run.json", run.facts | {"rehearsal": True})
    assert "planned" not in text(run)


def test_a_link_in_the_place_of_a_picture_is_replaced_and_what_it_names_is_left_alone(run, tmp_path):
    two_attempts(run)
    other = tmp_path / "theirs.txt"
    other.write_text("theirs")
    (run.path / "loss.png").symlink_to(other)
    save_loss_plot(run, run.path / "loss.png")
    assert other.read_text() == "theirs"
    assert not (run.path / "loss.png").is_symlink()
    assert (run.path / "loss.png").read_bytes().startswith(b"\x89PNG")
