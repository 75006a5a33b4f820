"""Logs that this project did not make: what a report reads of them."""

import gzip
import re

import pytest

from superpod.errors import UserError
from superpod.reports import report_figures, report_text
from superpod.reports.external import external_runs
from superpod.reports.runs import run_record
from tests.reports.report_cases import BRIDGE, MEGATRON, NEMO, known


def test_a_log_of_megatron_lm_with_its_plan():
    record = external_runs.read_run(MEGATRON, "h100")
    text = MEGATRON.read_text()
    assert record.source == "log of Megatron-LM"
    assert [step.step for step in record.steps] == [*range(10, 201, 10)]
    assert {(step.attempt, step.step) for step in record.repeated} == {("001", n) for n in (110, 120, 130)}
    assert {step.count for step in record.steps} == {10}
    assert [step.step for step in record.steps if step.val_loss is not None] == [100, 200]
    assert (record.gpus, record.seq, record.saved) == (16, 8192, 2)
    assert record.saves_s == pytest.approx((13.98735, 13.98735))
    peaks = [float(gib) / 1024 for gib in re.findall(r"max allocated: ([\d.]+)", text)]
    assert record.peak_gib == pytest.approx(max(peaks))
    assert [rank.rank for rank in record.ranks] == [0, 1]
    assert record.job is not None
    assert (record.job.model.name, record.job.layout.tp, record.job.layout.gbs) == ("llama3_8b", 2, 128)
    assert record.steps[-1].tokens == 200 * 128 * 8192
    figures = report_figures.compute_figures(record)
    last = re.findall(r"iteration +200/.*TFLOP/s/GPU\): ([\d.]+)", text)
    assert record.steps[-1].tflops == float(last[0])
    assert figures.mfu == pytest.approx(known(figures.tflops) / 989.4, rel=1e-3)
    assert figures.time_s["between attempts"] == 240
    own = [(float(ms) / 1000, int(n)) for n, ms in re.findall(r"iteration +(\d+)/.*iteration \(ms\): ([\d.]+)", text)]
    useful = sum(10 * seconds for seconds, n in own) - sum(10 * seconds for seconds, n in own[10:13])
    assert figures.time_s["steps that count"] == pytest.approx(useful)
    assert sum(figures.time_s.values()) == pytest.approx(known(record.spans[-1].ended) - known(record.spans[0].began))


def test_a_log_of_megatron_bridge():
    record = external_runs.read_run(BRIDGE)
    assert record.source == "log of Megatron-Bridge"
    assert (len(record.steps), record.gpus, record.seq) == (40, 64, 8192)
    assert record.steps[4].tflops == float(re.findall(r"([\d.]+)MODEL", BRIDGE.read_text())[4])
    assert record.steps[4].rate == pytest.approx(512 * 8192 / known(record.steps[4].seconds) / 64)
    assert record.peak_gib == pytest.approx(57.1e9 / 2**30)
    assert report_figures.compute_figures(record).mfu is None
    with_gpu = report_figures.compute_figures(external_runs.read_run(BRIDGE, "h100"))
    assert with_gpu.mfu == pytest.approx(known(with_gpu.tflops) / 989.4, rel=1e-3)
    assert "dense bf16 peak" in with_gpu.flops_formula


def test_a_log_of_nemo_counts_steps_as_a_run_folder_does():
    record = external_runs.read_run(NEMO)
    assert record.source == "log of NeMo"
    assert [step.step for step in record.steps] == [*range(1, 61)]
    assert [step.step for step in record.steps if step.val_loss is not None] == [20, 40]
    assert report_figures.compute_figures(record).goodput is None  # its lines have no times


def test_a_packed_log_and_a_folder_of_attempts_are_read(tmp_path):
    (tmp_path / "packed.log.gz").write_bytes(gzip.compress(MEGATRON.read_bytes()))
    assert len(external_runs.read_run(tmp_path / "packed.log.gz").steps) == 20
    head, _, tail = MEGATRON.read_text().partition("slurmstepd")
    folder = tmp_path / "it's a folder"
    folder.mkdir()
    (folder / "a.log").write_text(head)
    (folder / "b.log").write_text(tail)
    (folder / "b_of_another_rank.log").write_text(tail)  # the same lines do not count twice
    record = external_runs.read_run(folder)
    assert [span.name for span in record.spans] == ["001", "002"]
    assert (len(record.steps), len(record.repeated)) == (20, 3)


def test_losses_of_other_launchers_are_read(tmp_path):
    log = tmp_path / "titan.log"
    log.write_text("".join(f"step: {n:3} loss: {9 / n:.4f} grad_norm: 2.5 tps: 8121\n" for n in range(1, 9)))
    record = external_runs.read_run(log)
    assert (record.source, len(record.steps)) == ("log of another launcher", 8)
    assert record.steps[-1].loss == 1.125


def test_a_loss_that_is_no_number_is_the_next_move(tmp_path):
    log = tmp_path / "nan.log"
    line = " iteration {0:8d}/     100 | consumed samples: 8 | elapsed time per iteration (ms): 5.0 | lm loss: {1} |\n"
    log.write_text("".join(line.format(n, "NAN" if n > 12 else f"{9 / n:.6E}") for n in range(1, 20)))
    record = external_runs.read_run(log)
    assert [step.step for step in record.steps if step.loss is None] == [*range(13, 20)]
    assert report_figures.compute_figures(record).next.startswith("the loss has been nan since step 13")


def test_skipped_iterations_have_no_loss(tmp_path):
    log = tmp_path / "fp16.log"
    line = " iteration {0:8d}/     100 | consumed samples: 8 | elapsed time per iteration (ms): 5.0 | lm loss: {1} |"
    skipped = " loss scale: 4294967296.0 | grad norm: inf | number of skipped iterations: {2} |\n"
    log.write_text((line + skipped).format(1, "0.000000E+00", 1) + (line + skipped).format(2, "1.1E+01", 0))
    record = external_runs.read_run(log)
    assert [(step.loss, step.grad_norm) for step in record.steps] == [(None, None), (11.0, None)]


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda path: path.write_text("nothing of the kind\n"), "no training step"),
        (lambda path: path.write_bytes(b""), "no training step"),
        (lambda path: path.mkdir(), "no log"),
        (lambda path: path.symlink_to("/dev/full"), "neither a run folder nor a log"),
    ],
)
def test_what_is_no_run_is_refused(make, says, tmp_path):
    make(tmp_path / "a log.log")
    with pytest.raises(UserError, match=says):
        external_runs.read_run(tmp_path / "a log.log")


def test_a_gpu_that_nobody_knows_is_refused():
    with pytest.raises(UserError, match="h1000"):
        external_runs.read_run(MEGATRON, "h1000")


@pytest.mark.parametrize("loss", ["nan", "inf", "-inf"])
def test_a_validation_loss_that_is_no_number_is_none(loss, tmp_path):
    log = tmp_path / "slurm.out"
    log.write_text(
        "iteration 5/ 10 | consumed samples: 40 | elapsed time per iteration (ms): 1000.0 | lm loss: 2.0E+00 |\n"
        f" validation loss at iteration 5 | lm loss value: {loss} | lm loss PPL: {loss} |\n"
    )
    (step,) = external_runs.read_run(log, "").steps
    assert (step.loss, step.val_loss) == (2.0, None)


STEP = " iteration {0:8d}/     100 | consumed samples: 8 | elapsed time per iteration (ms): {1} | lm loss: {2} |\n"


@pytest.mark.parametrize("bad", ["-5.0", "0.0", "nan", "inf", "1E-3", "9E12"])
def test_a_step_time_that_no_step_takes_costs_its_line_and_is_counted(bad, tmp_path):
    log = tmp_path / "a.log"
    log.write_text("".join(STEP.format(n, bad if n in (3, 5) else "900.0", "2.0E+00") for n in range(1, 9)))
    record = external_runs.read_run(log)
    assert [step.step for step in record.steps] == [1, 2, 4, 6, 7, 8]
    assert {step.seconds for step in record.steps} == {0.9}
    assert record.left_out.startswith("2 lines with an implausible step time (step 3, 5)")
    assert ("left out", record.left_out) in report_text.build_rows(record, report_figures.compute_figures(record))


def test_a_log_of_such_times_only_is_refused(tmp_path):
    log = tmp_path / "a.log"
    log.write_text("".join(STEP.format(n, "-1.0", "2.0E+00") for n in range(1, 9)))
    with pytest.raises(UserError, match=r"8 lines .*\(step 1, 2, 3, ...\)"):
        external_runs.read_run(log)


@pytest.mark.parametrize("value", ["NAN", "inf"])
def test_losses_that_are_no_number_stand_where_the_losses_stand(value, tmp_path):
    log = tmp_path / "a.log"
    log.write_text("".join(STEP.format(n, "900.0", value if n > 6 else "2.5E+00") for n in range(1, 9)))
    record = external_runs.read_run(log)
    words = dict(report_text.build_heading_rows(record, report_figures.compute_figures(record)))["loss"]
    assert words == (
        "2.5000 -> 2.5000 nats/token at step 6; non-finite (nan, inf) at 2 steps: steps 7 to 8, until the end"
    )


def test_losses_of_other_launchers_that_are_no_number_are_counted(tmp_path):
    log = tmp_path / "titan.log"
    log.write_text("".join(f"step: {n} loss: {'nan' if n == 4 else 9 / n:.4} tps: 81\n" for n in range(1, 9)))
    record = external_runs.read_run(log)
    assert [step.step for step in record.steps] == [*range(1, 9)]
    losses = run_record.summarize_step_losses(record.steps)
    assert (losses.start, losses.end, losses.bad, losses.bad_from) == (9.0, 1.125, 1, 4)
