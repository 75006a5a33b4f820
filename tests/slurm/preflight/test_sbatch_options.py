"""Options and variables of a profile that would contradict the script are refused."""

import gzip
import re
from pathlib import Path
from typing import Any

import pytest

from superpod.errors import UserError
from superpod.slurm.preflight import reserved_variables, sbatch_options
from superpod.slurm.profiles import profiles

GOOD = (profiles.DEFAULT_PROFILES / "dgx_h100.toml").read_text()
MANUAL = Path("/usr/share/man/man1/sbatch.1.gz")


def options(*words: str) -> str:
    return GOOD.replace("[slurm]\n", f"[slurm]\noptions = {[*words]!r}\n")


def variables(**values: str) -> str:
    return GOOD + "\n[env]\n" + "".join(f"{name} = {value!r}\n" for name, value in values.items())


@pytest.mark.parametrize(
    ("option", "says"),
    [
        ("--nodes=4", "use --nodes"),
        ("--array=0-9", "in the same run folder"),
        ("--arr=0-9", "abbreviate --array"),
        ("--n=3", "abbreviate --"),
        ("--no-requeue", "requeued"),
        ("--begin=2031-01-01", "every attempt of the chain"),
        ("--deadline=now+1minute", "every attempt of the chain"),
        ("--hold", "every attempt of the chain"),
        ("--priority=0", "holds the job"),
        ("--mem=100M", "use slurm.mem"),
        ("--mem-per-cpu=1M", "use slurm.mem"),
        ("--ntasks=1", "one task per GPU"),
        ("--gpus=1", "one task per GPU"),
        ("--gres=gpu:1", "use slurm.gpus and gpus_per_node"),
        ("--gres=nvme:1,gpu:h100:2", "use slurm.gpus and gpus_per_node"),
        ("--dependency=afterok:1", "use --after"),
        ("--kill-on-invalid-dep=no", "use --after"),
        ("--output=/dev/null", "read the job's output"),
        ("--chdir=/", "read the job's output"),
        ("--open-mode=truncate", "read the job's output"),
        ("--time=1", "use slurm.time, or --time"),
        ("--time-min=1", "reduce the time"),
        ("--signal=B:KILL@60", "use chain.save_s"),
        ("--wrap=true", "would not queue"),
        ("--test-only", "would not queue"),
        ("--parsable", "would not queue"),
        ("--wait", "would not queue"),
        ("--export=NONE", "use [env]"),
        ("--exclusive=user", "use slurm.exclusive"),
        ("--oversubscribe", "use slurm.exclusive"),
        ("--overcommit", "one task per GPU"),
        ("--job-name=x", "common name"),
        ("--no-kill", "one of their nodes has failed"),
        ("--uid=0", "the submitting user"),
        ("--clusters=other", "a different cluster"),
        ("--distribution=cyclic", "share a node"),
        ("--account=x", "use slurm.account"),
        ("--partition=x", "use slurm.partition"),
        ("--mail-user=x", "use notify.mail"),
        ("--container-image=x", "use container.image"),
        ("--tres-per-task=cpu=1", "one task per GPU"),
    ],
)
def test_contradicting_options_are_refused_with_replacement(option, says):
    with pytest.raises(UserError) as refused:
        profiles.parse(options(option), "x.toml")
    assert says in str(refused.value)
    assert re.match(r"x\.toml:\d+: slurm\.options ", str(refused.value))


@pytest.mark.parametrize(
    "option",
    [
        *("--reservation=mine", "--nodelist=node[1-2]", "--exclude=node3", "--switches=1@10:00", "--comment=a job"),
        *("--licenses=fs:1", "--gres=nvme:100", "--nice=10", "--wckey=x", "--priority=100", "--segment=16"),
        *("--site-spank-option=1", "--contiguous", "--network=sharp", "--propagate=NONE", "--core-spec=2"),
    ],
)
def test_other_options_are_kept(option):
    assert profiles.parse(options(option), "x.toml").slurm.options == [option]


def test_gres_option_is_refused_if_gpus_use_gres():
    text = options("--gres=nvme:1").replace('gpus = "gpus-per-node"', 'gpus = "gres"')
    with pytest.raises(UserError, match="must not contain --gres"):
        profiles.parse(text, "x.toml")


@pytest.mark.skipif(not MANUAL.exists(), reason="Slurm's manual pages are not installed")
def test_table_has_every_option_of_the_manual():
    text = re.sub(r"\\f[BIRP]|\\", "", gzip.decompress(MANUAL.read_bytes()).decode(errors="replace"))
    named = set(re.findall(r"^(?:-\w, )?--([a-z][a-z-]+)", text, re.MULTILINE))
    assert len(named) > 90
    assert named <= set(sbatch_options.OPTIONS)


def test_refusals_have_reasons_and_existing_keys():
    schema = profiles.schema()
    for name, option in sbatch_options.OPTIONS.items():
        assert not option.key or option.rejected, name
        for table, key in re.findall(r"\b(slurm|notify|container|chain|folders)\.(\w+)", option.key):
            model: Any = schema.model_fields[table].annotation
            assert key in model.model_fields, option.key


@pytest.mark.parametrize(
    "name",
    [
        *("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "NODE_RANK"),
        *("CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES", "SLURM_PROCID", "SLURM_NTASKS", "SBATCH_ARRAY_INX"),
        *("SRUN_CPUS_PER_TASK", "SLURM_MPI_TYPE", "SUPERPOD_RUN_DIR", "SUPERPOD_DEADLINE", "OMPI_COMM_WORLD_RANK"),
        *("PMI_RANK", "PMIX_RANK", "NCCL_COMM_ID", "WANDB_RUN_ID", "NVTE_FLASH_ATTN", "FT_RANK_MONITOR_IPC_SOCKET"),
    ],
)
def test_reserved_variables_are_refused(name):
    with pytest.raises(UserError, match=f"env {name}"):
        profiles.parse(variables(**{name: "secret-value"}), "x.toml")
    with pytest.raises(UserError) as refused:
        profiles.parse(variables(**{name: "secret-value"}), "x.toml")
    assert "secret-value" not in str(refused.value)


@pytest.mark.parametrize(
    "name",
    [
        *("NCCL_DEBUG", "NCCL_IB_TIMEOUT", "HTTPS_PROXY", "OMP_NUM_THREADS", "WANDB_MODE", "PMIX_MCA_gds", "UCX_TLS"),
        *("OMPI_MCA_btl", "CUDA_DEVICE_ORDER", "TORCH_NCCL_DUMP_ON_TIMEOUT", "SUPERPOD_UNPROVEN_VERSIONS", "MY_RANK"),
    ],
)
def test_other_variables_are_kept(name):
    assert profiles.parse(variables(**{name: "1"}), "x.toml").env == {name: "1"}
    assert not reserved_variables.problem(name)


def test_variable_contradicting_a_key_is_refused():
    with pytest.raises(UserError, match=r"NCCL_SOCKET_IFNAME conflicts with network.interface 'bond0'"):
        profiles.parse(variables(NCCL_SOCKET_IFNAME="eth9"), "x.toml")
    assert profiles.parse(variables(NCCL_SOCKET_IFNAME="bond0"), "x.toml").env
