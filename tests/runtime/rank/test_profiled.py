"""NeMo's profiler on the chosen ranks of a run alone, and into its folder."""

import json
import warnings
from types import SimpleNamespace

import pytest

pytestmark = pytest.mark.nemo

pytest.importorskip("torch")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    lightning = pytest.importorskip("lightning.pytorch")
    run = pytest.importorskip("nemo_run")

import fiddle as fdl  # noqa: E402

from superpod.runtime.rank import profiled  # noqa: E402


class PytorchProfilerCallback(lightning.Callback):
    """Stands for NeMo's: it has its name, and writes down what is called."""

    def __init__(self, start_step: int, trace_dir: str = "") -> None:
        super().__init__()
        self.calls = [f"made {start_step} {trace_dir}"]

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx) -> None:
        self.calls.append(f"start {batch_idx}")

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:
        self.calls.append(f"end {batch_idx}")


@pytest.mark.parametrize(("rank", "profiles"), [(0, False), (3, True)])
def test_only_the_chosen_ranks_profile_and_into_the_run(tmp_path, rank, profiles):
    (tmp_path / "run.json").write_text(json.dumps({"profile": "torch:10-12:3,5"}))
    other = run.Config(lightning.Callback)
    kept, config = profiled.select_ranks([other, run.Config(PytorchProfilerCallback, start_step=9)], tmp_path)
    assert kept is other
    callback = fdl.build(config)
    trainer = SimpleNamespace(global_rank=rank)
    callback.on_train_start(trainer, None)
    callback.on_train_batch_start(trainer, None, None, 1)
    callback.on_train_batch_end(trainer, None, None, None, 1)
    folder = tmp_path / "profile" / f"rank-{rank}"
    assert folder.is_dir() == profiles
    assert (callback._inner is not None) == profiles
    if profiles:
        assert callback._inner.calls == [f"made 9 {folder}", "start 1", "end 1"]


@pytest.mark.parametrize("facts", [{}, {"profile": "nsys:1-2:0"}, {"profile": "torch:1-2:x"}])
def test_a_profiler_of_the_recipe_s_own_is_left_as_it_is(tmp_path, facts):
    (tmp_path / "run.json").write_text(json.dumps(facts))
    own = run.Config(PytorchProfilerCallback, start_step=9, trace_dir="/mine")
    assert profiled.select_ranks([own], tmp_path) == [own]
    assert profiled.select_ranks([own], tmp_path, "torch:1-2:0") != [own]
