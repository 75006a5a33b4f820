"""The rendered sbatch script: goldens, shellcheck, the payload, and hostile values."""

import base64
import dataclasses
import difflib
import gzip
import io
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from superpod.errors import UserError
from superpod.runtime.attempts import payload
from superpod.slurm.profiles import profiles
from superpod.slurm.script import batch_script, cluster_variables
from tests.conftest import ROOT
from tests.slurm.jobs import planned

COMPLETE = "dgx_h100"
"""The cluster whose script is a complete golden, slurm/example.sbatch."""
RECIPE = '"""A recipe."""\n\n\ndef recipe():\n    return """two  \n\n#<< lines"""\n'
LINES = ("trainer.max_steps = 60", "", "#<< data.paths[0] = 'a b'  ")
NO_RUNTIME = gzip.compress(bytes(1024), mtime=0)
"""An archive that holds nothing."""
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
        "variables": tuple(cluster_variables.variables(where, planned(where.gpu, tp=2, gbs=16))),
        "recipe_file": RECIPE,
        "recipe_lines": LINES,
        "runtime": NO_RUNTIME,
        "python": "python",
        "facts": {"max_steps": 60},
    }
    return batch_script.BatchJob(**known | changes)


def shellcheck(text: str) -> str:
    if not shutil.which("shellcheck"):
        pytest.skip("shellcheck is not installed: apt-get install shellcheck")
    return subprocess.run(["shellcheck", "-"], input=text, capture_output=True, text=True).stdout


def test_script_matches_golden(golden):
    golden(ROOT / "slurm" / "example.sbatch", batch_script.render(job_for(COMPLETE)))


def test_scripts_of_other_clusters_match_golden(golden):
    text = "What the scripts of other clusters change in slurm/example.sbatch, but for the columns of comments.\n"
    for name in profiles.names():
        if name != COMPLETE:
            changed = difflib.ndiff(unaligned(COMPLETE), unaligned(name))
            text += "\n".join(["", f"[{name}]", *(line for line in changed if line.startswith(("+", "-")))]) + "\n"
    golden("slurm/others.txt", text)


def unaligned(name):
    """The lines of a cluster's script, with their comments directly behind them."""
    return [re.sub(r" +# ", " # ", line) for line in batch_script.render(job_for(name)).splitlines()]


@pytest.mark.parametrize("name", profiles.names())
def test_shellcheck_passes(name):
    assert shellcheck(batch_script.render(job_for(name))) == ""


@pytest.mark.parametrize("name", profiles.names())
def test_executed_lines_come_first_and_are_few(name):
    """For an administrator, who reads it before it runs."""
    lines = batch_script.render(job_for(name)).splitlines()
    (executed,) = re.findall(r"^# Lines 1 to (\d+) are executed", "\n".join(lines), re.MULTILINE)
    assert lines[int(executed) - 1].startswith("exit 1 #")
    assert int(executed) <= 125
    assert all(line.startswith("#") for line in lines[int(executed) :] if line)
    assert any(line.startswith("ulimit -c 0 ") for line in lines)


def test_rendering_is_deterministic():
    assert batch_script.render(job_for("dgx_h100")) == batch_script.render(job_for("dgx_h100"))
    payload.pack_runtime.cache_clear()
    first = payload.pack_runtime()
    payload.pack_runtime.cache_clear()
    assert payload.pack_runtime() == first


def test_payload_is_unpacked_unchanged(tmp_path):
    """By the script itself, up to the line that starts attempt.py."""
    text = batch_script.render(job_for("testbed", runtime=payload.pack_runtime()))
    code = _run(text, tmp_path, "find", "$code", "-maxdepth", "1", "-printf", "%P ").stdout.split()
    assert sorted(code) == ["recipe.py", "recipe.txt", "superpod"]
    assert _run(text, tmp_path, "cat", "$code/recipe.py").stdout == RECIPE
    assert _run(text, tmp_path, "cat", "$code/recipe.txt").stdout == "".join(f"{line}\n" for line in LINES)
    attempt = _run(text, tmp_path, "cat", "$code/superpod/runtime/attempts/attempt.py").stdout
    assert attempt == (payload.PACKAGE / "runtime" / "attempts" / "attempt.py").read_text()


def test_code_is_unpacked_into_a_new_private_folder(tmp_path):
    text = batch_script.render(job_for("testbed"))
    folders = [_run(text, tmp_path, "stat", "-c", "%n %u %a %F", "$code").stdout.split(maxsplit=3) for _ in "ab"]
    assert [facts for _, *facts in folders] == [[str(os.geteuid()), "700", "directory\n"]] * 2
    assert folders[0][0] != folders[1][0]


@pytest.mark.parametrize("change", [("return", "pass"), ("#| trainer", "#|  trainer"), ("H4sI", "H4sJ")])
def test_modified_or_truncated_payload_is_not_executed(tmp_path, change):
    """A truncated or edited copy of a script; only the lines before `exit` may be edited."""
    text = batch_script.render(job_for("testbed"))
    for broken in (text.replace(*change), text[: text.rindex("#<<")]):
        assert broken != text
        done = _run(broken, tmp_path, "echo", "executed")
        assert (done.returncode, done.stdout) == (1, "")
        assert "does not match: render" in done.stderr
    assert _run(text.replace("OMP_NUM_THREADS=1", "OMP_NUM_THREADS=4"), tmp_path, "echo", "executed").returncode == 0


def _run(script: str, folder: Path, *command: str) -> subprocess.CompletedProcess:
    """The script, with another command in place of attempt.py; `$code` in it is the folder."""
    file = folder / "job.sbatch"
    before, _, after = script.partition('exec "$host_python"')
    words = " ".join(f'"{word}"' for word in command)
    file.write_text(f'{before}{words}; rm -r "$code"; exit\n{after.partition("exit 1 #")[2]}')
    return subprocess.run(["bash", file], env={"PATH": "/usr/bin:/bin"}, capture_output=True, text=True)


def test_runtime_needs_only_the_standard_library(tmp_path):
    with tarfile.open(fileobj=io.BytesIO(payload.pack_runtime())) as archive:
        archive.extractall(tmp_path, filter="data")
    attempt = tmp_path / "superpod" / "runtime" / "attempts" / "attempt.py"
    isolated = ["/usr/bin/env", "-i", "PATH=/usr/bin:/bin", shutil.which("python3") or "python3", "-S", str(attempt)]
    done = subprocess.run([*isolated, "--recipe", "x", "--runs", "y"], capture_output=True, text=True)
    assert "the command that starts the ranks is missing" in done.stderr


@pytest.mark.slow
def test_runtime_passes_pyright_for_python_3_9(tmp_path):
    """Of a node: 3.9 is RHEL 9's, 3.10 that of Ubuntu 22.04, which DGX OS 6 is. rank.py runs in NeMo's own."""
    pyright = Path(sys.executable).parent / "pyright"
    if not pyright.exists():
        pytest.skip("pyright: [dev] extra")
    with tarfile.open(fileobj=io.BytesIO(payload.pack_runtime())) as archive:
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
def test_hostile_values_are_quoted(value, tmp_path):
    """In names, paths, account and environment: nothing is executed, and every value is preserved."""
    text = (profiles.DEFAULT_PROFILES / "testbed.toml").read_text()
    where = profiles.parse(text, "x.toml").model_copy(
        update={
            "env": {"MINE": value},
            "slurm": profiles.load("testbed").slurm.model_copy(update={"account": value, "constraint": value}),
            "container": profiles.load("dgx_h100").container.model_copy(update={"image": value}),
        }
    )
    variables = tuple(cluster_variables.variables(where, planned(where.gpu)))
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
    """Run the script in `folder` with a python3 that records its arguments."""
    fake = folder / "bin" / "python3"
    fake.parent.mkdir()
    fake.write_text('#!/bin/bash\nprintf "%s\\0" "MINE=$MINE" "$@" >out\n')
    fake.chmod(0o755)
    (folder / "job.sbatch").write_text(script)
    path = f"{fake.parent}:/usr/bin:/bin"
    subprocess.run(["bash", "job.sbatch"], cwd=folder, env={"PATH": path}, check=True, capture_output=True)
    mine, *argv = (folder / "out").read_bytes().decode().split("\0")[:-1]
    shutil.rmtree(argv[argv.index("--unpacked") + 1])
    return {"MINE": mine.removeprefix("MINE="), "argv": argv, "--runs": argv[argv.index("--runs") + 1]}


def _sbatch_reads(script: str, name: str) -> str:
    """Parse an option like sbatch: quotes and backslashes, then the value."""
    (line,) = re.findall(rf"^#SBATCH --{name}=(.*)$", script, re.MULTILINE)
    if line.startswith('"'):
        return re.sub(r"\\(.)", r"\1", line[1:-1])
    return line


@pytest.mark.parametrize("value", ["a\nb", "a\rb", "a\tb\x07", "\x1b[31m"])
def test_line_break_in_an_option_is_refused(value):
    where = profiles.load("testbed")
    where = where.model_copy(update={"slurm": where.slurm.model_copy(update={"account": value})})
    with pytest.raises(UserError, match="cannot be written in an #SBATCH line"):
        batch_script.render(job_for("", where))


def test_line_break_in_the_environment_is_preserved(tmp_path):
    where = profiles.load("testbed").model_copy(update={"env": {"MINE": "a\nb"}})
    job = job_for("", where, variables=tuple(cluster_variables.variables(where, planned(where.gpu))))
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
def test_form_of_the_gpu_request(form, kind, line):
    where = profiles.load("dgx_h100")
    where = where.model_copy(update={"slurm": where.slurm.model_copy(update={"gpus": form, "gpu_type": kind})})
    script = batch_script.render(job_for("", where))
    requested = "".join(re.findall(r"#SBATCH --(?:gpus|gres).*\n", script))
    assert requested == line


def test_one_task_per_gpu_without_torchrun():
    script = batch_script.render(dataclasses.replace(job_for("dgx_h100"), gpus=8))
    assert "#SBATCH --ntasks-per-node=8\n" in script
    assert "rank.py" in script
    assert not re.search(r"^[^#]*torchrun", script, re.MULTILINE)


def test_payload_lines_are_short():
    script = batch_script.render(job_for("dgx_h100", runtime=bytes(range(256)) * 40))
    assert max(map(len, script.splitlines())) < 400
    block = script.partition("#>> runtime.tar.gz\n")[2].partition("#<<")[0]
    assert base64.b64decode(block.replace("#| ", "")) == bytes(range(256)) * 40
