"""Submissions that Slurm accepts are not refused, and those it refuses are, with planted answers."""

import dataclasses
import os
import subprocess

import pytest

from superpod.errors import UserError
from superpod.slurm import node_health
from superpod.slurm.preflight.limits import JobSize
from superpod.slurm.preflight.preflight import findings, profile_findings
from superpod.slurm.profiles import live_cluster, node_probe
from superpod.slurm.profiles.live_cluster import parse
from superpod.slurm.submission.connection import Connection
from tests.slurm.preflight.test_preflight import ANSWERS, NODES, case, noted, profile

SUB = {
    "associations": "Account|Partition|QOS\nmine||normal\nsub||normal",
    "accounts": "Account|ParentName|GrpTRES\nsub|mine|\nmine|root|\nroot||",
    "default_account": "User|Def Acct\nme|sub",
}
"""An account below `mine`, which is this user's default."""


def partitions(words: str) -> dict[str, str]:
    """More of the partition batch."""
    return {"partitions": ANSWERS["partitions"].replace("AllowAccounts=ALL", words, 1)}


def qos(flags: str, head: str, values: str) -> dict[str, str]:
    return {"qos": f"Name|Flags|{head}\nnormal|{flags}|{values}"}


def jobs(own: str, above: str, of_qos: str = "") -> dict[str, str]:
    """Limits of queued jobs: of the association, of its account, of the QOS."""
    return {
        "associations": f"Account|Partition|QOS|MaxJobs|MaxSubmit\nmine||normal|{own}",
        "accounts": f"Account|ParentName|MaxJobs|MaxSubmit|GrpJobs|GrpSubmit\nmine|root|{above}\nroot||||",
        **qos("", "MaxSubmitPU", of_qos),
    }


ASLEEP = NODES.replace("State=DOWN", "State=IDLE+CLOUD+NOT_RESPONDING+POWERED_DOWN")
EMPTY = {"slurm__account": ""}
ACCEPTED = [
    ("nodes that Slurm powers up", case(nodes=22, answers={"nodes": ASLEEP, "accounts": ""})),
    (
        "subaccount of an allowed account",
        case(profile(slurm__account="sub"), answers=SUB | partitions("AllowAccounts=mine")),
    ),
    ("default account", case(profile(**EMPTY), answers=SUB)),
    ("allowed and denied", case(answers=partitions("AllowAccounts=mine DenyAccounts=mine"))),
    (
        "below a denied one, in a Slurm that sees only names",
        case(profile(slurm__account="sub"), answers=SUB | partitions("DenyAccounts=mine")),
    ),
    ("default account, allowed", case(profile(**EMPTY), answers=SUB | partitions("AllowAccounts=sub"))),
    ("default account that is not known", case(profile(**EMPTY), answers=partitions("AllowAccounts=mine"))),
    ("submitted jobs: child over parent", case(answers=jobs("|200", "|1||"))),
    ("running jobs: child over parent", case(answers=jobs("5|", "0|||"))),
    ("submitted jobs: QOS over association", case(answers=jobs("|1", "|||", "50"))),
    ("QOS over the partition's time", case(time="2-0", answers=qos("PartitionTimeLimit", "MaxWall", ""))),
    (
        "QOS over the partition's nodes",
        case(nodes=8, answers=partitions("MaxNodes=4") | qos("DenyOnLimit,PartitionMaxNodes", "MaxWall", "")),
    ),
    (
        "QOS under the partition's nodes",
        case(nodes=4, answers=partitions("MinNodes=8") | qos("PartitionMinNodes", "MaxWall", "")),
    ),
    ("percentages", case(nodes=8, answers=qos("Relative", "MaxTRES", "node=5"))),
    (
        "constraint that starts with a digit",
        case(
            profile(slurm__constraint="[80gb*2&ib*4]"),
            answers={"nodes": NODES.replace("Features=h100", "Features=80gb")},
        ),
    ),
    ("one of two partitions", case(profile(slurm__partition="low,batch"))),
]


@pytest.mark.parametrize("accepted", [c for _, c in ACCEPTED], ids=[name for name, _ in ACCEPTED])
def test_accepted_by_slurm_is_not_refused(accepted):
    assert findings(accepted) == []


REFUSED = [
    (
        "down and asleep",
        case(nodes=22, answers={"nodes": ASLEEP.replace("IDLE+CLOUD", "DOWN*+CLOUD")}),
        "20 of batch are",
    ),
    ("account of others", case(profile(slurm__account="sub"), answers=SUB | partitions("AllowAccounts=x")), "'sub'"),
    ("denied account", case(answers=partitions("AllowAccounts=ALL DenyAccounts=mine")), "denies account 'mine'"),
    ("Grp limit of a parent", case(answers=jobs("|200", "|||2")), "account mine allows 2 (GrpSubmit)"),
    ("no job for the whole account", case(answers=jobs("5|", "||0|")), "GrpJobs=0"),
    ("the tighter of two limits", case(answers=jobs("|", "|||1", "2")), "account mine allows 1 (GrpSubmit)"),
    ("parent, where the child has none", case(answers=jobs("|", "0|||")), "MaxJobs=0"),
    ("fewer nodes than the partition takes", case(nodes=4, answers=partitions("MinNodes=8")), "MinNodes 8"),
    ("constraint", case(profile(slurm__constraint="h100&40gb*2")), "the feature '40gb'"),
    ("none of two partitions", case(profile(slurm__partition="low,old")), "does not accept account"),
]


@pytest.mark.parametrize(("planted", "says"), [c[1:] for c in REFUSED], ids=[c[0] for c in REFUSED])
def test_refused_by_slurm_is_refused(planted, says):
    problems = findings(planted)
    assert any(says in problem.message for problem in problems), problems


def test_gpu_type_may_be_a_prefix():
    nodes = {"nodes": NODES.replace("gpu:h100", "gpu:a100")}
    assert profile_findings(profile(gpu="a100_40gb"), parse(ANSWERS | nodes)) == []
    assert profile_findings(profile(gpu="h100"), parse(ANSWERS | nodes)) != []


def test_notes_are_those_of_the_best_partition():
    assert noted(nodes=4, where=profile(slurm__partition="batch,old")) == []


class FakeSbatch(Connection):
    """A fake cluster whose `sbatch --test-only` prints this text for any job; records its options."""

    def __init__(self, words: str) -> None:
        self.words, self.asked = words, []

    def shell(self, script: str, *arguments: str, limit_s: float = 60) -> str:
        if "--test-only" not in script:
            return "\036config\037ClusterName = x\n"
        self.asked = [*arguments]
        return self.words

    def run(self, command, **options):
        return {"node[1-2]": "node1\nnode2\n"}[command[-1]]


EXACT = JobSize(2, 8, "1:00:00", attempts=1)
CONFIGURATION = "allocation failure: Requested node configuration is not available"


@pytest.mark.parametrize(
    ("words", "size", "refused"),
    [
        # of one node, while the run may take more
        ("allocation failure: Node count specification invalid", None, ""),
        ("allocation failure: Requested time limit is invalid (missing or exceeds some limit)", None, ""),
        ("allocation failure: Job violates accounting/QOS policy (job submit limit, user's size)", None, ""),
        (CONFIGURATION, None, ""),
        # of the run's own size
        ("allocation failure: Node count specification invalid", EXACT, "Node count specification invalid"),
        ("sbatch: error: invalid number of nodes (-N 2-1)", EXACT, "invalid number of nodes (-N 2-1)"),
        (CONFIGURATION, EXACT, "Requested node configuration is not available"),
        ("allocation failure: Requested nodes are busy", EXACT, ""),
        ("sbatch: error: Unable to contact slurm controller (connect failure)", EXACT, ""),
        # of every size
        ("allocation failure: Invalid qos specification", None, "Invalid qos specification"),
        ("sbatch: unrecognized option '--switchs=1'\nTry \"sbatch --help\"", None, "unrecognized option '--switchs=1'"),
        # a site's job_submit plug-in
        (
            "sbatch: error: You must name an account: --account=GROUP\nallocation failure: Unspecified error",
            None,
            "You must name an account: --account=GROUP",
        ),
        ("sbatch: error: Ignoring -S\nsbatch: Job 22 to start at 2026 on nodes node1\naccepted", EXACT, ""),
    ],
)
def test_refusals_of_sbatch(words, size, refused):
    live = live_cluster.query_cluster(FakeSbatch(words), profile(), "/lustre/runs", [], size=size)
    assert live.rejection == refused


def test_sbatch_is_tested_with_run_size_or_nodelist():
    """A valid --nodelist of two nodes was refused because one node was requested."""
    where = profile(slurm__options=["--nodelist=node[1-2]"])
    asked = FakeSbatch("accepted")
    live_cluster.query_cluster(asked, where, "/lustre/runs", [], size=EXACT)
    assert {"--nodes=2", "--time=1:00:00", "--nodelist=node[1-2]"} <= {*asked.asked}
    live_cluster.query_cluster(asked, where, "/lustre/runs", [])
    assert "--nodes=2" in asked.asked


@pytest.mark.parametrize(("state", "refused"), [("IDLE", True), ("DOWN", False), ("IDLE+DRAIN", False)])
def test_unavailable_configuration_is_refused_if_all_nodes_are_up(state, refused):
    nodes = {"nodes": NODES.replace("State=DOWN", f"State={state}"), "reservations": ""}
    live = dataclasses.replace(parse(ANSWERS | nodes), rejection=live_cluster.UNAVAILABLE)
    assert bool(profile_findings(profile(), live)) == refused


LMOD = """
module() {
    case $2 in
        gcc/12) export GCC_IS_LOADED=1; echo NCCL_ASYNC_ERROR_HANDLING=1, no error >&2 ;;
        openmpi/4) test "$GCC_IS_LOADED" || { echo "unknown module openmpi/4" >&2; return 1; } ;;
        old/3) echo "ModuleCmd_Load.c(213):ERROR:105: Unable to locate a modulefile for 'old/3'" >&2 ;;
    esac
}
"""


class ThisMachine(Connection):
    """This machine, with a home of its own, whose login shell has the `module` above."""

    def __init__(self, home: str) -> None:
        self.home = home

    def run(self, command: list[str], *, stdin: bytes = b"", env: dict[str, str] | None = None, limit_s: float = 60):
        given = {**os.environ, "HOME": self.home}
        return subprocess.run(command, input=stdin, env=given, capture_output=True, timeout=limit_s).stdout.decode()


def test_modules_may_depend_on_previous_modules(tmp_path):
    (tmp_path / ".bash_profile").write_text(f"echo welcome\n{LMOD}")
    machine = ThisMachine(str(tmp_path))

    def answer(*modules: str) -> dict[str, str]:
        output = machine.shell(live_cluster.QUERY, "python3", "", " ".join(modules), str(tmp_path), "/tmp")
        live = parse(dict(part.split("\037", 1) for part in output.split("\036")[1:]))
        assert live.paths["/tmp"] == "folder"
        assert live.ranks_python
        return live.modules

    assert answer("gcc/12", "openmpi/4") == {"gcc/12": "loads", "openmpi/4": "loads"}
    assert answer("openmpi/4", "old/3") == {"openmpi/4": "missing", "old/3": "missing"}
    assert answer() == {}


def test_a_container_needs_no_module_command():
    where = profile(software__modules=["gcc/12"])
    assert node_health.with_modules(where, ["python"]) == ["python"]
    assert node_health.with_modules(
        where.model_copy(update={"container": profile(container__image="").container}), ["p"]
    ) != ["p"]


def test_srun_gets_no_option_of_sbatch_alone():
    words = node_probe.srun(profile(slurm__options=["--ignore-pbs", "--reservation=mine"]), 1, minutes=1)
    assert "--reservation=mine" in words
    assert "--ignore-pbs" not in words


class NoPlugin(Connection):
    """A fake cluster whose srun starts steps only with --mpi=none, or not at all."""

    def __init__(self, without: bool) -> None:
        self.without = without

    def shell(self, script: str, *arguments: str, limit_s: float = 60) -> str:
        return "/lustre/.probe"

    def run(self, command, **options):
        if "srun" in command and ("--mpi=pmix" in command or not self.without):
            raise UserError("srun: error: Couldn't load specified plugin name for mpi/pmix")
        return "\036host\037node1\n"


def test_pmi_plug_in_that_does_not_load_is_a_finding():
    """`cluster check` accepted mpi = "pmix" because srun's failure counted as a missing free node."""
    where = profile(slurm__mpi="pmix")
    facts = node_probe.probe_node(NoPlugin(without=True), where, [])
    (finding,) = node_probe.check_mpi(where, facts)
    assert "srun --mpi=pmix fails on node1: srun: error: Couldn't load" in finding.message
    with pytest.raises(node_probe.NoNodeAvailable):
        node_probe.probe_node(NoPlugin(without=False), where, [])
    live = dataclasses.replace(parse(ANSWERS), mpi_failure="can not load PMIx library")
    assert any("can not load PMIx library" in f.message for f in profile_findings(where, live))


def test_hca_without_link_layer():
    text = "mlx5_0||400\nmlx5_1|InfiniBand|\nmlx5_2|InfiniBand|400"
    first, second, third = node_probe.parse(f"\036hcas\037{text}\n", "").hcas
    assert (first.link_layer, second.gb_s, third.gb_s) == ("", 0, 400)
    facts = node_probe.parse("\036hcas\037mlx5_0||\n", "")
    assert facts.network == "ethernet"
    (finding,) = node_probe.check_hcas(profile(network__hcas="mlx5_0"), facts)
    assert "has no HCA" in finding.message
