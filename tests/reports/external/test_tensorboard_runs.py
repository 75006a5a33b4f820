"""Event files: NeMo's own of a real run, and others that torch's SummaryWriter writes."""

import pytest

from superpod.errors import UserError
from superpod.reports import report_figures
from superpod.reports.external import external_runs
from tests.reports.report_cases import NEMO_EVENTS, known

pytestmark = [pytest.mark.nemo, pytest.mark.filterwarnings("ignore")]


def test_the_file_of_a_real_nemo_run():
    record = external_runs.read_run(NEMO_EVENTS)
    assert record.source == "TensorBoard files of NeMo"
    assert [step.step for step in record.steps] == [*range(1, 61)]
    assert record.steps[0].loss == pytest.approx(8.3498745)
    assert [step.step for step in record.steps if step.val_loss is not None] == [20, 40, 60]
    figures = report_figures.compute_figures(record)
    assert figures.step_s["p50"] == pytest.approx(0.863, abs=0.001)
    assert 0.8 < known(figures.goodput) < 0.9


def test_attempts_are_files_and_megatrons_names_are_known(tmp_path):
    from torch.utils.tensorboard import SummaryWriter

    for first, last, at in ((1, 12, 1000.0), (9, 20, 2000.0)):
        writer = SummaryWriter(str(tmp_path / "tb"), filename_suffix=f".{first}")
        for step in range(first, last + 1):
            values = {"lm loss": 10.0 / step, "learning-rate": 1e-4, "grad-norm": 1.0, "iteration-time": 2.0}
            for tag, value in (values | {"throughput": 400.0, "world-size": 64}).items():
                writer.add_scalar(tag, value, step, walltime=at + 2 * step)
        writer.add_scalar("lm loss validation", 0.75, last, walltime=at + 2 * last + 5)
        writer.close()
    record = external_runs.read_run(tmp_path / "tb", "h100")
    assert record.source == "TensorBoard files of Megatron"
    assert [step.step for step in record.steps] == [*range(1, 21)]
    assert [(step.attempt, step.step) for step in record.repeated] == [("001", n) for n in (9, 10, 11, 12)]
    assert (record.gpus, len(record.spans)) == (64, 2)
    figures = report_figures.compute_figures(record)
    assert (figures.val_loss, figures.val_step) == (0.75, 20)
    assert figures.mfu == pytest.approx(400 / 989.4, rel=1e-3)
    assert figures.time_s["steps that count"] == pytest.approx(40)
    assert figures.time_s["repeated steps"] == pytest.approx(8)


def test_files_without_steps_and_torn_ones_are_refused(tmp_path):
    (tmp_path / "events.out.tfevents.1.node.1.0").write_bytes(b"torn")
    with pytest.raises(UserError, match="no training step"):
        external_runs.read_run(tmp_path)


def test_without_tensorboard_its_install_is_named(monkeypatch):
    import importlib.util

    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name == "tensorboard" else find(name, *a))
    with pytest.raises(UserError) as refused:
        external_runs.read_run(NEMO_EVENTS)
    assert "not installed" in str(refused.value)
    assert refused.value.hint == "pip install -c constraints.txt tensorboard"
