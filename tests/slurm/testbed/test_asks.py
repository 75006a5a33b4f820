"""`submit` with --resume and changes, --after and --sweep on a real Slurm."""

import http.server
import json
import os
import re
import threading
import time

import pytest

from superpod.runtime.runs.run_folder import RunFolder
from superpod.slurm.submission import connection, submit
from tests.slurm.testbed.bed import until
from tests.slurm.testbed.nemo_runs import NemoRun
from tests.slurm.testbed.toys import ToyRun

pytestmark = pytest.mark.long


def test_extended_time_limit_of_a_running_job(testbed, profile):
    """A limit of two minutes, extended to ten: one attempt makes all steps, for longer than two minutes."""
    toy = ToyRun(testbed, profile(), attempts=1, time_limit="2:00", max_steps=280, save_every=1000, step_s=0.5)
    toy.until_step(5)
    testbed.slurm("scontrol", "update", f"jobid={toy.job}", "timelimit=10")
    toy.until_done(300)
    toy.check_whole(most_lost=0)
    (attempt,) = toy.run.attempts
    until(lambda: "ended" in attempt.result, 30, toy.story)
    assert attempt.result["ended"] - attempt.result["started"] > 125
    assert any("time limit is now" in out.read_text() for out in toy.run.path.glob("slurm-*.out"))


def test_resume_with_another_time_limit(testbed, profile, recipes_cli):
    where = profile()
    toy = ToyRun(testbed, where, attempts=1, time_limit="10:00", max_steps=400)
    toy.until_new_checkpoint()
    recipes_cli("cancel", toy.run.path)
    toy.until_gone()
    script = (toy.run.path / "job.sbatch").read_text()
    words = ("submit", "toy", "--cluster", where, "--resume", toy.run.path, "--attempts", 2)
    for wrong, says in (
        (("--time", "soon"), "not a time in Slurm's format"),
        (("--time", "30"), "at least 2 x chain.save_s"),
        (("--nodes", 4), "--nodes conflicts with --resume: a resumed run keeps its size"),
        (("--runs", "/tmp"), "--runs conflicts with --resume: a resumed run keeps its folder"),
        (("--after", "999999"), "has no job 999999"),
    ):
        refused = recipes_cli(*words, *(("--time", "0:30") if wrong == ("--time", "30") else wrong))
        assert (refused.returncode, says in refused.stderr) == (2, True), refused.stderr
    assert (toy.run.path / "job.sbatch").read_text() == script
    assert toy.run.stop, "what was refused changed nothing"
    done = recipes_cli(*words, "--time", "7:00")
    assert done.returncode == 0, done.stderr
    until(lambda: len(toy.run.attempts) == 2, 60, toy.story)
    limits = testbed.slurm("squeue", "-h", "-n", toy.name, "-o", "%l").split()
    assert limits == ["7:00", "7:00"]
    testbed.slurm("scancel", f"--name={toy.name}")
    toy.until_gone()


def test_dependency_on_a_data_job(testbed, profile):
    data = testbed.slurm("sbatch", "--parsable", "-N1", "-o", "/dev/null", "--wrap", "sleep 8; exit 0").strip()
    toy = ToyRun(testbed, profile(), attempts=0, nodes=1, max_steps=5, step_s=0.05)
    jobs = submit.queue(connection.Connection(), str(toy.run.path), 2, after=[f"afterok:{data}"]).ids
    submit.append_jobs(toy.run, jobs)
    time.sleep(2)
    assert testbed.state(data) == "RUNNING"
    assert {testbed.slurm("squeue", "-h", "-j", job, "-o", "%r").strip() for job in jobs} == {"Dependency"}
    toy.until_done()
    ended = testbed.slurm("sacct", "-X", "-nP", "-j", data, "-o", "End").strip()
    began = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(toy.run.attempts[0].result["started"]))
    assert began >= ended


def test_deferred_data_of_a_previous_job(testbed, nemo, profile, tmp_path):
    """Real NeMo: the ranks build the recipe from the folder, with the losses of one that was there."""
    data = tmp_path / "late"
    words = ("sbatch", "--parsable", "-N1", "-o", "/dev/null", "--wrap", f"sleep 150; cp -r {nemo.data} {data}")
    job = testbed.slurm(*words).strip()
    assert not data.exists()
    run = NemoRun(nemo, profile(), attempts=1, max_steps=20, data=data, after=job)
    assert f"note   {data} does not exist yet; afterok:{job} is expected to write it" in run.printed
    run.until_done(400)
    run.check_whole(most_lost=0)
    assert str(data) in (run.run.path / "recipe.txt").read_text()


def test_missing_deferred_data_stops_the_run(testbed, nemo, profile, tmp_path):
    job = testbed.slurm("sbatch", "--parsable", "-N1", "-o", "/dev/null", "--wrap", "sleep 150").strip()
    run = NemoRun(nemo, profile(), attempts=2, max_steps=20, data=tmp_path / "late", after=job)
    run.until_gone(200)
    assert [attempt.result["state"] for attempt in run.run.attempts] == ["failed"], run.story()
    assert f"the data folder {tmp_path / 'late'} does not exist" in run.seen().message


@pytest.fixture
def webhook():
    """A real HTTP server on the nodes' bridge; yields its address and the received messages."""
    bodies: list[dict] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            bodies.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_):
            """Quiet."""

    net = os.environ.get("TESTBED_NET", "10.77.0")
    with http.server.ThreadingHTTPServer((f"{net}.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://{net}.1:{server.server_port}/services/{SECRET}", bodies
        server.shutdown()


SECRET = "T0000-neverwritten"


def test_webhook_receives_end_and_stop(testbed, profile, tmp_path, webhook, monkeypatch):
    """The address comes from a file, then from a variable; no file of a run contains it."""
    url, bodies = webhook
    file = tmp_path / "hook"
    file.touch(mode=0o600)
    file.write_text(url)
    by_file = profile(("[health]", f'[notify]\nwebhook_file = "{file}"\n\n[health]'))
    toy = ToyRun(testbed, by_file, attempts=2, nodes=1, max_steps=10, step_s=0.05)
    toy.until_done()
    until(lambda: bodies, 30, toy.story)
    monkeypatch.setenv("MY_HOOK", url)
    by_variable = profile(("[health]", '[notify]\nwebhook_env = "MY_HOOK"\n\n[health]'))
    crashing = ToyRun(testbed, by_variable, attempts=4, nodes=1, crash_at=0, tell=["MY_HOOK"])
    crashing.until_gone(180)
    until(lambda: len(bodies) > 1, 30, crashing.story)
    assert [body["event"] for body in bodies] == ["end", "stop"], bodies
    assert (bodies[0]["run"], bodies[0]["step"]) == (str(toy.run.path), 10)
    assert "ValueError: planted" in bodies[1]["text"]
    assert json.loads((crashing.run.path / "told.json").read_text())["MY_HOOK"] is None, "the ranks do not get it"
    written = [p for p in (tmp_path / "runs").rglob("*") if p.is_file() and SECRET.encode() in p.read_bytes()]
    assert written == []


def test_slurm_accepts_mail_options(testbed, profile):
    where = profile(("[health]", '[notify]\nmail = "me@site.org"\n\n[health]'))
    toy = ToyRun(testbed, where, attempts=1, nodes=1, max_steps=10, step_s=0.05)
    toy.until_done()
    facts = testbed.slurm("scontrol", "show", "job", "-o", toy.job)
    assert "MailUser=me@site.org" in facts
    assert re.search(r"MailType=INVALID_DEPEND,END,FAIL\b", facts), facts


SMALL = ("data.seq_length=64", "model.config.seq_length=64", "data.global_batch_size=8", "trainer.limit_val_batches=0")
STEPS = ("trainer.limit_test_batches=0", "trainer.max_steps=3", "log.ckpt.every_n_train_steps=3")


@pytest.mark.nemo
def test_sweep_with_a_bad_value_queues_nothing(testbed, profile, recipes_cli, tmp_path):
    fixed = [text for text in SMALL if not text.startswith("data.global_batch_size")]
    words = ("submit", "tiny_llama3", "--cluster", profile(), *fixed, *STEPS)
    refused = recipes_cli(*words, "--sweep", "data.global_batch_size=8,7", timeout=300)
    assert refused.returncode == 2
    assert "1 of 2 runs of the sweep cannot be submitted" in refused.stderr, refused.stderr
    assert "data.global_batch_size=7" in refused.stderr
    assert testbed.slurm("squeue", "-h").strip() == ""
    assert not (tmp_path / "runs").exists()


@pytest.mark.nemo
@pytest.mark.train
def test_sweep_with_dependency_and_table(testbed, profile, recipes_cli, tmp_path):
    """Real NeMo: two learning rates after a data job."""
    data = tmp_path / "data"
    make = f"until [ -e {data} ]; do sleep 1; done"
    first = testbed.slurm("sbatch", "--parsable", "-N1", "-o", "/dev/null", "--wrap", make).strip()
    words = ("submit", "tiny_llama3", "--cluster", profile(), "--attempts", 1, *SMALL, *STEPS)
    done = recipes_cli(*words, "--after", first, "--sweep", "optim.config.lr=1e-3,2e-3", timeout=300)
    assert done.returncode == 0, done.stderr
    assert f"dependency  afterok:{first}" in done.stdout
    sweep = next(line.split()[1].rstrip(":") for line in done.stdout.splitlines() if line.startswith("sweep"))
    runs = [RunFolder.open(line.split()[1]) for line in done.stdout.splitlines() if line.startswith("run ")]
    assert len(runs) == 2
    assert all(not run.attempts for run in runs)
    data.touch()
    until(lambda: all(run.done for run in runs), 900, lambda: recipes_cli("report", sweep).stdout)
    table = json.loads(recipes_cli("report", sweep, "--json").stdout)
    assert sorted(row["values"]["optim.config.lr"] for row in table) == ["1e-3", "2e-3"]
    assert [row["summary"]["steps"] for row in table] == [3, 3]
    assert table[0]["summary"]["loss_end"] <= table[1]["summary"]["loss_end"]
    assert "optim.config.lr" not in recipes_cli("report", sweep).stdout.splitlines()[0]


@pytest.mark.nemo
@pytest.mark.train
def test_done_run_resumes_with_more_steps(testbed, profile, recipes_cli):
    """Without more steps it is refused, and nothing changes; more steps and another limit work. Real NeMo."""
    where = profile()
    first = recipes_cli("submit", "tiny_llama3", "--cluster", where, "--attempts", 1, *SMALL, *STEPS, timeout=300)
    assert first.returncode == 0, first.stderr
    (folder,) = (line.split(maxsplit=1)[1] for line in first.stdout.splitlines() if line.startswith("run "))
    run = RunFolder.open(folder)
    until(lambda: run.done and not testbed.slurm("squeue", "-h").strip(), 600)
    words = ("submit", "tiny_llama3", "--cluster", where, "--resume", run.path, "--attempts", 1)
    before = {path.name: path.read_bytes() for path in run.path.iterdir() if path.is_file()}
    refused = recipes_cli(*words, timeout=300)
    assert (refused.returncode, "is done at step 3" in refused.stderr) == (2, True), refused.stderr
    assert {path.name: path.read_bytes() for path in run.path.iterdir() if path.is_file()} == before
    done = recipes_cli(*words, "trainer.max_steps=6", "--time", "8:00", timeout=300)
    assert done.returncode == 0, done.stderr
    assert "change trainer.max_steps: 3 -> 6" in done.stdout
    assert "resumes from step 3" in done.stdout
    until(lambda: run.done, 600, lambda: str(run.attempts[-1].result))
    assert [line["step"] for line in run.metrics()] == [1, 2, 3, 4, 5, 6]
    assert run.facts["max_steps"] == 6
    assert (run.path / "job-until-001.sbatch").is_file()
    assert "--time=8:00" in (run.path / "job.sbatch").read_text()
