"""--segment: entire NVLink domains of an NVL72 for groups of ranks that were planned within one."""

import pytest

from superpod.slurm.profiles import profile_checks, profiles, segments
from superpod.slurm.profiles.live_cluster import LiveCluster, parse
from superpod.slurm.script import batch_script
from tests.slurm.jobs import planned
from tests.slurm.script.test_batch_script import job_for

GB200 = profiles.load("dgx_gb200")


def segment(nodes=16, where=GB200, gpu="gb200", **layout):
    return segments.segment(where, planned(gpu, **layout), nodes, where.gpus_per_node)


@pytest.mark.parametrize(
    ("layout", "nodes", "trays"),
    [
        ({"tp": 4}, 16, 0),  # within a tray
        ({"tp": 8}, 16, 2),
        ({"tp": 8, "cp": 2}, 16, 4),
        ({"tp": 1, "ep": 64}, 16, 16),
        ({"tp": 1, "ep": 64}, 32, 16),
        ({"tp": 8}, 9, 3),  # a segment divides the nodes
        ({"tp": 8}, 19, 0),  # no number of trays in a rack does
        ({"tp": 8, "cp": 16}, 32, 2),  # TP x CP never fitted into a rack: TP alone decides
    ],
)
def test_segment_covers_the_trays_of_a_group(layout, nodes, trays):
    assert segment(nodes, **layout) == trays


def test_segment_needs_topology_block_and_no_user_option():
    plain = GB200.model_copy(update={"slurm": GB200.slurm.model_copy(update={"topology": ""})})
    assert segment(where=plain, tp=8) == 0
    own = GB200.model_copy(update={"slurm": GB200.slurm.model_copy(update={"options": ["--segment=8"]})})
    assert segment(where=own, tp=8) == 0
    assert segment(where=profiles.load("dgx_h100"), gpu="h100", tp=8) == 0


def test_segment_is_in_the_script():
    assert "#SBATCH --segment=4\n" in batch_script.render(job_for("dgx_gb200", segment=4))
    assert "--segment" not in batch_script.render(job_for("dgx_gb200"))


@pytest.mark.parametrize(("plugin", "problems"), [("topology/block", 0), ("topology/tree", 1), ("topology/default", 1)])
def test_missing_topology_block_is_reported(plugin, problems):
    live = parse({"config": f"TopologyPlugin          = {plugin}\n"})
    assert live.topology == plugin
    findings = list(profile_checks.check_topology(GB200, live))
    assert [finding.message for finding in findings] == [
        f"slurm.topology is 'block', but this Slurm installation uses {plugin}"
    ] * problems
    assert list(profile_checks.check_topology(GB200, LiveCluster())) == []
