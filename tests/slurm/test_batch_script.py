"""The sbatch script as a pure function: whole-file goldens, shellcheck, and values that would like to be commands."""

import base64
import dataclasses
import io
import json
import re
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from superpod.errors import UserError
from superpod.node import payload
from superpod.slurm import batch_script, environment, profiles
from tests.slurm.jobs import planned

RECIPE = '"""A recipe."""\n\n\ndef recipe():\n    return """two  \n\n#<< lines"""\n'
LINES = ("trainer.max_steps = 60", "", "#<< data.paths[0] = 'a b'  ")
HOSTILE = [
    "a b",
    "it's",
    'say "x"',
    "; touch pwned",
    "$(touch pwned)",
    "`touch pwned`",
    "${HOME}",
    "\\",
    "né ☃",
    "a#b",
    "*",
    "-n",
    "!!",
    "%j",
    "a\\'b",
    '"; touch pwned; "',
    "' ; touch pwned ; '",
    "\\$(touch pwned)",
]


def job_for(name: str, profile=None, **changes) -> batch_script.BatchJob:
    where = profile or profiles.load(name)
    known = {
        "recipe": "tiny_llama3",
        "cluster": where,
        "nodes": 2,
        "gpus": min(2, where.gpus_per_node),
        "runs": where.folders.runs,
        "variables": tuple(environment.variables(where, planned(where.gpu, tp=2, gbs=16))),
        "recipe_file": RECIPE,
        "recipe_lines": LINES,
        "runtime": b"runtime",
        "python": "python",
        "facts": {"max_steps": 60},
    }
    return batch_script.BatchJob(**known | changes)


def shellcheck(text: str) -> str:
    if not shutil.which("shellcheck"):
        pytest.skip("shellcheck is not installed: apt-get install shellcheck")
    return subprocess.run(["shellcheck", "-"], input=text, capture_output=True, text=True).stdout


@pytest.mark.parametrize("name", profiles.names())
def test_the_whole_script(name, golden):
    golden(f"slurm/{name}.sbatch", batch_script.render(job_for(name)))


@pytest.mark.parametrize("name", profiles.names())
def test_shellcheck_has_nothing_to_say(name):
    assert shellcheck(batch_script.render(job_for(name))) == ""


def test_the_same_job_is_the_same_text():
    assert batch_script.render(job_for("dgx_h100")) == batch_script.render(job_for("dgx_h100"))
    payload.runtime.cache_clear()
    first = payload.runtime()
    payload.runtime.cache_clear()
    assert payload.runtime() == first


def test_what_is_carried_comes_out_as_it_went_in(tmp_path):
    """The script's own sed and base64, on the script."""
    text = batch_script.render(job_for("testbed", runtime=payload.runtime()))
    file = tmp_path / "job.sbatch"
    file.write_text(text)
    (carried,) = re.findall(r"^carried\(\).*$", text, re.MULTILINE)
    script = (
        f'{carried}\ncarried recipe.py >"$1/recipe.py"; carried runtime.tar.gz | base64 --decode >"$1/runtime.tar.gz"'
        '; carried recipe.txt >"$1/recipe.txt"'
    )
    subprocess.run(["bash", "-c", script.replace('"$0"', f'"{file}"'), "bash", tmp_path], check=True)
    assert (tmp_path / "recipe.py").read_text() == RECIPE
    assert (tmp_path / "recipe.txt").read_text() == "".join(f"{line}\n" for line in LINES)
    assert (tmp_path / "runtime.tar.gz").read_bytes() == payload.runtime()


def test_the_runtime_needs_the_standard_library_only(tmp_path):
    with tarfile.open(fileobj=io.BytesIO(payload.runtime())) as archive:
        archive.extractall(tmp_path, filter="data")
    attempt = tmp_path / "superpod" / "node" / "attempt.py"
    isolated = ["/usr/bin/env", "-i", "PATH=/usr/bin:/bin", shutil.which("python3") or "python3", "-S", str(attempt)]
    done = subprocess.run([*isolated, "--recipe", "x", "--runs", "y"], capture_output=True, text=True)
    assert "the command that starts the ranks is missing" in done.stderr


@pytest.mark.slow
def test_the_runtime_needs_no_newer_python_than_it_says(tmp_path):
    """Of a node: 3.9 is RHEL 9's, 3.10 that of Ubuntu 22.04, which DGX OS 6 is. rank.py runs in NeMo's own."""
    pyright = Path(sys.executable).parent / "pyright"
    if not pyright.exists():
        pytest.skip("pyright: [dev] extra")
    with tarfile.open(fileobj=io.BytesIO(payload.runtime())) as archive:
        archive.extractall(tmp_path, filter="data")
    of_the_node = {
        "pythonVersion": "3.9",
        "include": ["superpod"],
        "exclude": ["**/rank.py"],
        "reportMissingImports": False,
    }
    (tmp_path / "pyrightconfig.json").write_text(json.dumps(of_the_node))

    def says() -> str:
        return subprocess.run([pyright, "-p", tmp_path], capture_output=True, text=True, timeout=300).stdout

    output = says()
    if "error" not in output:
        pytest.skip("pyright cannot start here")
    assert output.startswith("0 errors"), output
    (tmp_path / "superpod" / "newer.py").write_text("from datetime import UTC\nfound: int | None = UTC\n")
    assert '"UTC" is unknown import symbol' in says()


@pytest.mark.parametrize("value", HOSTILE)
def test_hostile_values_stay_inert(value, tmp_path):
    """In names, paths, account and environment: nothing runs, and every value arrives as it was written."""
    text = (profiles.SHIPPED / "testbed.toml").read_text()
    where = profiles.parse(text, "x.toml").model_copy(
        update={
            "env": {"MINE": value},
            "slurm": profiles.load("testbed").slurm.model_copy(update={"account": value, "constraint": value}),
            "container": profiles.load("dgx_h100").container.model_copy(update={"image": value}),
        }
    )
    variables = tuple(environment.variables(where, planned(where.gpu)))
    job = job_for("", where, runs=f"/runs/{value}", python=value, variables=variables, facts={"overrides": [value]})
    script = batch_script.render(job)
    assert shellcheck(script) == ""
    words = _run_with_a_fake_srun(script, tmp_path)
    assert words["MINE"] == value
    assert words["--runs"] == f"/runs/{value}"
    assert f"--container-image={value}" in words["argv"]
    assert value in words["argv"]
    assert not list(tmp_path.rglob("pwned"))
    assert _sbatch_reads(script, "account") == value


def _run_with_a_fake_srun(script: str, folder) -> dict:
    """Run the script in `folder` with a python3 that prints what it is given; nothing is unpacked."""
    fake = folder / "bin" / "python3"
    fake.parent.mkdir()
    fake.write_text('#!/bin/bash\nprintf "%s\\0" "MINE=$MINE" "$@" >out\n')
    fake.chmod(0o755)
    before, _, after = script.partition("if [[ ! -s $code")
    script = before + after.partition("\nfi\n")[2]
    path = f"{fake.parent}:/usr/bin:/bin"
    subprocess.run(
        ["bash", "-c", script], cwd=folder, env={"PATH": path, "SLURM_JOB_ID": "1"}, check=True, capture_output=True
    )
    mine, *argv = (folder / "out").read_bytes().decode().split("\0")[:-1]
    return {"MINE": mine.removeprefix("MINE="), "argv": argv, "--runs": argv[argv.index("--runs") + 1]}


def _sbatch_reads(script: str, name: str) -> str:
    """An option as sbatch's own reader takes it: quotes and backslashes, then the value."""
    (line,) = re.findall(rf"^#SBATCH --{name}=(.*)$", script, re.MULTILINE)
    if line.startswith('"'):
        return re.sub(r"\\(.)", r"\1", line[1:-1])
    return line


@pytest.mark.parametrize("value", ["a\nb", "a\rb", "a\tb\x07", "\x1b[31m"])
def test_a_line_break_in_an_option_is_refused(value):
    where = profiles.load("testbed")
    where = where.model_copy(update={"slurm": where.slurm.model_copy(update={"account": value})})
    with pytest.raises(UserError, match="cannot stand in an #SBATCH line"):
        batch_script.render(job_for("", where))


def test_a_line_break_in_the_environment_arrives(tmp_path):
    where = profiles.load("testbed").model_copy(update={"env": {"MINE": "a\nb"}})
    job = job_for("", where, variables=tuple(environment.variables(where, planned(where.gpu))))
    assert _run_with_a_fake_srun(batch_script.render(job), tmp_path)["MINE"] == "a\nb"


@pytest.mark.parametrize(
    ("form", "kind", "line"),
    [
        ("gpus-per-node", "", "#SBATCH --gpus-per-node=2\n"),
        ("gpus-per-node", "h100", "#SBATCH --gpus-per-node=h100:2\n"),
        ("gres", "", "#SBATCH --gres=gpu:2\n"),
        ("none", "", ""),
    ],
)
def test_gpus_are_asked_for_as_the_site_wants(form, kind, line):
    where = profiles.load("dgx_h100")
    where = where.model_copy(update={"slurm": where.slurm.model_copy(update={"gpus": form, "gpu_type": kind})})
    script = batch_script.render(job_for("", where))
    requested = "".join(re.findall(r"#SBATCH --(?:gpus|gres).*\n", script))
    assert requested == line


def test_one_task_for_each_gpu_and_no_torchrun():
    script = batch_script.render(dataclasses.replace(job_for("dgx_h100"), gpus=8))
    assert "#SBATCH --ntasks-per-node=8\n" in script
    assert "rank.py" in script
    assert not re.search(r"^[^#]*torchrun", script, re.MULTILINE)


def test_the_runtime_is_carried_in_lines_that_anyone_can_mail():
    script = batch_script.render(job_for("dgx_h100", runtime=bytes(range(256)) * 40))
    assert max(map(len, script.splitlines())) < 400
    block = script.partition("#>> runtime.tar.gz\n")[2].partition("#<<")[0]
    assert base64.b64decode(block.replace("#| ", "")) == bytes(range(256)) * 40
