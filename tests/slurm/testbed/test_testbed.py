"""The testbed is a real Slurm with several nodes, accounting, preemption and faults."""

from tests.slurm.testbed.bed import until


def test_testbed_has_four_nodes_with_eight_gpus(testbed):
    lines = testbed.slurm("srun", "-N4", "--gpus-per-node=8", "bash", "-c", "echo $(hostname) $CUDA_VISIBLE_DEVICES")
    assert sorted(lines.splitlines()) == [f"node{i} 0,1,2,3,4,5,6,7" for i in range(1, 5)]


def test_a_job_over_two_nodes_is_accounted(testbed, tmp_path):
    job = testbed.slurm("sbatch", "--parsable", "-N2", "-o", "/dev/null", "--wrap", "srun hostname").strip()
    assert testbed.until_ended(job) == "COMPLETED"
    until(lambda: "COMPLETED" in testbed.slurm("sacct", "-X", "-n", "-j", job, "-o", "state"), 30)


def test_job_of_a_dead_node_is_requeued(testbed):
    wrap = ["--wrap", "srun sleep 600"]
    job = testbed.slurm("sbatch", "--parsable", "--requeue", "-w", "node2", "-o", "/dev/null", *wrap).strip()
    until(lambda: testbed.state(job) == "RUNNING")
    testbed("crash", "2")
    until(lambda: "Restarts=1" in testbed.slurm("scontrol", "show", "job", job), 90)
    testbed.slurm("scancel", job)
