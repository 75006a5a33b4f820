"""Mistakes in profiles and submissions on a real Slurm with limits: caught before the queue, and by whom.

Each is tried as docs/slurm.md says: `cluster check`, which asks a node too, then `submit`, and `submit` alone. Under
--update-goldens the last test writes the table into docs/slurm.md.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from superpod.slurm import node_probe, profiles
from tests.slurm.testbed import bed
from tests.slurm.testbed.mistakes import PROFILE, SECRET, SUBMISSION, Mistake

pytestmark = pytest.mark.long

DOCS = Path(__file__).parents[3] / "docs" / "slurm.md"
ALL = (*PROFILE, *SUBMISSION)
rows: dict[str, str] = {}
"""mistake -> its line of the table"""


@pytest.fixture(scope="module")
def site(slurm_cluster):
    """The testbed with limits that Slurm enforces, a QOS that has some, and partitions that are not for everybody."""
    slurm_cluster.all_well()
    conf, slurm = bed.BASE / "etc" / "slurm.conf", slurm_cluster.slurm
    text = conf.read_text()
    enforced = text.replace("AccountingStorageEnforce=associations", "AccountingStorageEnforce=associations,limits,qos")
    more = "PartitionName=small Nodes=node[1-2] MaxTime=30 MaxNodes=1 State=UP\n"
    more += "PartitionName=closed Nodes=node[1-4] AllowAccounts=other State=UP\n"
    more += "PartitionName=broken Nodes=node[1-4] State=DOWN\n"
    more += "PartitionName=brief Nodes=node[1-4] MaxTime=5 State=UP\n"
    limits = {"short": "MaxWall=01:00:00", "narrow": "MaxTRESPerJob=gres/gpu=2", "few": "MaxSubmitJobsPerUser=4"}
    try:
        for name, limit in limits.items():
            slurm("sacctmgr", "-i", "add", "qos", name, "set", limit, check=False)  # there where a run was cut short
        slurm("sacctmgr", "-i", "modify", "user", "root", "set", f"qos+={','.join(limits)}")
        slurm_cluster("ctld-stop")
        conf.write_text(enforced + more)
        slurm_cluster("ctld-start")
        slurm_cluster.all_well()
        yield slurm_cluster
    finally:
        slurm_cluster("ctld-stop")
        conf.write_text(text)
        slurm_cluster("ctld-start")
        slurm("sacctmgr", "-i", "modify", "user", "root", "set", f"qos-={','.join(limits)}", check=False)
        slurm("sacctmgr", "-i", "delete", "qos", ",".join(limits), check=False)
        slurm_cluster.all_well()


def written(mistake: Mistake | None, folder: Path) -> Path:
    """A good profile, or one with the mistake."""
    text = (profiles.SHIPPED / "testbed.toml").read_text().replace("/tmp/superpod-testbed/runs", "RUNS")
    if mistake:
        assert mistake.old in text, mistake.old
        text = text.replace(mistake.old, mistake.new, 1)
    (folder / "image.sqsh").write_text("no image\n")
    path = folder / "my.toml"
    path.write_text(text.replace("RUNS", str(folder / "runs")).replace("IMAGE", str(folder / "image.sqsh")))
    return path


def first_words(output: str) -> str:
    """The first complaint, without paths of the test."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    other = r"(error: )?\d+ problems? on this|building the recipe|note: "
    line = next((one for one in lines if not re.match(other, one)), "")
    return re.sub(r"(error: |/tmp/\S+/|^- )", "", line)


def test_a_good_profile_is_taken(site, preloaded_cli, tmp_path):
    good = preloaded_cli("cluster", "check", written(None, tmp_path))
    assert good.returncode == 0, good.stdout + good.stderr
    assert "agrees with its cluster: 4 nodes in batch, and with node" in good.stdout


@pytest.mark.parametrize("mistake", ALL, ids=[mistake.name for mistake in ALL])
def test_a_mistake_is_caught_before_the_queue(mistake, site, preloaded_cli, tmp_path):
    path = written(mistake, tmp_path)
    checked = preloaded_cli("cluster", "check", path)
    where = () if "--cluster" in mistake.words else ("--cluster", path)
    submitted = preloaded_cli("submit", mistake.recipe, *where, *mistake.words, timeout=300)
    site.slurm("scancel", "-u", "root")
    says = first_words(checked.stdout + checked.stderr) if checked.returncode else ""
    says = says or (first_words(submitted.stderr) if submitted.returncode else "")
    by = ["`cluster check`"] if checked.returncode else []
    by += ["`submit`"] if submitted.returncode else []
    cut = says if len(says) <= 130 else says[:127] + "..."
    rows[mistake.name] = f"| {mistake.name} | {' and '.join(by) or 'nobody'} | {cut.replace('|', '/')} |"
    for done in (checked, submitted):
        assert done.returncode in (0, 2), done.stderr  # a refusal, never a traceback
        assert "Traceback" not in done.stderr
        assert SECRET not in done.stdout + done.stderr
        assert done.returncode == 0 or done.stdout + done.stderr
    assert bool(by) == mistake.caught, checked.stdout + submitted.stdout
    if submitted.returncode:
        assert not list(tmp_path.glob("runs/*/*"))  # and leaves no run folder behind


def test_maintenance_ahead_is_said_and_not_refused(site, preloaded_cli, tmp_path):
    words = ("starttime=now+3minutes", "duration=60", "flags=maint,ignore_jobs", "nodes=node[1-3]", "user=root")
    site.slurm("scontrol", "create", "reservation", "ReservationName=maint", *words)
    try:
        submit = ("submit", "tiny_llama3", "--cluster", written(None, tmp_path), "--dry-run")
        two = preloaded_cli(*submit, "--nodes", 2, timeout=300)
        one = preloaded_cli(*submit, "--nodes", 1, timeout=300)
    finally:
        site.slurm("scontrol", "delete", "reservationname=maint")
    assert two.returncode == one.returncode == 0, two.stderr + one.stderr
    assert "but reservation maint (maintenance) has 3 of the 4 nodes of batch" in two.stdout
    assert "reservation maint" not in one.stdout  # node4 stays free


def test_a_job_that_a_limit_holds_back_leaves_the_queue(site, tmp_path):
    """srun --immediate waits on there, and would wait when nobody does any more."""
    path = written(None, tmp_path)
    path.write_text(path.read_text().replace('partition = "batch"', 'partition = "batch"\nqos = "narrow"'))
    words = node_probe.srun(profiles.load(str(path)), 1, minutes=1)
    assert words[0] == "timeout"
    words[1] = "3"
    bed.run([*words, "true"], check=False)
    assert site.slurm("squeue", "-h", "-n", "recipes-check").strip() == ""


def test_the_table_of_the_documentation(request):
    """At least 38 of 40, that is 95 %. What has not run in this session keeps its line."""
    text = DOCS.read_text()
    block = re.search(r"<!-- mistakes -->.*?<!-- end -->", text, re.DOTALL)
    assert block
    lines = _by_name(block[0]) | rows
    assert {mistake.name for mistake in ALL} <= set(lines), "run the whole file with --update-goldens once"
    table = [lines[mistake.name] for mistake in ALL]
    caught = sum("| nobody |" not in line for line in table)
    assert caught >= 0.95 * len(table)
    head = [f"{caught} of {len(table)} are caught before the queue:", "", "| mistake | caught by | what it says |"]
    new = text.replace(block[0], "\n".join(["<!-- mistakes -->", *head, "|---|---|---|", *table, "<!-- end -->"]))
    if request.config.getoption("--update-goldens"):
        DOCS.write_text(new)
    assert DOCS.read_text() == new, "the table differs: run this file with --update-goldens, then read the diff"


def _by_name(block: str) -> dict[str, str]:
    """The lines of a table by their first column."""
    return {line.split("|")[1].strip(): line for line in block.splitlines() if line.startswith("| ")}
