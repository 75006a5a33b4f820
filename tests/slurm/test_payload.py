"""The payload of a job, under every Python that a node may have.

Each interpreter that is installed runs all of it, and its full version stands in the test's name; whatever is
installed, the files are read for what Python 3.9 does not have.
"""

import io
import json
import re
import shlex
import subprocess
import tarfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from superpod.runtime.attempts import payload
from superpod.runtime.runs.run_folder import RunFolder
from superpod.slurm.profiles import profiles
from superpod.slurm.script import batch_script, cluster_variables
from superpod.slurm.submission import submit
from tests import source_rules
from tests.slurm import newer_python, pythons
from tests.slurm.jobs import edited, planned
from tests.slurm.testbed.toys import TOY

NEEDS_LIGHTNING = ("superpod.runtime.rank.callback", "superpod.runtime.rank.profiled")
"""Lightning's callbacks: imported where training runs."""

IMPORTS = """
import compileall, importlib, pathlib, sys
root = pathlib.Path(sys.argv[1])
for path in sorted((root / "superpod").rglob("*.py")):
    compile(path.read_text(encoding="utf-8"), str(path), "exec")
    module = ".".join(path.relative_to(root).with_suffix("").parts)
    if module not in sys.argv[2:]:
        importlib.import_module(module)
        print(module)
from superpod.runtime.health.bandwidth import rounds
from superpod.common.redaction import redact_text
assert len([pair for pairs in rounds(5) for pair in pairs]) == 10
assert redact_text("--token 'x y' https://me:pw@host/") == "--token '<redacted>' https://<redacted>@host/"
"""

SCONTROL = """\
case "$1 $2" in
    "show hostnames") echo {node} ;;
    "show job") echo "JobId=7 JobName=$(cat "$0.name" || echo toy) JobState=RUNNING EndTime=Unknown" 2>/dev/null ;;
    "update JobId=7") echo "${{3#JobName=}}" >"$0.name" ;;
esac
"""
SLURM = {
    "scontrol": SCONTROL.format(node="node1"),
    "squeue": "",
    "scancel": "",
    "sbatch": "",
}
ENDS = {
    "done": 'echo "{}" >"$SUPERPOD_RUN_DIR/done"',
    "failed": 'echo "srun: error: no such node"; exit 3',
}


@pytest.fixture(
    params=pythons.WANTED, ids=lambda v: pythons.full_version(pythons.INSTALLED[v]) if v in pythons.INSTALLED else v
)
def python(request) -> str:
    """An interpreter of that version, without any package."""
    path = pythons.INSTALLED.get(request.param)
    if path is None:
        pytest.skip(f"python{request.param} is not on this machine (pyenv install {request.param}): read, not run")
    return path


@pytest.fixture
def carried(tmp_path) -> list[Path]:
    """The files of the runtime, unpacked like on a node."""
    with tarfile.open(fileobj=io.BytesIO(payload.pack_runtime())) as archive:
        archive.extractall(tmp_path / "code", filter="data")
    return sorted((tmp_path / "code").rglob("*.py"))


def test_payload_uses_python_3_9_only(carried):
    """The files are parsed, so that the test needs no Python 3.9."""
    assert len(carried) > 20
    assert newer_python.problems(carried) == []


NEWER = {
    "match": ("match 1:\n    case 1: pass", "match"),
    "possessive": ("import re\nre.search(r'(?:a++)b', 'x')", "a possessive quantifier"),
    "possessive, verbose": ('P = r""" a *+  # a comment\n b"""', "a possessive quantifier"),
    "atomic": ("import re\ndef f():\n    return re.match('(?>ab|a)c', 'x')", "an atomic group"),
    "slots": ("from dataclasses import dataclass\n@dataclass(slots=True)\nclass A: pass", "dataclass(slots)"),
    "kw_only": ("from dataclasses import dataclass\n@dataclass(kw_only=True)\nclass A: pass", "dataclass(kw_only)"),
    "strict": ("zip([1], [2], strict=True)", "zip(strict)"),
    "UTC": ("from datetime import UTC", "datetime.UTC"),
    "tomllib": ("import tomllib", "tomllib"),
    "pairwise": ("from itertools import pairwise", "itertools.pairwise"),
    "StrEnum": ("import enum\nclass A(enum.StrEnum): pass", "enum.StrEnum"),
    "bit_count": ("(5).bit_count()", "int.bit_count"),
    "union": ("isinstance(1, int | str)", "X | Y as a type at run time"),
    "except*": ("try: pass\nexcept* OSError: pass", "xcept"),
}


@pytest.mark.parametrize(("text", "says"), NEWER.values(), ids=NEWER.keys())
def test_newer_syntax_is_detected(text, says, tmp_path):
    file = tmp_path / "newer.py"
    file.write_text(text + "\n")
    assert says in "\n".join(newer_python.problems([file]))


def test_payload_imports(python, carried, tmp_path):
    code = str(tmp_path / "code")
    command = [python, "-S", "-W", "error", "-c", IMPORTS, code, *NEEDS_LIGHTNING]
    done = subprocess.run(command, env={"PYTHONPATH": code}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.split()) == len(carried) - len(NEEDS_LIGHTNING)
    assert "superpod.runtime.attempts.attempt" in done.stdout.split()


LINES = ("trainer.max_steps = 5", "", "  data.paths[0] = '#<< a b  '")


class Node:
    """A machine with fake commands of Slurm, and the rendered script on it."""

    def __init__(self, folder: Path, srun: str = "") -> None:
        self.folder, self.runs, self.bin = folder, folder / "it's runs", folder / "bin"
        self.bin.mkdir(parents=True)
        for name, body in {**SLURM, "srun": srun}.items():
            (self.bin / name).write_text(f"#!/bin/sh\n{body}\n")
            (self.bin / name).chmod(0o755)

    def script(self, python: str, **software) -> Path:
        """The script of a job of one rank, for a Python of the node."""
        cluster = profiles.load("testbed")
        software = cluster.software.model_copy(update={"host_python": python, **software})
        cluster = cluster.model_copy(update={"software": software})
        job = batch_script.BatchJob(
            recipe="tiny_llama3",
            cluster=cluster,
            nodes=1,
            gpus=1,
            runs=str(self.runs),
            variables=tuple(cluster_variables.variables(cluster, planned(cluster.gpu))),
            recipe_file="def recipe(): ...",
            runtime=payload.pack_runtime(),
            recipe_lines=LINES,
            facts={"max_steps": 5},
        )
        file = self.folder / "job.sbatch"
        file.write_text(batch_script.render(job))
        return file

    @property
    def only_run(self) -> RunFolder:
        """The run that is there."""
        (facts,) = (self.runs / "tiny_llama3").glob("*/run.json")
        return RunFolder.open(facts.parent)

    def run(self, script: Path, *, cwd: Path | None = None, **environ: str) -> subprocess.CompletedProcess[str]:
        """Run the script like slurmd."""
        of_the_job = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "node1", "SLURM_JOB_NAME": "tiny_llama3"}
        path = {"PATH": f"{self.bin}:/usr/bin:/bin", "HF_TOKEN": "hf_neverwritten1234"}
        return subprocess.run(
            ["bash", script],
            cwd=cwd,
            env={**path, **of_the_job, **environ},
            capture_output=True,
            text=True,
            timeout=120,
        )


@pytest.mark.parametrize("state", ENDS)
def test_plain_sbatch_creates_a_run(python, state, tmp_path):
    """The rendered script on a node of that Python."""
    node = Node(tmp_path, ENDS[state])
    done = node.run(node.script(python))
    run = node.only_run
    (attempt,) = run.attempts
    assert attempt.result["state"] == state, done.stdout + done.stderr
    assert done.returncode == (0 if state == "done" else 1)
    assert (run.path / "recipe.txt").read_text() == "".join(f"{line}\n" for line in LINES)
    assert run.facts["max_steps"] == 5
    assert json.loads((attempt.path / "env.json").read_text())["environment"]["HF_TOKEN"] == "<redacted>"
    if state == "failed":
        assert attempt.result["message"] == "srun: error: no such node (attempts/001/logs/srun.log)"


@pytest.mark.parametrize("version", pythons.TOO_OLD)
def test_older_python_is_refused_with_message(version, tmp_path):
    if version not in pythons.OLD:
        pytest.skip(f"python{version} is not on this machine")
    node = Node(tmp_path)
    done = node.run(node.script(pythons.OLD[version]))
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert "recipes: the batch script needs Python 3.9 or later" in last
    assert f"{pythons.OLD[version]} is Python {version}: set software.host_python" in last
    assert "Traceback" not in done.stderr


def test_missing_python_is_refused(tmp_path):
    node = Node(tmp_path)
    done = node.run(node.script("/opt/no/python3"))
    assert done.returncode == 1
    assert "/opt/no/python3: No such file or directory: set software.host_python" in done.stderr


def test_logs_show_early_failure_of_a_job(tmp_path, recipes_cli):
    """The only job of the run folder wrote nothing but its error."""
    node = Node(tmp_path)
    script = node.script("/opt/no/python3")
    run = RunFolder.create(tmp_path / "runs", "tiny_llama3", facts={"max_steps": 5}, recipe_lines=[])
    done = node.run(script, SUPERPOD_RUN_DIR=str(run.path))
    run.output("7").write_text(done.stdout + done.stderr)
    assert "the batch script needs Python 3.9 or later" in recipes_cli("logs", run.path).stdout


MODULES = {
    "Lmod": (
        'echo "Lmod has detected the following error: no module $2" >&2; return 1',
        "has detected the following error",
    ),
    "Modules 3, which ends with 0": ('echo "ModuleCmd_Load.c(213):ERROR:105: $2" >&2', "ERROR:105: cuda/12"),
}


@pytest.mark.parametrize(("body", "says"), MODULES.values(), ids=MODULES.keys())
def test_module_failure_ends_the_job_with_its_message(body, says, tmp_path):
    node = Node(tmp_path, ENDS["done"])
    init = tmp_path / "modules" / "init" / "bash"
    init.parent.mkdir(parents=True)
    init.write_text(f"module() {{ {body}\n}}\n")
    done = node.run(node.script("python3", modules=["cuda/12"]), MODULESHOME=str(tmp_path / "modules"))
    assert done.returncode == 1
    assert re.search(rf"recipes: module load cuda/12 fails on \S+: .*{says}", done.stderr)
    assert not node.runs.exists()


def test_loaded_modules_reach_the_ranks(tmp_path):
    node = Node(tmp_path, 'echo "$OF_THE_MODULE" >"$SUPERPOD_RUN_DIR/done"')
    init = tmp_path / "modules" / "init" / "bash"
    init.parent.mkdir(parents=True)
    init.write_text('module() { export OF_THE_MODULE="$unset_name$2"; echo "sets NCCL_ASYNC_ERROR_HANDLING" >&2; }\n')
    done = node.run(node.script("python3", modules=["cuda/12"]), MODULESHOME=str(tmp_path / "modules"))
    assert done.returncode == 0, done.stderr
    (marker,) = node.runs.glob("*/*/done")
    assert marker.read_text() == "cuda/12\n"


def test_missing_module_command_ends_the_job(tmp_path):
    node = Node(tmp_path)
    done = node.run(node.script("python3", modules=["cuda/12"]))
    assert done.returncode == 1
    assert "module: command not found" in done.stderr


def test_job_of_another_size_is_refused(tmp_path):
    node = Node(tmp_path)
    done = node.run(node.script("python3"), SLURM_JOB_NUM_NODES="4", SLURM_NTASKS="8")
    assert done.returncode == 1
    assert "Slurm allocated 4 nodes and 8 tasks" in done.stderr


RANKS = """\
for rank in 0 1; do
    SLURM_PROCID=$rank SLURM_LOCALID=$rank SLURM_NODEID=0 SLURM_NTASKS=2 SLURM_NNODES=1 \\
        {python} {toy} "$SUPERPOD_CODE/recipe.py" &
done
wait
"""


@pytest.mark.slow
def test_ranks_train_save_and_resume_on_that_python(python, tmp_path):
    """The toy's two ranks with the real runtime: logs, heartbeats, checkpoints, metrics, the end; then resumed."""
    node = Node(tmp_path, RANKS.format(python=shlex.quote(python), toy=shlex.quote(str(TOY))))
    (node.bin / "scontrol").write_text(f"#!/bin/sh\n{SCONTROL.format(node='127.0.0.1')}")
    script = node.script(python)
    options = {"max_steps": 8, "save_every": 2, "step_s": 0.01, "tell": ["PYTHONUNBUFFERED"]}
    script.write_text(edited(script.read_text(), "def recipe(): ...", f"OPTIONS = {json.dumps(options)}"))
    done = node.run(script, HOME=str(tmp_path))
    run = node.only_run
    (attempt,) = run.attempts
    assert attempt.result["state"] == "done", done.stdout + done.stderr
    assert [line["step"] for line in run.metrics()] == list(range(1, 9))
    assert attempt.result["checkpoint"] == 8
    beats = attempt.heartbeats()
    assert sorted(beats) == [0, 1]
    assert {beat["phase"] for beat in beats.values()} == {"done"}
    (run.path / "done").unlink()
    node.run(script, HOME=str(tmp_path), SLURM_RESTART_COUNT="1")
    assert run.attempts[-1].result["before"] == 8


def test_reused_job_id_creates_a_new_run(tmp_path):
    """From another cluster on the same disk, or after a database reset; a requeue of the job continues its run."""
    node = Node(tmp_path, ENDS["failed"])
    script = node.script("python3")
    node.run(script)
    (node.bin / "scontrol.name").unlink()  # another job
    node.run(script)
    runs = sorted(RunFolder.open(facts.parent).path for facts in node.runs.glob("*/*/run.json"))
    assert [len(RunFolder.open(run).attempts) for run in runs] == [1, 1]
    node.run(script, SLURM_RESTART_COUNT="1")  # of the second
    assert sorted(len(RunFolder.open(run).attempts) for run in runs) == [1, 2]


def test_requeued_job_without_its_run_creates_none(tmp_path):
    node = Node(tmp_path)
    (node.bin / "scontrol").write_text("#!/bin/sh\nexit 1\n")
    done = node.run(node.script("python3"), SLURM_RESTART_COUNT="1")
    assert done.returncode == 1
    assert "job 7 was requeued, but Slurm's controller does not report which run it started" in done.stdout
    assert not [*node.runs.glob("*/*")]


HOSTILE = 'import os, sys; open(os.environ["PWNED"], "a").write(" ".join(sys.argv) + chr(10))\n'
NAMES = (
    "superpod/runtime/attempts/attempt.py",
    "superpod/runtime/rank/rank.py",
    "superpod/__init__.py",
    "recipe.py",
    "json.py",
    "re.py",
)


def plant(folder: Path) -> None:
    """Code of another user, at every name that a job executes or imports."""
    for name in NAMES:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(HOSTILE)


def test_foreign_code_in_folder_for_runs_is_not_executed(tmp_path):
    """Where earlier versions unpacked their code, and where the job is submitted."""
    node = Node(tmp_path, 'python3 -c "import json"; echo "{}" >"$SUPERPOD_RUN_DIR/done"')
    plant(node.runs / ".jobs" / "7" / "code")
    plant(node.runs)
    plant(node.runs / "tiny_llama3" / "20260101T000000Z-j7" / "code")
    script = node.script("python3")
    done = node.run(script, cwd=node.runs, PWNED=str(tmp_path / "pwned"))
    assert not (tmp_path / "pwned").exists()
    assert node.only_run.done, done.stdout + done.stderr


@pytest.mark.parametrize("earlier", ["code", "code.12345678"])
def test_foreign_code_in_run_is_not_executed(tmp_path, earlier):
    node = Node(tmp_path, ENDS["failed"])
    script = node.script("python3")
    node.run(script)
    run = node.only_run
    (before,) = run.path.glob("code.*")
    plant(run.path / earlier)
    (run.path / "attempts" / "001" / "code").symlink_to(run.path / earlier)
    done = node.run(script, SLURM_RESTART_COUNT="1", PWNED=str(tmp_path / "pwned"))
    assert not (tmp_path / "pwned").exists(), done.stdout + done.stderr
    assert len(run.attempts) == 2
    (now,) = run.path.glob("code.*")
    assert now not in (before, run.path / earlier)
    assert now.stat().st_mode & 0o777 == 0o700
    assert (now / "superpod" / "runtime" / "attempts" / "attempt.py").read_text() == (
        payload.PACKAGE / "runtime/attempts/attempt.py"
    ).read_text()


def test_a_job_leaves_nothing_in_tmp(tmp_path):
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    for ends in ("exit 3", "kill -9 $PPID"):  # $PPID: attempt.py
        node = Node(tmp_path / ends[:4], f'ls "{scratch}" >"$SUPERPOD_RUN_DIR/left"; {ends}')
        script = node.script("python3")
        script.write_text(script.read_text().replace("mktemp -d /tmp/", f"mktemp -d {scratch}/"))
        node.run(script)
        assert (node.only_run.path / "left").read_text() == ""
        assert [*scratch.iterdir()] == []


def test_deferred_job_carries_all_imported_modules(tmp_path):
    run: Any = SimpleNamespace(data_facts={}, is_deferred=True)
    cluster: Any = SimpleNamespace(declared_only=True, container=SimpleNamespace(image=""))
    files = submit.project_files(run, cluster)
    with tarfile.open(fileobj=io.BytesIO(payload.pack_runtime(tuple(files.items())))) as archive:
        archive.extractall(tmp_path, filter="data")
    missing = []
    for path in sorted(tmp_path.rglob("*.py")):
        for line, module in source_rules.imports(path):
            file = Path(*module.split(".")).with_suffix(".py")
            is_ours = (payload.PACKAGE.parent / file).is_file() and file.name not in payload.EXCLUDED_FILES
            if is_ours and not (tmp_path / file).is_file():
                missing.append(f"{path.relative_to(tmp_path)}:{line} imports {module}")
    assert missing == []
