"""The options `--html` and `--trace`: refused paths, written files, and imports."""

import subprocess
import sys

import pytest

from tests.cli.planning.small_plans import SMALL, printed

ONE = (*SMALL, "--layout", "tp=2,pp=2,vp=2,sp")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("plan", *SMALL, "--html", "README.md"), "ending with .html or .htm"),
        (("plan", *SMALL, "--html", "mine.html"), "mine.html exists and was not written by `recipes`"),
        (("plan", *SMALL, "--trace", "none/step.json"), "folder none does not exist"),
        (("explain", *ONE, "--trace", "step.html"), "ending with .json or .json.gz"),
        (("memory", *ONE, "--html", "folder.html"), "folder.html is a folder"),
        (("scale", *SMALL[:3], "--gpus", "8", "--html", ""), "--html is empty"),
        (("cost", *SMALL, "--tokens", "1T", "--html", "/proc/plan.html"), "/proc/plan.html cannot be written"),
    ],
    ids=lambda value: value[-1] if isinstance(value, tuple) else "",
)
def test_an_unsuitable_path_is_refused_before_planning(recipes_cli, tmp_path, words, says):
    (tmp_path / "mine.html").write_text("<p>mine</p>")
    (tmp_path / "folder.html").mkdir()
    done = recipes_cli(*words, cwd=tmp_path)
    assert done.returncode == 2
    assert done.stdout == ""
    assert says in " ".join(done.stderr.split())
    assert "next: " in done.stderr
    assert (tmp_path / "mine.html").read_text() == "<p>mine</p>"


@pytest.mark.slow
def test_a_page_is_written_if_the_pipe_is_closed(tmp_path):
    """`recipes plan ... --html plan.html | head -1` closes the pipe before the table is printed."""
    command = [sys.executable, "-m", "superpod.cli", "explain", *ONE, "--html", "one.html", "--trace", "step.json"]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.close()
        process.wait(timeout=120)
    text = (tmp_path / "one.html").read_text()
    assert text.startswith("<!doctype html>")
    assert text.rstrip().endswith("</html>")
    assert (tmp_path / "step.json").read_text().endswith("]}")


def test_a_missing_bokeh_is_refused_with_the_install_command(recipes_cli, tmp_path):
    (tmp_path / "sitecustomize.py").write_text(
        "import sys\nfrom importlib.machinery import PathFinder\nfind = PathFinder.find_spec\n"
        "PathFinder.find_spec = classmethod(lambda c, name, *a: None if name == 'bokeh' else find(name, *a))\n"
    )
    done = recipes_cli("explain", *ONE, "--html", "one.html", cwd=tmp_path, env={"PYTHONPATH": str(tmp_path)})
    assert done.returncode == 2
    assert "Bokeh, which is not installed" in done.stderr
    assert "[html]" in done.stderr


def test_plotting_is_not_imported_without_the_option():
    command = [sys.executable, "-X", "importtime", "-m", "superpod.cli", "plan", *SMALL]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines() if "|" in line}
    assert "superpod.planner.search" in imported
    assert not {name for name in imported if name.startswith(("bokeh", "jinja2", "tornado", "superpod.pages"))}


def test_the_page_contains_the_command_and_the_explanation(recipes_cli, tmp_path):
    text = printed(recipes_cli, "explain", *ONE, "--html", "one.html", cwd=tmp_path)
    page = (tmp_path / "one.html").read_text()
    assert f"recipes explain {' '.join(ONE)} --html one.html" in page
    bound = next(line for line in text.splitlines() if line.startswith("bound by"))
    assert f"<li>{bound}</li>" in page
    assert "http://" not in page.partition("<script")[0]
    assert "src=" not in page.partition("<script")[0]
