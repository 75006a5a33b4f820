"""Planted mistakes: each is found, with a message that names the fix; a clean case passes."""

from pathlib import Path

import pytest

from superpod.errors import UserError
from superpod.lifecycle.request import Request
from superpod.lifecycle.resolve import ResolvedRun
from superpod.recipes import planned_job, registry
from superpod.slurm import profiles
from superpod.slurm.live_cluster import LiveCluster, parse
from superpod.slurm.preflight import Case, findings, profile_findings, refuse
from superpod.slurm.submit import Submission

GIB = 2**30
NODES = "\n".join(
    f"NodeName=dgx{i:02d} CPUTot=224 AvailableFeatures=h100,ib Gres=gpu:h100:8 RealMemory=2000000 "
    f"Partitions=batch,low State={'DOWN' if i > 20 else 'IDLE'}"
    for i in range(1, 25)
)
ANSWERS = {
    "partitions": "PartitionName=batch Default=YES MaxTime=1-00:00:00 State=UP AllowAccounts=ALL\n"
    "PartitionName=low Default=NO MaxTime=UNLIMITED State=UP AllowAccounts=other\n"
    "PartitionName=old Default=NO MaxTime=UNLIMITED State=DOWN AllowAccounts=ALL",
    "nodes": NODES,
    "associations": "mine||normal,high\nalso||normal",
    "config": "AccountingStorageEnforce = associations,limits",
    "mpi": "MPI plugin types are...\n\tnone\n\tpmix",
    "srun": "1",
    "python": "312",
    "ranks_python": "yes",
    "runs": "/dev/x 1 1 100000000000 1% /lustre",
    "path:/lustre": "folder",
    "path:/lustre/huggingface": "folder",
    "path:/lustre/corpus": "folder",
}
PLAN = {"layouts": [{"step_time_s": 5.0, "checkpoint_bytes": 100 * GIB, "verdict": "ok", "reserved_gib": 70.0}]}


def profile(**changes):
    """dgx_h100 with an account; `slurm__mem="1"` changes a key of a table."""
    where = profiles.load("dgx_h100")
    for key, value in {"slurm__account": "mine", **changes}.items():
        table, _, name = key.rpartition("__")
        if table:
            where = where.model_copy(update={table: getattr(where, table).model_copy(update={name: value})})
        else:
            where = where.model_copy(update={name: value})
    return where


def case(where=None, *, answers=None, recipe="llama3_8b_pretrain_h100_bf16", nodes=4, **changes) -> Case:
    known = registry.find(recipe)
    resolved = {
        "request": Request(recipe, data=changes.pop("data", None)),
        "job": planned_job.job(known, nodes if nodes in known.nodes else None),
        "plan": PLAN,
        "nodes": nodes,
        "gpus_per_node": 8,
        "max_steps": 1000,
        "save_every": 100,
        "data_facts": {},
        "lines": [],
    }
    resolved |= {key: changes.pop(key) for key in list(changes) if key in ResolvedRun.__annotations__}
    running = changes.pop("running", "")
    run = ResolvedRun(**resolved)
    submission = Submission(run, where or profile(), changes.pop("runs", ""), changes.pop("time", ""))
    assert not changes
    return Case(submission, parse(ANSWERS | (answers or {})), running)


def test_a_clean_case_passes():
    assert findings(case()) == []
    refuse(case())


PLANTED = [
    ("account of nobody", case(profile(slurm__account="theirs")), "'theirs' is not one of yours", "mine, also"),
    ("no account", case(profile(slurm__account="")), "slurm.account is empty", "mine, also"),
    ("partition that is not", case(profile(slurm__partition="bach")), "'bach' does not exist", "did you mean batch?"),
    ("partition down", case(profile(slurm__partition="old")), "partition old is DOWN", "another"),
    ("partition of others", case(profile(slurm__partition="low")), "does not accept account 'mine'", "other"),
    ("qos", case(profile(slurm__qos="urgent")), "slurm.qos 'urgent' is not one of yours", "normal, high"),
    ("constraint", case(profile(slurm__constraint="h200&ib")), "'h200' is a feature of no node", "h100, ib"),
    ("gpu type", case(profile(slurm__gpu_type="a100")), "'a100' is in no node of batch", "types: h100"),
    ("gpus per node", case(profile(gpus_per_node=16)), "gpus_per_node is 16, but the nodes", "gpus_per_node = 8"),
    (
        "no gpus in the books",
        case(answers={"nodes": NODES.replace("Gres=gpu:h100:8", "Gres=(null)")}),
        "Slurm lists no GPUs for any node of batch",
        'slurm.gpus = "none"',
    ),
    ("memory", case(profile(slurm__mem="3T")), "slurm.mem 3T is more than a node of batch has", 'mem = "0"'),
    ("limit", case(time="2-00:00:00"), "2-00:00:00 is longer than batch allows: 1-00:00:00", "--time 1-00:00:00"),
    ("mpi", case(profile(slurm__mpi="pmi2")), "slurm.mpi 'pmi2' is not in this Slurm", "none, pmix"),
    ("no pyxis", case(answers={"srun": "0"}), "pyxis is not installed", 'container.image = ""'),
    (
        "image",
        case(profile(container__image="/lustre/nemo.sqsh"), answers={"path:/lustre/nemo.sqsh": "unreadable"}),
        "/lustre/nemo.sqsh is unreadable",
        "enroot import",
    ),
    ("mount", case(answers={"path:/lustre": "missing"}), "container.mounts: /lustre is missing", "every node has"),
    ("no python", case(answers={"python": ""}), "software.host_python 'python3' does not exist", "3.9"),
    ("old python", case(answers={"python": "308"}), "software.host_python 'python3' is 3.8", "3.9"),
    ("ranks' python", case(answers={"ranks_python": ""}), "the ranks' Python '' does not exist", "software.python"),
    ("runs not writable", case(answers={"runs": ""}), "/lustre/runs cannot be written", "--runs"),
    ("backslash", case(runs="/lustre/a\\b"), "which sbatch's --output cannot", "--runs"),
    ("comma", case(runs="/lustre/a,b"), "which a container mount cannot", "--runs"),
    ("too many nodes", case(nodes=32), "the run takes 32 nodes, but batch has 24", "--nodes"),
    ("nodes down", case(nodes=22), "20 of batch are up; not up: dgx21, dgx22", "--nodes"),
    ("gpus of the recipe", case(profile(gpus_per_node=4)), "takes 8 GPUs a node, but dgx_h100 has 4", "recipes list"),
    (
        "does not fit",
        case(plan={"layouts": [PLAN["layouts"][0] | {"verdict": "oom", "reserved_gib": 93.0}]}),
        "does not fit the GPU's memory: 93.0 GiB",
        "recipes plan",
    ),
    ("interval", case(save_every=4000), "ends before its first checkpoint", "log.ckpt.every_n_train_steps"),
    ("warning", case(time="9:00"), "leaves too little before chain.save_s 300", "--time"),
    (
        "slow save",
        case(plan={"layouts": [PLAN["layouts"][0] | {"checkpoint_bytes": 4000 * GIB}]}),
        "but chain.save_s allows 300",
        "write chain.save_s =",
    ),
    ("disk", case(answers={"runs": "/dev/x 1 1 1000000 1% /l"}), "four checkpoints of 100.0 GiB need", "make room"),
    (
        "data",
        case(data=Path("/lustre/corpus"), answers={"path:/lustre/corpus": "missing"}),
        "data folder /lustre/corpus is missing",
        "copy it there",
    ),
    ("data outside", case(data=Path("/home/me/corpus")), "is in no mount of the container", "container.mounts"),
    ("cache", case(answers={"path:/lustre/huggingface": "missing"}), "/lustre/huggingface is missing", "tokenizer"),
    ("in use", case(running="job 17"), "the run is in use by job 17", "recipes cancel"),
]


@pytest.mark.parametrize(("planted", "says", "fix"), [p[1:] for p in PLANTED], ids=[p[0] for p in PLANTED])
def test_a_planted_mistake_is_found(planted, says, fix):
    problems = findings(planted)
    assert any(says in problem.message and fix in problem.hint for problem in problems), problems
    with pytest.raises(UserError) as error:
        refuse(planted)
    assert says in str(error.value)


def test_there_are_enough_of_them():
    assert len(PLANTED) >= 25


def test_all_problems_are_reported_at_once():
    problems = findings(case(profile(slurm__account="x", slurm__partition="y"), nodes=4, runs="/lustre/a\\b"))
    assert len(problems) >= 3


def test_a_profile_alone():
    assert profile_findings(profile(), parse(ANSWERS)) == []
    assert len(profile_findings(profile(slurm__qos="x"), parse(ANSWERS))) == 1


def test_what_a_cluster_does_not_answer_is_no_problem():
    silent = LiveCluster(python=312, runs_free=10**15)
    messages = [f.message for f in profile_findings(profile(container__image=""), silent)]
    assert messages == ["slurm.partition 'batch' does not exist"]


def test_mistakes_of_a_request_are_refused_before_the_cluster_answers():
    with pytest.raises(UserError, match="no recipe is called"):
        Request("llama3_8c").check()
    with pytest.raises(UserError, match="is laid out for"):
        Request("llama3_8b_pretrain_h100_bf16", num_nodes=3000).check()
    with pytest.raises(UserError, match="is not an override"):
        Request("tiny_llama3", ("max_steps 3",)).check()


def test_a_precision_that_the_gpu_has_not():
    real = planned_job.job(registry.find("llama3_8b_pretrain_h100_bf16"))
    planted = case(profile(gpu="a100"), job=real.replace(precision="fp8cs"))
    (finding,) = [f for f in findings(planted) if "fp8cs" in f.message]
    assert "a100 has no fp8cs" in finding.message
    assert finding.hint == "llama3_8b_pretrain_a100_bf16"


def test_a_recipe_for_another_gpu_is_judged_on_this_one():
    assert findings(case(profile(gpu="h200"))) == []
    messages = [f.message for f in findings(case(profile(gpu="a100_40gb")))]
    assert any("does not fit a100_40gb" in message for message in messages)


def test_another_gpu_is_judged_by_the_layout_that_runs():
    """Not by the recipe's own: an override of the micro-batch decides whether it fits."""
    job = planned_job.job(registry.find("llama3_8b_pretrain_h100_bf16"), 4)
    larger = job.replace(layout=job.layout.replace(mbs=16))
    assert findings(case(profile(gpu="h200"), job=job)) == []
    assert any("does not fit h200" in f.message for f in findings(case(profile(gpu="h200"), job=larger)))


def test_a_recipe_that_is_known_not_to_start_is_refused(monkeypatch):
    """By the evidence of `recipes prove --write`; with overrides of what was built it is another run."""
    from superpod.recipes.facts import proof_level

    broken = proof_level.ProofLevel("built with TE", broken={4: "AssertionError: no attention backend"})
    monkeypatch.setattr(proof_level, "of", lambda recipe: broken)
    (finding,) = findings(case())
    assert finding.message.endswith("is known not to start at 4 nodes: AssertionError: no attention backend")
    assert "it starts at 1, 2" in finding.hint
    request = Request("llama3_8b_pretrain_h100_bf16", ("model.config.num_layers=2",))
    assert findings(case(request=request)) == []
