"""Every family of `planner/formats/hf_families.py` has the parameters of transformers' own model."""

import json
import subprocess
import sys

import pytest

from superpod.planner.formats.hf_shape import from_config
from tests.planner import hf_folders


def write(folder, config):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.nemo
@pytest.mark.slow
def test_parameters_are_those_of_transformers_models(tmp_path):
    command = [sys.executable, "-W", "ignore", hf_folders.__file__, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    real = json.loads(done.stdout.rpartition("RESULT")[2])
    shapes = {case: from_config(tmp_path / case) for case in real}
    more = {case: shape.total_parameters() - real[case] for case, shape in shapes.items()}
    wanted = {case: hf_folders.NOT_EXACT.get(case.rpartition("-")[0], 0) for case in real}
    assert more == wanted
    approximate = {case.rpartition("-")[0] for case, shape in shapes.items() if shape.approximate}
    assert approximate == set(hf_folders.NOT_EXACT)


@pytest.mark.parametrize("kind", hf_folders.FROM_THE_HUB)
def test_architectures_of_the_hub_have_their_published_parameters(tmp_path, kind):
    config, parameters = hf_folders.FROM_THE_HUB[kind]
    assert from_config(write(tmp_path, {"model_type": kind, **config})).total_parameters() == parameters


LAYERS = {**hf_folders.SMALL, "num_hidden_layers": 8, "sliding_window": 32}
SLIDES, SEES = "sliding_attention", "full_attention"


@pytest.mark.parametrize(
    ("kinds", "window", "every"),
    [
        ([SLIDES, SLIDES, SLIDES, SEES] * 2, 32, 4),
        ([SLIDES, SEES] * 4, 32, 2),
        ([SEES] * 8, 0, 0),
        ([SLIDES] * 8, 32, 0),
    ],
)
def test_layers_that_slide_are_read_from_their_list(tmp_path, kinds, window, every):
    shape = from_config(write(tmp_path, {**LAYERS, "model_type": "ministral", "head_dim": 16, "layer_types": kinds}))
    assert (shape.window, shape.global_every, shape.approximate) == (window, every, "")


def test_layers_that_slide_irregularly_are_planned_alike_and_that_is_said(tmp_path):
    kinds = [SLIDES, SEES, SLIDES, SLIDES, SEES, SEES, SLIDES, SLIDES]
    shape = from_config(write(tmp_path, {**LAYERS, "model_type": "ministral", "head_dim": 16, "layer_types": kinds}))
    assert "5 of 8 layers have a sliding window, in an irregular pattern" in shape.approximate
