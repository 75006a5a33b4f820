"""Planted mistakes are found, with a hint how to fix them; a clean case has no findings."""

from dataclasses import replace
from pathlib import Path

import pytest

from superpod.collection import recipe_job, registry
from superpod.errors import UserError
from superpod.planner import hardware, plans
from superpod.planner.hardware import match_gpu
from superpod.requests.request import Request
from superpod.requests.resolve import ResolvedRun
from superpod.slurm.preflight.limits import JobSize
from superpod.slurm.preflight.preflight import (
    Case,
    Claim,
    claim_findings,
    findings,
    job_size,
    notes,
    profile_findings,
    refuse,
    refuse_unfit,
)
from superpod.slurm.profiles import other_gpu, profiles
from superpod.slurm.profiles.live_cluster import LiveCluster, parse
from superpod.slurm.submission.submit import Submission, chain_warning, facts

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
    "associations": "Account|Partition|QOS\nmine||normal,high\nalso||normal",
    "accounts": "Account|ParentName|GrpTRES\nmine|root|node=12\nroot||",
    "qos": "Name|Flags|MaxWall|MaxTRES|MaxSubmitPU\nnormal||||4\nhigh||02:00:00|gres/gpu=32|",
    "queued": "",
    "user": "me",
    "now": "2026-11-22T12:00:00",
    "reservations": "ReservationName=maint StartTime=2026-11-22T14:00:00 EndTime=2026-11-22T20:00:00 Users=root "
    "Accounts=(null) Flags=MAINT,SPEC_NODES",
    "reserved": "maint " + " ".join(f"dgx{i:02d}" for i in range(1, 23)),
    "module:cuda/99": "missing",
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
        "job": recipe_job.job(known, nodes if nodes in known.nodes else None),
        "plan": PLAN,
        "nodes": nodes,
        "gpus_per_node": 8,
        "max_steps": 1000,
        "save_every": 100,
        "data_facts": {},
        "lines": [],
    }
    resolved |= {key: changes.pop(key) for key in list(changes) if key in ResolvedRun.__annotations__}
    run = ResolvedRun(**resolved)
    submission = Submission(run, where or profile(), changes.pop("runs", ""), changes.pop("time", ""))
    assert not changes
    return Case(submission, parse(ANSWERS | (answers or {})))


def test_clean_case_has_no_findings():
    assert findings(case()) == []
    refuse(findings(case()))


def test_too_little_host_memory_is_refused_without_a_live_cluster():
    """`recipes render` asks no cluster."""
    with pytest.raises(UserError, match=r"too small for 8 ranks, which need .* even without a model"):
        refuse_unfit(case(profile(slurm__mem="4G")).submission)


PLANTED = [
    ("account of nobody", case(profile(slurm__account="theirs")), "'theirs' is not one of your accounts", "mine, also"),
    (
        "no account",
        case(profile(slurm__account=""), answers={"default_account": "User|Def Acct\nme|"}),
        "slurm.account is empty, and you have no default account",
        "mine, also",
    ),
    ("partition that is not", case(profile(slurm__partition="bach")), "'bach' does not exist", "did you mean batch?"),
    ("partition down", case(profile(slurm__partition="old")), "partition old is DOWN", "another"),
    ("partition of others", case(profile(slurm__partition="low")), "does not accept account 'mine'", "other"),
    ("qos", case(profile(slurm__qos="urgent")), "slurm.qos 'urgent'", "normal, high"),
    ("constraint", case(profile(slurm__constraint="h200&ib")), "the feature 'h200'", "h100, ib"),
    ("gpu type", case(profile(slurm__gpu_type="a100")), "type 'a100'", "types: h100"),
    ("gpus per node", case(profile(gpus_per_node=16)), "gpus_per_node is 16, but the nodes", "gpus_per_node = 8"),
    (
        "no gpus in the books",
        case(answers={"nodes": NODES.replace("Gres=gpu:h100:8", "Gres=(null)")}),
        "Slurm lists no GPUs for the nodes of batch",
        'slurm.gpus = "none"',
    ),
    ("memory", case(profile(slurm__mem="3T")), "slurm.mem 3T exceeds the memory", 'mem = "0"'),
    (
        "too little memory",
        case(profile(slurm__mem="4G")),
        "too small for 8 ranks",
        'mem = "0"',
    ),
    (
        "limit",
        case(time="2-00:00:00"),
        "2-00:00:00 exceeds that of partition batch: 1-00:00:00",
        "--time 1-00:00:00",
    ),
    ("mpi", case(profile(slurm__mpi="pmi2")), "has no 'pmi2' MPI plug-in", "none, pmix"),
    ("no pyxis", case(answers={"srun": "0"}), "pyxis is not installed", 'container.image = ""'),
    (
        "image",
        case(profile(container__image="/lustre/nemo.sqsh"), answers={"path:/lustre/nemo.sqsh": "unreadable"}),
        "/lustre/nemo.sqsh is unreadable",
        "enroot import",
    ),
    ("mount", case(answers={"path:/lustre": "missing"}), "container.mounts: /lustre is missing", "every node has"),
    ("no python", case(answers={"python": ""}), "software.host_python 'python3' does not run", "3.9"),
    ("old python", case(answers={"python": "308"}), "software.host_python 'python3' is Python 3.8", "3.9"),
    (
        "ranks' python",
        case(answers={"ranks_python": ""}),
        "software.python '' does not exist",
        "software.python",
    ),
    ("runs not writable", case(answers={"runs": ""}), "/lustre/runs is not writable", "--runs"),
    ("backslash", case(runs="/lustre/a\\b"), "which sbatch's --output does not", "--runs"),
    ("comma", case(runs="/lustre/a,b"), "contains ','", "--runs"),
    ("colon", case(runs="/lustre/b:c d"), "contains ':'", "--runs"),
    ("too many nodes", case(nodes=32), "the run needs 32 nodes, but batch has 24", "--nodes"),
    ("nodes down", case(nodes=22), "20 of batch are up; not up: dgx21, dgx22", "--nodes"),
    ("gpus of the recipe", case(profile(gpus_per_node=4)), "needs 8 GPUs per node, but dgx_h100 has 4", "recipes list"),
    (
        "does not fit",
        case(plan={"layouts": [PLAN["layouts"][0] | {"verdict": "oom", "reserved_gib": 93.0}]}),
        "exceeds the memory of h100: 93.0 GiB",
        "--layout auto",
    ),
    ("interval", case(save_every=4000), "ends before its first checkpoint", "log.ckpt.every_n_train_steps"),
    ("warning", case(time="9:00"), "at least 2 x chain.save_s (300 s)", "--time"),
    (
        "slow save",
        case(plan={"layouts": [PLAN["layouts"][0] | {"checkpoint_bytes": 4000 * GIB}]}),
        "but chain.save_s allows 300",
        "chain.save_s =",
    ),
    (
        "disk",
        case(answers={"runs": "/dev/x 1 1 1000000 1% /l"}),
        "four checkpoints of 100.0 GiB need",
        "free some space",
    ),
    (
        "data",
        case(data=Path("/lustre/corpus"), answers={"path:/lustre/corpus": "missing"}),
        "data folder /lustre/corpus is missing",
        "copy it there",
    ),
    ("data outside", case(data=Path("/home/me/corpus")), "is not mounted into the container", "container.mounts"),
    ("cache", case(answers={"path:/lustre/huggingface": "missing"}), "/lustre/huggingface is missing", "tokenizer"),
    (
        "another GPU",
        case(profile(gpu="h200")),
        "but the GPUs of batch have the type h100",
        'gpu = "h100"',
    ),
    (
        "cpus",
        case(profile(slurm__cpus_per_task=32)),
        "32 x 8 ranks = 256 CPUs, but the nodes of batch have at most 224",
        "28",
    ),
    (
        "reservation",
        case(profile(slurm__options=["--reservation=mine"])),
        "there is no reservation 'mine'",
        "maint",
    ),
    (
        "reservation of others",
        case(profile(slurm__options=["--reservation=maint"])),
        "reservation maint is for root, not for me",
        "remove the option",
    ),
    ("module", case(profile(software__modules=["cuda/99"])), "`module load cuda/99` fails", "module avail"),
    (
        "QOS of the partition",
        case(
            profile(slurm__qos="high"),
            answers={"partitions": ANSWERS["partitions"].replace(" State", " AllowQos=x State")},
        ),
        "does not accept QOS 'high'",
        "accepted: x",
    ),
    (
        "nodes of the partition",
        case(nodes=16, answers={"partitions": ANSWERS["partitions"].replace(" State", " MaxNodes=8 State")}),
        "needs 16 nodes, more than partition batch allows: MaxNodes 8",
        "--nodes 8",
    ),
    (
        "QOS time",
        case(profile(slurm__qos="high")),
        "4:00:00 exceeds the limit of QOS high: MaxWall 02:00:00",
        "02:00:00",
    ),
    (
        "QOS GPUs",
        case(profile(slurm__qos="high"), nodes=8),
        "8 nodes x 8 GPUs need gres/gpu=64, but QOS high allows 32 per job (MaxTRES)",
        "--nodes 4",
    ),
    (
        "account",
        case(nodes=16),
        "need node=16, but account mine allows 12 for all its jobs together (GrpTRES)",
        "--nodes 12",
    ),
    (
        "queued jobs",
        case(answers={"queued": "mine|normal\nmine|normal\nmine|high"}),
        "3 jobs to queue, and 2 of yours are queued already, but QOS normal allows 4 (MaxSubmitPU)",
        "--attempts 2",
    ),
]


@pytest.mark.parametrize(("planted", "says", "fix"), [p[1:] for p in PLANTED], ids=[p[0] for p in PLANTED])
def test_planted_mistake_is_found(planted, says, fix):
    problems = findings(planted)
    assert any(says in problem.message and fix in problem.hint for problem in problems), problems
    with pytest.raises(UserError) as error:
        refuse(problems)
    assert says in str(error.value)


def noted(**changes):
    return [f"{note.message}; {note.hint}" for note in notes(case(**changes).claim)]


def test_maintenance_reservation_is_noted_not_refused():
    """22 of 24 nodes are reserved two hours from now."""
    assert findings(case(nodes=4)) == []
    (note,) = noted(nodes=4)
    assert "an attempt with the limit 4:00:00 that started now would end at 11-22 16:00, but reservation maint" in note
    assert "has 22 of the 24 nodes of batch from 11-22 14:00 to 11-22 20:00" in note
    assert "--time 1:59:00 ends before it" in note
    assert noted(nodes=2) == []  # two nodes stay free
    assert noted(nodes=4, time="1:59:00") == []
    assert noted(nodes=4, where=profile(slurm__options=["--reservation=maint"])) == []


def test_limits_apply_only_if_slurm_enforces_them():
    loose = {"config": "AccountingStorageEnforce = associations"}
    assert findings(case(profile(slurm__qos="high"), nodes=8, answers=loose)) == []


def test_first_source_of_a_limit_decides():
    """The partition's QOS before the job's own, unless that has OverPartQOS: Slurm's order."""
    qos = "Name|Flags|MaxWall\nnormal||02:00:00\nwide||1-00:00:00"
    partition = ANSWERS["partitions"].replace(" State", " QoS=wide State")
    assert findings(case(answers={"qos": qos, "partitions": partition})) == []
    over = {"qos": qos.replace("normal|", "normal|OverPartQOS"), "partitions": partition}
    (finding,) = findings(case(answers=over))
    assert "QOS normal: MaxWall 02:00:00" in finding.message


def claim(live: LiveCluster, size: JobSize) -> Claim:
    return Claim(profile(), live, size, profile().folders.runs)


def test_claim_is_checked_before_nemo_is_imported():
    request = Request("llama3_8b_pretrain_h100_bf16", num_nodes=16)
    live = parse(ANSWERS)
    with pytest.raises(UserError, match="account mine allows 12"):
        refuse(claim_findings(claim(live, job_size(request, profile()))))
    with pytest.raises(UserError, match="exceeds that of partition batch"):
        refuse(claim_findings(claim(live, job_size(request, profile(), time="3-0"))))


@pytest.mark.parametrize(("most", "fix"), [(47, "--attempts 2,"), (20, "--attempts 1,"), (7, "sweep at most 7 values")])
def test_job_limit_applies_to_the_entire_sweep(most, fix):
    """--attempts is of each run, so the room is divided by the runs."""
    live = parse(ANSWERS | {"qos": f"Name|Flags|MaxSubmitPU\nnormal||{most}"})
    request = Request("llama3_8b_pretrain_h100_bf16", num_nodes=2)
    with pytest.raises(UserError) as refused:
        refuse(claim_findings(claim(live, job_size(request, profile(), attempts=3, members=16))))
    assert "48 jobs to queue (16 runs x 3), and 0 of yours are queued already" in str(refused.value)
    assert f"next: {fix}" in str(refused.value)


def test_match_gpu():
    for text, name in {
        "nvidia_h100_80gb_hbm3": "h100",
        "NVIDIA H200": "h200",
        "NVIDIA A100-SXM4-80GB": "a100",
        "NVIDIA A100-SXM4-40GB": "a100_40gb",
        "NVIDIA GB200": "gb200",
        "h100": "h100",
        "big": "",
    }.items():
        assert match_gpu(text) == name


def test_all_problems_are_reported_together():
    problems = findings(case(profile(slurm__account="x", slurm__partition="y"), nodes=4, runs="/lustre/a\\b"))
    assert len(problems) >= 3


def test_findings_of_a_profile_alone():
    assert profile_findings(profile(), parse(ANSWERS)) == []
    assert len(profile_findings(profile(slurm__qos="x"), parse(ANSWERS))) == 1


def test_missing_answers_are_not_findings():
    silent = LiveCluster(python=312, runs_free=10**15)
    messages = [f.message for f in profile_findings(profile(container__image=""), silent)]
    assert messages == ["slurm.partition 'batch' does not exist"]


def test_mistakes_of_a_request_are_refused_without_a_cluster():
    with pytest.raises(UserError, match="there is no recipe"):
        Request("llama3_8c").check()
    with pytest.raises(UserError, match=r"no legal layout of .* fits 3,000 nodes"):
        Request("llama3_8b_pretrain_h100_bf16", num_nodes=3000).check()
    with pytest.raises(UserError, match="is not an override"):
        Request("tiny_llama3", ("max_steps 3",)).check()


def test_unsupported_precision_is_found():
    real = recipe_job.job(registry.find("llama3_8b_pretrain_h100_bf16"))
    planted = case(profile(gpu="a100"), job=real.replace(precision="fp8cs"))
    (finding,) = [f for f in findings(planted) if "fp8cs" in f.message]
    assert "a100 does not support fp8cs" in finding.message
    assert finding.hint == "llama3_8b_pretrain_a100_bf16"


def test_recipe_is_checked_on_the_gpu_of_the_cluster():
    h200 = {"nodes": NODES.replace("gpu:h100", "gpu:h200")}
    assert findings(case(profile(gpu="h200"), answers=h200)) == []
    messages = [f.message for f in findings(case(profile(gpu="a100_40gb")))]
    assert any("does not fit on a100_40gb" in message for message in messages)


def test_plan_uses_the_gpu_of_the_cluster():
    """Outlook, checkpoint interval, status and drift alarms judge a run by it."""
    run = case(recipe="llama31_70b_pretrain_h100_bf16", nodes=8).run
    run = replace(run, plan=plans.describe_run(run.job))
    own, other = (Submission(run, profile(gpu=gpu)) for gpu in ("h100", "a100"))
    assert own.plan == run.plan
    assert own.other_gpu_note == []
    a100 = hardware.builtin().node("a100")
    on_a100 = plans.describe_run(run.job.replace(node=a100, fabric=hardware.builtin().fabric_of(a100)))
    assert own.step_time_s
    assert other.step_time_s
    assert facts(other)["step_time_s"] == other.step_time_s == on_a100["layouts"][0]["step_time_s"]
    assert other.step_time_s > 2 * own.step_time_s
    assert other.plan["query"]["gpu"] == "a100"
    assert facts(case(time="1:00").submission)["limit_s"] == 60
    assert facts(case().submission)["save_s"] == 300
    (note,) = other.other_gpu_note
    assert f"planned step time {own.step_time_s:.3g} s there, {other.step_time_s:.3g} s on a100" in note
    assert "llama31_70b_pretrain_a100_bf16" in note
    assert "a100_bf16" not in other_gpu.gpu_note("mine_h100", "h100", "a100", own.step_time_s, other.step_time_s)
    many = replace(run, max_steps=round(30 * 3600 / own.step_time_s))
    assert chain_warning(replace(own, run=many), 8) == ""
    assert "are needed" in chain_warning(replace(other, run=many), 8)


def test_short_chain_is_reported_at_submit():
    # 4 h less 300 s to start and 300 s to save are 2,760 steps of 5 s.
    long = case(max_steps=10_000).submission
    assert chain_warning(long, 3) == (
        "10,000 steps of 5 s take 13.9 h, but 3 jobs of 4 h end at step 8,280 of 10,000: 4 are needed"
    )
    assert chain_warning(long, 4) == ""
    assert chain_warning(case(max_steps=10_000, time="12:00:00").submission, 2) == ""
    assert chain_warning(case(profile(declared_only=True), max_steps=10**9).submission, 1) == ""


def test_other_gpu_is_checked_with_the_overridden_layout():
    """Not by the recipe's own: an override of the micro-batch decides whether it fits."""
    job = recipe_job.job(registry.find("llama3_8b_pretrain_h100_bf16"), 4)
    larger = job.replace(layout=job.layout.replace(mbs=16))
    h200 = {"nodes": NODES.replace("gpu:h100", "gpu:h200")}
    assert findings(case(profile(gpu="h200"), job=job, answers=h200)) == []
    assert any("does not fit on h200" in f.message for f in findings(case(profile(gpu="h200"), job=larger)))


def test_recipe_known_to_fail_is_refused(monkeypatch):
    """According to `recipes prove --write`; with overrides of what was built, the proof does not apply."""
    from superpod.collection.facts import proof_level

    broken = proof_level.ProofLevel("built with TE", broken={4: "AssertionError: no attention backend"})
    monkeypatch.setattr(proof_level, "lookup", lambda recipe: broken)
    (finding,) = findings(case())
    assert finding.message.endswith("is known not to start on 4 nodes: AssertionError: no attention backend")
    assert "use 1 or 2" in finding.hint
    request = Request("llama3_8b_pretrain_h100_bf16", ("model.config.num_layers=2",))
    assert findings(case(request=request)) == []


@pytest.mark.parametrize(("answer", "mode"), [("2775 team", "2775"), ("777 me", "777"), ("775 me", ""), ("", "")])
def test_unsafe_folder_for_runs_is_found(answer, mode):
    """Like RunFolder.create. The query does not print folders with the sticky bit."""
    live = parse({**ANSWERS, "user": "me", "open": answer})
    found = [f.message for f in profile_findings(profile(), live) if "could replace your runs" in f.message]
    assert found == (
        [f"other users can write to /lustre/runs (mode {mode}) and could replace your runs"] if mode else []
    )
