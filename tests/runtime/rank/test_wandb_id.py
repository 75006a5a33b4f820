"""One W&B run over all attempts: Lightning's logger, as a recipe configures it, and real wandb, offline."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from superpod.runtime.rank import wandb_id

fdl = pytest.importorskip("fiddle")
loggers = pytest.importorskip("lightning.pytorch.loggers")

RUN = Path("/runs/tiny_llama3/20261122T101112Z-abc123")


class Log:
    """What of `partial.log` matters here."""

    def __init__(self, wandb=None, extra=None) -> None:
        self.wandb, self.extra_loggers = wandb, extra


def configured(**values) -> Any:
    return fdl.Config(loggers.WandbLogger, project="p", **values)


def test_every_attempt_of_a_run_has_one_id_and_another_run_another():
    first, second, other = configured(), configured(), configured()
    assert wandb_id.set_run_id(Log(first), RUN, {})
    assert wandb_id.set_run_id(Log(extra=[second]), RUN, {})
    assert wandb_id.set_run_id(Log(other), RUN.with_name("20261122T101112Z-fff"), {})
    assert first.id == second.id == RUN.name != other.id


@pytest.mark.parametrize(
    ("log", "environ"),
    [
        (Log(), {}),
        (Log(configured(id="mine")), {}),
        (Log(configured(version="mine")), {}),
        (Log(configured()), {"WANDB_RUN_ID": "mine"}),
        (Log(fdl.Config(loggers.CSVLogger, save_dir="x")), {}),
    ],
)
def test_who_names_an_id_keeps_it(log, environ):
    before = getattr(log.wandb, "id", None)
    assert not wandb_id.set_run_id(log, RUN, environ)
    assert getattr(log.wandb, "id", None) == before


@dataclass
class LoggerOfNemo:
    """As NeMoLogger declares them: Fiddle raises ValueError for a default from a factory."""

    wandb: Any = None
    extra_loggers: list = field(default_factory=list)


def test_a_logger_config_without_any_logger_is_left_alone():
    assert not wandb_id.set_run_id(fdl.Config(LoggerOfNemo), RUN, {})
    ours = configured()
    assert wandb_id.set_run_id(fdl.Config(LoggerOfNemo, wandb=ours), RUN, {})
    assert ours.id == RUN.name


@pytest.mark.slow
def test_the_real_wandb_resumes_that_id(tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.delenv("WANDB_RUN_ID", raising=False)
    for attempt in ("001", "002"):
        logger = configured(save_dir=str(tmp_path / attempt))
        (tmp_path / attempt).mkdir()
        wandb_id.set_run_id(Log(logger), RUN)
        built = fdl.build(logger)
        assert built._wandb_init["resume"] == "allow"
        assert built.experiment.id == RUN.name
        built.experiment.finish()
        (folder,) = (tmp_path / attempt / "wandb").glob("offline-run-*")
        assert folder.name.endswith(RUN.name)


def test_a_field_with_a_factory_is_no_error():
    """As NeMoLogger.extra_loggers in a recipe that leaves it alone: every `finetune` ended with a ValueError."""
    import dataclasses

    @dataclasses.dataclass
    class NeMoLogger:
        wandb: object = None
        extra_loggers: list[object] = dataclasses.field(default_factory=list)

    logger = configured()
    assert wandb_id.set_run_id(fdl.Config(NeMoLogger, wandb=logger), RUN, {})
    assert logger.id == RUN.name
