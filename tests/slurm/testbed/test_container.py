"""Jobs in a container, with `fake_pyxis.c` in place of pyxis: a real srun accepts its options."""

import json
import os
import sys
from pathlib import Path

import pytest

import superpod.planner
from tests.slurm.testbed.test_train import QUICK, SMALL, TP1, submitted, text, until_done
from tests.slurm.testbed.toys import ToyRun

assert text  # a fixture

IMAGE_SETS = {"OMP_NUM_THREADS": "7", "HF_HUB_OFFLINE": "0", "MINE": "the image's", "ITS_OWN": "the image's"}


@pytest.fixture
def boxed(profile, tmp_path):
    """A profile whose ranks run in a container; `mounts` are bound to the same paths."""
    image = tmp_path / "it's an image.sqsh"

    def make(*mounts: Path, **sets: str) -> Path:
        image.write_text("".join(f"{name}={value}\n" for name, value in (IMAGE_SETS | sets).items()))
        box = f"[container]\nimage = {json.dumps(str(image))}\nmounts = {json.dumps([f'{m}:{m}' for m in mounts])}\n"
        own = f'\n[env]\nMINE = "the job\'s"\n\n[software]\npython = {json.dumps(sys.executable)}\n'
        return profile(("[chain]", f"{box}\n[chain]"), ("free_gib = 1\n", f"free_gib = 1\n{own}"))

    return make


def test_variable_of_the_job_replaces_the_images(testbed, boxed):
    """pyxis gives precedence to the image: OMP_NUM_THREADS and others would silently differ from the script."""
    here = Path(__file__).parents[2]
    tell = [*IMAGE_SETS, "FAKE_PYXIS_IMAGE"]
    toy = ToyRun(testbed, boxed(here), attempts=1, max_steps=10, step_s=0.05, tell=tell)
    toy.until_done()
    toy.check_whole()
    environment = json.loads((toy.run.path / "told.json").read_text())
    assert environment["FAKE_PYXIS_IMAGE"].endswith("it's an image.sqsh")
    assert environment["OMP_NUM_THREADS"] == "1"
    assert environment["HF_HUB_OFFLINE"] == "1"
    assert environment["MINE"] == "the job's"
    assert environment["ITS_OWN"] == "the image's"
    assert environment["files at home"] == []


@pytest.mark.nemo
@pytest.mark.train
@pytest.mark.long
def test_submit_trains_in_a_container(testbed, boxed, recipes_cli, text):
    """Real NeMo, which sees only the mounted parts of its node's home and of this project."""
    project = Path(superpod.planner.__file__).resolve().parents[1]
    seen = sorted({project, Path(sys.prefix), Path(sys.base_prefix), text})
    where = boxed(*seen, PYTHONPATH=f"/of/the/image:{os.environ.get('PYTHONPATH', '')}")
    words = ("tiny_llama3", "--cluster", where, "--nodes", 2, "--data", text, *SMALL, *QUICK, *TP1)
    run = submitted(recipes_cli, *words, "trainer.max_steps=4")
    until_done(run)
    assert [line["step"] for line in run.metrics()] == [1, 2, 3, 4]
    kept = json.loads((run.attempts[0].path / "env.json").read_text())["environment"]
    assert kept["OMP_NUM_THREADS"] == "1"


def test_missing_image_is_refused_before_submission(testbed, boxed, recipes_cli, tmp_path):
    where = boxed()
    (tmp_path / "it's an image.sqsh").unlink()
    done = recipes_cli("submit", "tiny_llama3", "--cluster", where, "--nodes", 2, "--dry-run", timeout=400)
    assert done.returncode == 2
    assert "it's an image.sqsh" in done.stderr
    assert testbed.slurm("squeue", "-h") == ""
