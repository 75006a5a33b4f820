"""`submit --after JOB --data FOLDER` before the folder exists: the ranks build the recipe."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from superpod.cli.cluster import submit
from superpod.cli.options.profile_option import ProfileOptions
from superpod.cli.options.size_options import SizeOptions
from superpod.collection import installed
from superpod.errors import UserError
from superpod.requests import deferred
from superpod.requests.request import Request
from superpod.runtime.runs.run_folder import RunFolder
from superpod.slurm.preflight import preflight
from superpod.slurm.profiles import profiles
from superpod.slurm.profiles.live_cluster import LiveCluster
from superpod.slurm.submission import request_checks
from superpod.slurm.submission import submit as slurm_submit
from superpod.slurm.submission.new_runs import SubmitOptions
from tests.slurm.preflight.test_dependency import FakeSlurm

RECIPE = "llama3_8b_pretrain_h100_bf16"
WAITS = ["4711"]


def requests(data: Path, waits=WAITS, overrides=("trainer.max_steps=7",)) -> list[Request]:
    swept = [("data.global_batch_size=512",), ("data.global_batch_size=1024",)]
    profile = profiles.load("dgx_h100")
    options = SubmitOptions(profile, swept, "/lustre/runs", after=waits)
    return submit._requests(RECIPE, [*overrides], data, SizeOptions(), options, ProfileOptions())


@pytest.mark.parametrize("begun", [False, True])
def test_deferred_folder_is_accepted_with_note(begun, tmp_path):
    """It was refused, and the submission itself had to wait in the queue."""
    data = tmp_path / "web"
    if begun:  # `recipes data` writes its tokens first
        data.mkdir()
        (data / "train.bin").touch()
    both = requests(data)
    assert [(request.data, request.deferred_data) for request in both] == [(data, True)] * 2
    assert deferred.deferred_data_note(both[0], ["afterok:4711"]).startswith(
        f"{data} does not exist yet; afterok:4711 is expected to write it"
    )


def test_missing_folder_without_dependency_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"has no dataset\.json"):
        requests(tmp_path / "web", waits=[])


def test_existing_folder_is_checked_now(tmp_path):
    (tmp_path / "dataset.json").write_text("{}")
    with pytest.raises(UserError, match=r"dataset\.json"):
        requests(tmp_path)
    (tmp_path / "corpus.txt").touch()
    with pytest.raises(UserError, match="is not a data folder"):
        requests(tmp_path / "corpus.txt")


def test_other_mistakes_are_refused_immediately(tmp_path):
    with pytest.raises(UserError, match="no field 'max_stepz'"):
        requests(tmp_path / "web", overrides=("trainer.max_stepz=7",))


def test_script_contains_the_request(tmp_path, monkeypatch):
    """Where NeMo is not installed; where it is, `test_the_ranks_build_...` has it."""
    monkeypatch.setattr(installed, "missing_package", lambda: "nemo")
    data = tmp_path / "web"
    run = deferred.resolve_for_job(requests(data)[0])
    assert (run.is_deferred, run.data_facts) == (True, {})
    assert str(data) in run.source
    submission = slurm_submit.Submission(run, profiles.load("dgx_h100"), str(tmp_path / "runs"))
    facts = slurm_submit.facts(submission)
    assert (facts["data"], facts["late_data"]) == (str(data), True)
    assert deferred.sources(run)
    assert slurm_submit.script(submission)
    assert slurm_submit.project_files(run, submission.cluster) == {}
    rehearsed = slurm_submit.project_files(run, profiles.load("testbed"))  # its ranks are superpod.rehearsal.rank
    assert "superpod/rehearsal/rank.py" in rehearsed


def test_resumed_run_reads_the_existing_folder(tmp_path):
    data = tmp_path / "web"
    facts = Request(RECIPE, data=data, deferred_data=True).facts()
    run = RunFolder.create(tmp_path / "runs", RECIPE, facts=facts, recipe_lines=[])
    assert Request.from_run(run).deferred_data
    data.mkdir()
    (data / "dataset.json").write_text("{}")
    assert not Request.from_run(run).deferred_data
    with pytest.raises(UserError, match=r"dataset\.json"):
        Request.from_run(run).check()


def test_recipe_of_a_user_collection_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(deferred, "is_user_recipe", lambda recipe: True)
    with pytest.raises(UserError, match="your own collection") as refused:
        requests(tmp_path / "web")
    assert "--wrap" in refused.value.hint


def test_ended_job_without_data_is_named(tmp_path, monkeypatch):
    """One that is still to end lets the run be built; the folder is not asked for on the cluster."""
    folders = []

    def facts_of(profile, runs, data, size):
        folders.append(data)
        return FakeSlurm(f"JobState={state}"), LiveCluster()

    def resolved(*_request):
        raise AssertionError("NeMo would be imported")

    monkeypatch.setattr(request_checks, "connect_and_query", facts_of)
    monkeypatch.setattr(request_checks, "resolve_request", resolved)
    monkeypatch.setattr(preflight, "claim_findings", lambda claim: [])  # a cluster that has nothing
    words = {"name": RECIPE, "cluster": "dgx_h100", "data": [str(tmp_path / "web")], "after": ["4711"]}
    state = "COMPLETED"
    with pytest.raises(UserError, match=rf"{tmp_path / 'web'} does not exist, although --after 4711 is met"):
        submit.submit(**words)
    state = "RUNNING"
    with pytest.raises(AssertionError, match="NeMo would be imported"):
        submit.submit(**words)
    assert folders == [None, None]


BUILD = """
import json, os, sys
from pathlib import Path
from superpod.requests import deferred, resolve
from superpod.requests.request import Request
from superpod.runtime.rank.rank import load
from superpod.nemo2.export import flatten
data, place = Path(sys.argv[1]), Path(sys.argv[2])
words = ("trainer.max_steps=7", "model.config.hidden_dropout=0.1", "data.num_workers=3")  # the second: NeMo alone knows
late = deferred.resolve_for_job(Request("tiny_llama3", words, data, deferred_data=True))
(place / "recipe.py").write_text(late.source)
file = load(place / "recipe.py")
try:
    file.recipe()
except SystemExit as refused:
    print(json.dumps(str(refused)))
os.rename(place / "made", data)
built = [str(line) for line in flatten.flatten(file.recipe())]
plain = [str(line) for line in flatten.flatten(resolve.resolve(Request("tiny_llama3", words, data)).partial)]
print(json.dumps([built, plain]))
"""


@pytest.mark.nemo
@pytest.mark.slow
def test_ranks_build_the_same_recipe(tmp_path, recipes_cli):
    """With NeMo installed, overrides that need NeMo are checked at submission."""
    library = Path(json.__file__).parents[1] / "asyncio"
    words = ("--text", library / "*.py", "--vocab-size", 512, "--split", "8,1,1", "--out", tmp_path / "made")
    done = recipes_cli("data", "build", *words)
    assert done.returncode == 0, done.stderr
    environ = {**os.environ, "TORCH_EXTENSIONS_DIR": os.devnull, "XDG_CACHE_HOME": str(tmp_path / "cache")}
    command = [sys.executable, "-W", "ignore", "-c", BUILD, tmp_path / "data", tmp_path]
    done = subprocess.run(command, capture_output=True, text=True, env=environ, timeout=900)
    assert done.returncode == 0, done.stderr[-3000:]
    refused, (built, plain) = (json.loads(line) for line in done.stdout.splitlines()[-2:])
    assert refused.startswith(f"refused: {tmp_path / 'data'} is not a data folder")
    assert built == plain
    assert any(str(tmp_path / "data") in line for line in built)
