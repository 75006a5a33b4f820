"""Every option for an output file replaces files of the same verb and refuses other files and links."""

import os

import pytest

from superpod.slurm.profiles import profile_init, profiles
from tests.reports.report_cases import KILLED_TWICE, copied

ROWS = "id,model,gpu,gpus,precision,seq,gbs,mbs,tp,pp,vp,outcome,tokens_per_s_per_gpu\n" + "".join(
    f"{name},llama3_8b,h100,{gpus},bf16,8192,128,1,{tp},1,,ok,9000\n" for name, gpus, tp in (("a", 16, 2), ("b", 8, 4))
)
SMALL = ("llama3_8b", "--gpu", "h100", "--gpus", "8", "--gbs", "64")
RECIPE = "llama3_8b_pretrain_h100_bf16"
OUTPUTS = {
    "predict --out": (("predict", "--from", "rows.csv"), "--out", "out.csv"),
    "predict --json": (("predict", "--from", "rows.csv", "--json"), "--out", "out.jsonl"),
    "calibrate": (("calibrate", "--from", "rows.csv"), "--out", "mine.toml"),
    "report --plot png": (("report", "RUN"), "--plot", "loss.png"),
    "report --plot svg": (("report", "RUN"), "--plot", "loss.svg"),
    "report --plot pdf": (("report", "RUN", "RUN"), "--plot", "loss.pdf"),
    "report --html": (("report", "RUN"), "--html", "report.html"),
    "plan --html": (("plan", *SMALL), "--html", "plan.html"),
    "memory --html": (("memory", RECIPE), "--html", "memory.html"),
    "plan --trace": (("plan", *SMALL), "--trace", "step.json.gz"),
    "status --prometheus": (("status", "--runs", "runs"), "--prometheus", "runs.prom"),
}

SLOW = ("report --plot svg", "report --plot pdf", "memory --html", "calibrate")
"""Written by the same code as another output, or slow."""
CASES = [pytest.param(output, marks=pytest.mark.slow) if output in SLOW else output for output in OUTPUTS]


@pytest.fixture
def place(tmp_path):
    (tmp_path / "rows.csv").write_text(ROWS)
    copied(KILLED_TWICE, tmp_path)
    return tmp_path


def call(recipes_cli, place, output):
    words, option, name = OUTPUTS[output]
    run = next((place / "runs").glob("*/*"))
    return recipes_cli(*(run if word == "RUN" else word for word in words), option, name, cwd=place), place / name


@pytest.mark.parametrize("output", CASES)
@pytest.mark.slow
def test_an_own_file_is_replaced(output, recipes_cli, place):
    for _ in range(2):
        done, file = call(recipes_cli, place, output)
        assert done.returncode == 0, done.stderr
        assert file.stat().st_size > 50
        os.utime(file, (1, 1))
    done, file = call(recipes_cli, place, output)
    assert file.stat().st_mtime > 1


@pytest.mark.parametrize("output", CASES)
def test_another_file_is_refused_and_kept(output, recipes_cli, place):
    file = place / OUTPUTS[output][2]
    file.write_text("theirs\n")
    done, _ = call(recipes_cli, place, output)
    assert done.returncode == 2, done.stdout
    assert "was not written by" in done.stderr
    assert "  next: choose another name" in done.stderr
    assert file.read_text() == "theirs\n"
    assert done.stdout == "", "refused before anything is computed"


@pytest.mark.parametrize("to", ["theirs", "nowhere"])
@pytest.mark.parametrize("output", CASES)
def test_a_link_is_refused_and_its_target_kept(output, to, recipes_cli, place):
    (place / "theirs").write_text("theirs\n")
    (place / OUTPUTS[output][2]).symlink_to(to)
    done, file = call(recipes_cli, place, output)
    assert done.returncode == 2, done.stdout
    assert f"is a link to {to}" in done.stderr
    assert (place / "theirs").read_text() == "theirs\n"
    assert file.is_symlink()
    assert not (place / "nowhere").exists()


def test_predict_appends_to_stdout_that_is_a_file(recipes_cli, place):
    """Root could replace /dev/stdout itself by a file."""
    import subprocess
    import sys

    words = [sys.executable, "-m", "superpod.cli", "predict", "--from", "rows.csv", "--json"]
    with (place / "out.jsonl").open("w") as file:
        file.write("before\n")
        file.flush()
        done = subprocess.run(words, stdout=file, stderr=subprocess.PIPE, text=True, cwd=place, timeout=60)
    assert done.returncode == 0, done.stderr
    assert [line[:9] for line in (place / "out.jsonl").read_text().splitlines()] == ["before", '{"id": "a', '{"id": "b']


def test_a_profile_replaces_a_link_only_with_force_and_keeps_its_target(tmp_path, monkeypatch):
    from superpod.cli.cluster import cluster
    from superpod.errors import UserError

    monkeypatch.setattr(profile_init, "render_profile", lambda *_, **__: "ours\n")
    monkeypatch.setattr(profiles, "parse", lambda *_: None)
    (tmp_path / "theirs").write_text("theirs\n")
    for to in ("theirs", "nowhere"):
        link = tmp_path / f"{to}.toml"
        link.symlink_to(tmp_path / to)
        with pytest.raises(UserError, match="already exists"):
            cluster.init(to=link, like="", host="", runs="", force=False)
        cluster.init(to=link, like="", host="", runs="", force=True)
        assert link.read_text() == "ours\n"
    assert (tmp_path / "theirs").read_text() == "theirs\n"
    assert not (tmp_path / "nowhere").exists()
