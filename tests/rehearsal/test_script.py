"""An exported file trains where this project cannot be imported: real NeMo, two ranks of this machine, no GPU."""

import importlib
import os
import re
import subprocess
import sys

import pytest

from superpod.rehearsal.script import block_project_imports
from tests.nemo2.export.exported import TRAINED, answers


def test_inside_this_project_is_nowhere_and_after_it_is_as_before():
    import superpod.errors as before

    with block_project_imports():
        for name in ("superpod", "superpod.planner"):
            with pytest.raises(ModuleNotFoundError, match="superpod"):
                importlib.import_module(name)
        assert importlib.import_module("json")
    assert importlib.import_module("superpod.errors") is before


PRETRAIN, SFT, LORA = TRAINED


@pytest.mark.nemo
@pytest.mark.train
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(PRETRAIN, marks=pytest.mark.slow),
        pytest.param(LORA, marks=pytest.mark.slow),
        pytest.param(SFT, marks=pytest.mark.long),
    ],
)
def test_an_exported_recipe_trains_without_this_project(name, tmp_path):
    file = (answers()["folder"] / "alone" / f"{name}.py").read_text()
    check = "try:\n    import superpod\nexcept ModuleNotFoundError:\n    print('superpod is not here')\n"
    (tmp_path / "mine.py").write_text(file.replace("import os\n", f"{check}import os\n", 1))
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command = [*torchrun, "-m", "superpod.rehearsal.script", "mine.py"]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert done.stdout.count("superpod is not here") == 2
    losses = re.findall(r"iteration \d/1 .* reduced_train_loss: (\d+\.\d+)", done.stdout)
    assert len(losses) == 2
    assert all(7 < float(loss) < 9 for loss in losses)  # ln 4096 = 8.3: the model has learnt nothing yet
    assert list((tmp_path / "nemo_experiments" / name).rglob("*.distcp"))
