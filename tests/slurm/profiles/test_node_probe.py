"""Findings of a profile on a node, with planted answers; the testbed has real ones."""

import pytest

from superpod.slurm.profiles import checked_profiles, node_probe, profile_init, profiles
from superpod.slurm.profiles.node_probe import NodeFacts, findings, parse
from superpod.slurm.submission.connection import Connection
from tests.slurm.preflight.test_preflight import profile

EIGHT = ("mlx5_0", "mlx5_3", "mlx5_4", "mlx5_5", "mlx5_6", "mlx5_9", "mlx5_10", "mlx5_11")
GOOD = {
    "host": "dgx01",
    "python": "310",
    "ranks_python": "",
    "shared": "abc",
    "writable": "yes",
    "gpus": "\n".join(["NVIDIA H100 80GB HBM3"] * 8),
    "interfaces": "bond0\nlo\nibp3s0",
    "route": "bond0",
    "hcas": "\n".join(f"{name}|InfiniBand|400" for name in EIGHT),
    "sbatch": "",
    "path:/lustre": "folder",
}


def facts(**changes) -> NodeFacts:
    answers = GOOD | {key.replace("module__", "module:"): value for key, value in changes.items()}
    return parse("".join(f"\036{key}\037{value}\n" for key, value in answers.items()), "abc")


def test_good_node_has_no_findings():
    assert findings(profile(), facts()) == []


SLOW = "\n".join(f"{name}|InfiniBand|200" for name in EIGHT)
ETHERNET = "\n".join(f"{name}|Ethernet|400" for name in EIGHT)


@pytest.mark.parametrize(
    ("where", "node", "says", "fix"),
    [
        (profile(gpu="h200"), facts(), "gpu is 'h200', but dgx01 has NVIDIA H100 80GB HBM3", 'gpu = "h100"'),
        (profile(), facts(gpus=""), "gpus_per_node is 8, but a job on dgx01 has 0", "slurm.gpus"),
        (profile(network__interface="eth9"), facts(), "dgx01 has no interface 'eth9'", "bond0, ibp3s0"),
        (profile(network__interface="=bond"), facts(), "dgx01 has no interface 'bond'", "bond0"),
        (profile(network__hcas="mlx5_0,mlx5_77"), facts(), "network.hcas: dgx01 has no mlx5_77", "mlx5_11"),
        (profile(), facts(hcas=ETHERNET), "network.kind is 'infiniband', but dgx01 has Ethernet", 'kind = "roce"'),
        (profile(network__hcas=""), facts(hcas=""), "but dgx01 has no HCA", 'kind = "ethernet"'),
        (profile(), facts(hcas=SLOW), "fabric ib_ndr has 400 Gb/s per port, but dgx01 has 200", "ib_hdr"),
        (profile(), facts(python="308"), "software.host_python 'python3' is Python 3.8 on dgx01", "3.9"),
        (profile(), facts(python=""), "software.host_python 'python3' does not run on dgx01", "3.9"),
        (
            profile(container__image=""),
            facts(ranks_python="309"),
            "3.9 on dgx01, but NeMo needs 3.10",
            "software.python",
        ),
        (profile(software__modules=["x"]), facts(module__x="missing"), "`module load x` fails on dgx01", "avail"),
        (profile(software__modules=["x"]), facts(module__x="no module command"), "there is no `module`", "avail"),
        (profile(), facts(shared=""), "folders.runs /lustre/runs: dgx01 cannot read", "share"),
        (profile(), facts(writable=""), "folders.runs /lustre/runs is not writable on dgx01", "another"),
        (profile(), {"path:/lustre": "missing"}, "container.mounts: /lustre is missing on dgx01", "share"),
        (profile(chain__self_submit=True), facts(), "dgx01 has no sbatch", "top-up"),
    ],
)
def test_wrong_key_is_found_on_a_node(where, node, says, fix):
    """Each of these passed `cluster check`."""
    problems = findings(where, facts(**node) if isinstance(node, dict) else node)
    assert any(says in problem.message and fix in problem.hint for problem in problems), problems


def test_interface_syntax_of_nccl():
    """A prefix, several, excluded ones: NCCL_SOCKET_IFNAME."""
    for interface in ("bond", "ib,bond0", "=bond0", "^docker0,lo", ""):
        assert findings(profile(network__interface=interface), facts()) == []


def test_unchecked_profile_is_noted_until_checked(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (note,) = checked_profiles.unchecked_findings(profile())
    assert "has not been compared with a node" in note.message
    checked_profiles.mark_checked(profile())
    assert checked_profiles.unchecked_findings(profile()) == []
    assert len(checked_profiles.unchecked_findings(profile(network__interface="eth1"))) == 1  # another profile


def test_verified_keys_exist():
    tables = profiles.schema().model_fields
    keys = set()
    for name, table in tables.items():
        inner = getattr(table.annotation, "model_fields", None)
        keys |= {f"{name}.{key}" for key in inner} if inner else {name}
    assert set.union(*node_probe.VERIFIABLE_KEYS.values()) <= keys
    assert "network.interface" in node_probe.node_only_keys()
    assert "slurm.account" not in node_probe.node_only_keys()


class FakeNode(Connection):
    """Stands in for a cluster's connection: only the job on a node answers, with planted facts."""

    def __init__(self, output: str) -> None:
        self.output = output

    def shell(self, script: str, *arguments: str, limit_s: float = 60) -> str:
        return "/runs/.superpod-check"

    def run(self, command: list[str], *, stdin: bytes = b"", env: dict[str, str] | None = None, limit_s: float = 60):
        return self.output if "srun" in command else ""


def test_init_writes_only_existing_network():
    """The default names bond0 and mlx5 are kept only if a node has them."""
    text = (profiles.DEFAULT_PROFILES / "dgx_h100.toml").read_text()

    def network(**changes):
        answers = GOOD | changes
        output = "".join(f"\036{key}\037{value}\n" for key, value in answers.items())
        made = profile_init._set_network(text, "dgx_h100", FakeNode(output))
        return profiles.parse(made, "made.toml").network

    kept = network()
    assert (kept.interface, kept.hcas, kept.kind) == ("bond0", ",".join(EIGHT), "infiniband")
    other = network(interfaces="eno1\nlo\neno2", route="eno1", hcas="mlx5_0|Ethernet|100")
    assert (other.interface, other.hcas, other.kind) == ("eno1", "", "roce")
    bare = network(interfaces="eno1\nlo\neno2", route="", hcas="")
    assert (bare.interface, bare.hcas, bare.kind) == ("", "", "ethernet")
