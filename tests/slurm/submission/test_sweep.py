"""Sweeps: the syntax of --sweep, and that all runs are queued or none."""

import grp
import json
import os
import stat
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest

from superpod.common.json_files import append_line, write_json
from superpod.errors import UserError
from superpod.reports import sweep as table
from superpod.runtime.runs.run_folder import RunFolder
from superpod.slurm.submission import submit, sweep
from superpod.slurm.submission.connection import Connection


def test_combinations_vary_the_last_axis_fastest():
    swept = sweep.parse_axes(["optim.config.lr=1e-4,3e-4", "data.global_batch_size=8, 16"])
    assert sweep.combine(swept) == [
        ("optim.config.lr=1e-4", "data.global_batch_size=8"),
        ("optim.config.lr=1e-4", "data.global_batch_size=16"),
        ("optim.config.lr=3e-4", "data.global_batch_size=8"),
        ("optim.config.lr=3e-4", "data.global_batch_size=16"),
    ]
    assert sweep.combine([]) == [()], "without a sweep, one run without more overrides"


def test_commas_inside_a_value():
    (axis,) = sweep.parse_axes(["model.config.x=[1,2],(3,4),'a,b'"])
    assert axis.values == ("[1,2]", "(3,4)", "'a,b'")


@pytest.mark.parametrize(
    ("texts", "says"),
    [
        (["optim.config.lr"], "has fewer than two values"),
        (["optim.config.lr=1e-4"], "has fewer than two values"),
        (["optim.config.lr=1e-4,"], "has fewer than two values"),
        (["optim.config.lr=1e-4,1e-4"], "repeats a value"),
        (["a.b=1,2", "a.b=3,4"], "specified twice"),
        ([f"a.b={','.join(map(str, range(20)))}", f"a.c={','.join(map(str, range(20)))}"], "400 runs .20 x 20."),
    ],
)
def test_invalid_sweep_is_refused(texts, says):
    with pytest.raises(UserError, match=says):
        sweep.parse_axes(texts)


class FakeSlurm(Connection):
    """Fake: sbatch by a counter that refuses from the `refuses`-th on; everything else on this machine."""

    def __init__(self, refuses: int) -> None:
        self.refuses, self.queued, self.cancelled = refuses, 0, []

    def run(self, command, **how):
        if command[0] == "scancel":
            self.cancelled.append(command[1])
            return ""
        if command[0] != "sbatch":
            return super().run(command, **how)
        self.queued += 1
        if self.queued >= self.refuses:
            raise UserError("sbatch: error: QOSMaxSubmitJobPerUserLimit")
        return f"{self.queued}\n"


@pytest.fixture
def three(tmp_path, monkeypatch):
    """Three submissions whose run folders are created without a resolved run."""

    class Submission:
        folder, recipe, cluster = str(tmp_path), "toy", SimpleNamespace(folders=SimpleNamespace(umask="", group=""))

    def new_run(_submission, _connection):
        return str(RunFolder.create(tmp_path, "toy", facts={}, recipe_lines=[]).path)

    monkeypatch.setattr(submit, "new_run", new_run)
    return [((f"optim.config.lr={n}e-4",), Submission()) for n in (1, 2, 3)]


def test_refusal_of_a_first_attempt_removes_everything(three, tmp_path):
    slurm = FakeSlurm(refuses=3)
    with pytest.raises(UserError, match="QOSMaxSubmitJobPerUserLimit"):
        sweep.queue(slurm, three, attempts=2)
    assert len(slurm.cancelled) == 3
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_refusal_of_further_attempts_is_reported(three):
    slurm = FakeSlurm(refuses=5)
    folder, jobs = sweep.queue(slurm, three, attempts=3)
    ids = [queued.ids for queued in jobs.values()]
    assert ids == [["1", "4"], ["2"], ["3"]]
    assert [json.loads((Path(run) / "chain.json").read_text())["jobs"] for run in jobs] == ids
    assert len(table.read_members(Path(folder))) == 3
    # How many went in, and sbatch's words.
    short = "2 of 3 jobs are queued; sbatch: error: QOSMaxSubmitJobPerUserLimit"
    assert [queued.shortfall for queued in jobs.values()] == [
        short,
        short.replace("2", "1", 1),
        short.replace("2", "1", 1),
    ]


class RecordingSlurm(FakeSlurm):
    """A fake that records the latest dependencies of each job from sbatch and scontrol."""

    def __init__(self) -> None:
        super().__init__(refuses=99)
        self.waits: dict[str, str] = {}

    def run(self, command, **how):
        if command[:2] == ["scontrol", "update"]:
            self.waits[command[2].removeprefix("JobId=")] = command[3].removeprefix("Dependency=")
            return ""
        printed = super().run(command, **how)
        if command[0] == "sbatch":
            [self.waits[printed.strip()]] = [
                word.removeprefix("--dependency=") for word in command if "--dependency" in word
            ]
        return printed


def test_array_limit_requires_a_sweep():
    with pytest.raises(UserError, match="--array-limit requires --sweep"):
        sweep.parse_axes([], 2)


@pytest.mark.parametrize("attempts", [1, 2])
@pytest.mark.parametrize("at_once", [0, 1, 2])
def test_array_limit_is_a_dependency(three, attempts, at_once):
    slurm = RecordingSlurm()
    _, jobs = sweep.queue(slurm, three, attempts, ["afterok:77"], at_once)
    ids = [queued.ids for queued in jobs.values()]
    for place, own in enumerate(ids):
        before = f",afterany:{':'.join(ids[place - at_once])}" if at_once and place >= at_once else ""
        assert {slurm.waits[job] for job in own} == {f"singleton,afterok:77{before}"}
    assert len(slurm.waits) == 3 * attempts


def test_interrupted_sweep_records_first_jobs(three, tmp_path, monkeypatch):
    """Interrupted when the further attempts are queued, each run knows its first job."""

    def interrupted(*_words, **_more):
        raise KeyboardInterrupt

    monkeypatch.setattr(submit, "queue_more", lambda *words, **more: words[2] if words[3] == 1 else interrupted())
    with pytest.raises(KeyboardInterrupt):
        sweep.queue(FakeSlurm(refuses=99), three, attempts=3)
    chains = [json.loads(path.read_text())["jobs"] for path in sorted(tmp_path.glob("toy/*/chain.json"))]
    assert sorted(chains) == [["1"], ["2"], ["3"]]


@pytest.mark.parametrize("umask", ["", "0007"])
def test_permissions_of_sweeps_in_a_shared_folder(three, tmp_path, umask):
    """`.sweeps` has the rights of the folder for runs, a sweep those of the profile."""
    three[0][1].cluster.folders.umask = umask
    tmp_path.chmod(0o3775)
    folder, _ = sweep.queue(FakeSlurm(refuses=99), three, attempts=1)
    rights = [stat.S_IMODE(path.stat().st_mode) for path in (Path(folder).parent, Path(folder, table.FILE))]
    before = os.umask(0)
    os.umask(before)
    assert rights == [0o3775, 0o660 if umask else 0o666 & ~before]


def test_group_of_a_sweep(three):
    """As the folders of its runs do."""
    group = grp.getgrgid(os.getegid()).gr_name
    three[0][1].cluster.folders.group = group
    folder, _ = sweep.queue(FakeSlurm(refuses=99), three, attempts=1)
    assert Path(folder).stat().st_mode & stat.S_ISGID
    assert Path(folder, table.FILE).group() == group


class FakeSsh(FakeSlurm):
    """Fake: a cluster behind SSH that is this machine."""

    remote = True


def test_cancel_and_status_of_a_sweep_behind_ssh(three, monkeypatch, capsys):
    """Every run of the sweep is stopped, except the one that is done."""
    from superpod.cli.cluster import cancel
    from superpod.cli.runs import status
    from superpod.slurm.profiles import profiles
    from superpod.slurm.submission import connection

    slurm = FakeSsh(refuses=99)
    folder, jobs = sweep.queue(slurm, three, attempts=1)
    done, *others = jobs
    write_json(Path(done) / "done", {"step": 1})
    monkeypatch.setattr(profiles, "load", lambda _name: None)
    monkeypatch.setattr(connection, "connect", lambda _profile: slurm)
    cancel.cancel(folder, cluster="far")
    assert slurm.cancelled == [f"--name={submit.job_name(run)}" for run in others]
    assert [(Path(run) / "stop").exists() for run in jobs] == [False, True, True]
    assert not Path(folder, "stop").exists()
    assert f"{done} is done" in capsys.readouterr().out
    listed, mirror = status._list_runs(slurm, None, folder, "")
    assert mirror
    assert [mirror.remote_path(one.run.path) for one in listed] == list(jobs)
    assert not any(one.problem for one in listed)


def test_refused_cancellation_in_a_sweep_is_an_error(three, monkeypatch):
    """The others are cancelled, and the refusal is an error with its reason, not a line on stdout."""
    from superpod.cli.cluster import cancel
    from superpod.runtime.runs import owner
    from superpod.slurm.submission import connection

    slurm = FakeSlurm(refuses=99)
    folder, jobs = sweep.queue(slurm, three, attempts=1)
    theirs = next(iter(jobs))
    for run in jobs:
        (Path(run) / "job.sbatch").touch()

    def refuse(path, doing):
        if str(path) == theirs:
            raise UserError(f"{path} belongs to alice: only alice may {doing}")

    monkeypatch.setattr(owner, "refuse_others", refuse)
    monkeypatch.setattr(connection, "Connection", lambda: slurm)
    with pytest.raises(UserError, match=r"1 of 3 runs could not be cancelled\n.* belongs to alice"):
        cancel.cancel(folder)
    assert len(slurm.cancelled) == 2


@pytest.mark.skipif(os.geteuid() != 0, reason="acts as two users")
def test_cancel_behind_ssh_checks_the_owner(three):
    """The real shell script, run by bob, by root, and without a run."""
    from superpod.cli.cluster import cancel

    slurm = FakeSsh(refuses=99)
    _, jobs = sweep.queue(slurm, three, attempts=1)
    run, root_run, _ = map(Path, jobs)
    for path in (run, root_run):
        os.chown(path, 12345, -1)
    with pytest.raises(UserError, match="run folder /nowhere does not exist"):
        cancel._cancel("/nowhere", slurm)
    cancel._cancel(str(root_run), slurm)
    assert (root_run / "stop").exists(), "root may stop a run"
    # From inside it: pytest's folders above let nobody but root through.
    as_bob = ["setpriv", "--reuid=12346", "--clear-groups", "sh", "-s", "--", "."]
    denied = subprocess.run(as_bob, input=cancel._REMOTE, capture_output=True, text=True, cwd=run)
    assert denied.returncode == 1
    assert "belongs to" in denied.stderr
    assert not (run / "stop").exists()


def test_table_is_sorted_by_loss(three, tmp_path):
    folder, jobs = sweep.queue(FakeSlurm(refuses=99), three, attempts=1)
    for run, loss in zip(jobs, (3.0, 1.0, None), strict=True):
        if loss is not None:
            line = {"step": 1, "loss": loss, "t": 1.0, "attempt": "001", "step_time_s": 1.0, "tokens": 100}
            append_line(Path(run) / "metrics.jsonl", line)
    write_json(Path(next(iter(jobs))) / "done", {"step": 1})
    rows = table.rank_members(Path(folder))
    assert [row.values["optim.config.lr"] for row in rows] == ["2e-4", "1e-4", "3e-4"]
    assert [row.summary and row.summary.loss_end for row in rows] == [1.0, 3.0, None]


def test_missing_run_has_a_row(three):
    folder, jobs = sweep.queue(FakeSlurm(refuses=99), three, attempts=1)
    (Path(next(iter(jobs))) / "run.json").unlink()
    gone = table.rank_members(Path(folder))[-1]
    assert gone.summary is None
    assert gone.problem
    from rich.console import Console

    console = Console(width=200, record=True)
    console.print(table.render(f"sweep {Path(folder).name}", table.rank_members(Path(folder))))
    assert "gone" in console.export_text()


def test_status_and_cancel_of_a_sweep(three, tmp_path, monkeypatch, capsys):
    from superpod.cli.cluster import cancel
    from superpod.cli.runs import status
    from superpod.reports.runs import run_list
    from superpod.slurm.submission import connection

    slurm = FakeSlurm(refuses=99)
    folder, jobs = sweep.queue(slurm, three, attempts=1)
    assert [one.run.path for one in run_list.list_runs(tmp_path)] == sorted(map(Path, jobs)), "the sweep is no run"
    listed, _ = status._list_runs(slurm, None, folder, "")
    assert [str(one.run.path) for one in listed] == list(jobs)
    write_json(Path(next(iter(jobs))) / "done", {"step": 1})
    for run in jobs:
        (Path(run) / "job.sbatch").touch()
    monkeypatch.setattr(connection, "Connection", lambda: slurm)
    cancel.cancel(folder)
    assert len(slurm.cancelled) == 2
    assert "is done" in capsys.readouterr().out


def test_unsatisfiable_dependency_is_reported(tmp_path):
    from superpod.runtime.runs.run_state import QueuedJob
    from superpod.slurm.status import run_views

    run = RunFolder.create(tmp_path, "toy", facts={}, recipe_lines=[])
    view = run_views.summarize_run(run, [QueuedJob("7", "PENDING", "DependencyNeverSatisfied", "N/A")])
    assert view.state == "queued"
    assert "will never start" in view.message
