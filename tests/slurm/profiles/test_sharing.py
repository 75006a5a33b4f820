"""Permissions and groups in a folder of runs shared by several users."""

import grp
import io
import os
import stat
import subprocess
import tarfile
from pathlib import Path

import pytest

from superpod.errors import UserError
from superpod.runtime.runs.run_folder import RunFolder
from superpod.slurm.profiles import profiles, sharing
from superpod.slurm.submission import connection, submit
from tests.slurm.testbed.test_ssh import resolved_run

TEXT = (profiles.DEFAULT_PROFILES / "testbed.toml").read_text()


class FakeLogin(connection.Connection):
    """A fake connection behind SSH, which runs commands on this machine under a login's umask."""

    remote = True

    def run_bytes(self, command, **how):
        with sharing.umask("0022"):
            return super().run_bytes(command, **how)


def mode(path):
    return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.parametrize("own", [0o3775, 0o1777, 0o755, 0o700])
def test_only_the_owner_may_write_to_a_run(tmp_path, own):
    """Whatever the rights of the folder for runs and the umask are."""
    runs = tmp_path / "runs"
    runs.mkdir()
    runs.chmod(own)
    with sharing.umask("0002"):
        run = RunFolder.create(runs, "tiny", facts={}, recipe_lines=[])
        with run.lock():
            run.new_attempt()
    assert not any(mode(path) & 0o022 for path in (runs / "tiny").rglob("*"))
    with sharing.umask("0027"):
        run = RunFolder.create(runs, "other", facts={}, recipe_lines=[])
    assert mode(run.path) & 0o777 == 0o750
    assert mode(run.path / "run.json") == 0o640


def test_umask_is_restored():
    before = os.umask(0o022)
    os.umask(before)
    with sharing.umask("0007"), sharing.umask(""):
        assert os.umask(0o007) == 0o007
    assert os.umask(before) == before


def test_files_inherit_permissions_of_the_run(tmp_path):
    run = tmp_path / "run"
    run.mkdir(0o750)
    with sharing.inherit_permissions(run):
        subprocess.run(["touch", run / "slurm-1.out"], check=True)
    assert mode(run / "slurm-1.out") == 0o640
    with sharing.inherit_permissions(tmp_path / "gone"):
        (tmp_path / "other").touch()


def test_group_and_setgid_are_set(tmp_path):
    group = next(g for g in grp.getgrall() if g.gr_gid in {*os.getgroups(), *([g.gr_gid] if not os.geteuid() else [])})
    run = RunFolder.create(tmp_path / "runs", "tiny", facts={}, recipe_lines=[])
    sharing.set_group(run.path, group.gr_name)
    (run.path / "attempts" / "001").mkdir()
    (run.path / "attempts" / "001" / "result.json").touch()
    assert {path.stat().st_gid for path in (run.path, *run.path.rglob("*"))} == {group.gr_gid}
    with pytest.raises(UserError, match="has no group 'nobody of that name'"):
        sharing.set_group(run.path, "nobody of that name")


@pytest.mark.parametrize("mask", ["027", "0027", "0077", "022", ""])
def test_umask_of_profile(mask):
    text = TEXT.replace("[folders]", f'[folders]\numask = "{mask}"\ngroup = "team"')
    assert profiles.parse(text, "x.toml").folders.umask == mask


@pytest.mark.parametrize("mask", ["777", "0700", "27", "0o27", "u=rwx", "00270", "0007", "0002", "025"])
def test_unsafe_umask_is_refused(mask):
    with pytest.raises(UserError, match="must be a umask"):
        profiles.parse(TEXT.replace("[folders]", f'[folders]\numask = "{mask}"'), "x.toml")


def test_run_folder_behind_ssh_gets_the_same_permissions(tmp_path):
    """The shell script of the real thing, without SSH."""
    group = grp.getgrgid(os.getegid()).gr_name
    RunFolder.create(tmp_path / "here", "tiny", facts={}, recipe_lines=[])
    (run,) = (tmp_path / "here" / "tiny").iterdir()
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w:gz") as archive:
        for entry in run.iterdir():
            archive.add(entry, arcname=entry.name)
    runs = tmp_path / "runs"
    runs.mkdir()
    runs.chmod(0o3775)
    words = [str(runs), "0027", group, "tiny", run.name]
    there = runs / "tiny" / run.name
    made = connection.Connection().run(["sh", "-c", sharing.UNPACK_RUN, "sh", *words], stdin=stream.getvalue())
    assert made == str(there)
    assert mode(there) == 0o2750
    assert mode(there / "run.json") == 0o640
    assert RunFolder.open(there).recipe == "tiny"


@pytest.mark.parametrize("here", ["0077", "0000"])
@pytest.mark.parametrize(
    ("there", "folder", "file"), [("0027", 0o750, 0o640), ("0077", 0o700, 0o600), ("", 0o755, 0o644)]
)
def test_local_umask_has_no_effect_behind_ssh(tmp_path, here, there, folder, file):
    """With umask 077 at submission, no other user could read the run."""
    text = TEXT.replace("[folders]", f'[folders]\numask = "{there}"')
    submission = submit.Submission(resolved_run(), profiles.parse(text, "x.toml"), str(tmp_path / "runs"))
    with sharing.umask(here):
        run = Path(submit.new_run(submission, FakeLogin()))
    submit.record_jobs(FakeLogin(), str(run), ["7", "8"])
    assert {mode(path) for path in (run, *run.rglob("*")) if path.is_dir()} == {folder}
    assert {mode(path) for path in run.rglob("*") if path.is_file()} == {file}
    assert {submit.SCRIPT, submit.CHAIN} <= {path.name for path in run.iterdir()}


@pytest.mark.skipif(os.geteuid() != 0, reason="gives a folder to another user")
@pytest.mark.parametrize("taken", ["folder", "link", "nothing"])
def test_run_behind_ssh_avoids_folders_of_other_users(tmp_path, taken):
    """The real shell script, equivalent to RunFolder.create."""
    runs = tmp_path / "runs"
    runs.mkdir()
    runs.chmod(0o3775)
    if taken == "folder":
        (runs / "tiny").mkdir()
    else:
        (runs / "tiny").symlink_to(tmp_path if taken == "link" else tmp_path / "nothing")
    os.chown(runs / "tiny", 12345, 12345, follow_symlinks=False)
    stream = io.BytesIO()
    tarfile.open(fileobj=stream, mode="w:gz").close()

    def send(name: str) -> Path:
        words = ["sh", "-c", sharing.UNPACK_RUN, "sh", str(runs), "", "", "tiny", name]
        return Path(connection.Connection().run(words, stdin=stream.getvalue()))

    run = send("20260101T000000Z-abcdef")
    assert run.parent.name == "tiny.root"
    assert mode(run) & 0o022 == 0
    with pytest.raises(UserError, match="File exists"):
        send(run.name)
    runs.chmod(0o777)
    with pytest.raises(UserError, match=r"other users can write to"):
        send("20260101T000001Z-abcdef")
