"""The first lines of every batch script, which must hold on a node that nobody has looked at: an older Python, a module
that is not there, and an environment with options of Slurm in it. Pure text.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from superpod.errors import UserError
from superpod.slurm.preflight.reserved_variables import RANK_VARIABLES


def quoted(text: str) -> str:
    """A word for a shell, inert whatever it holds. Raises UserError for a zero byte, which no shell can hold."""
    if "\0" in text:
        raise UserError("a value holds a zero byte, which no shell can pass on")
    return shlex.quote(text)


def shell(modules: Sequence[str]) -> str:
    """The shell's own settings, and the modules that are loaded before anything else."""
    loads = "".join(f"load {quoted(name)}\n" for name in modules)
    # Before `set -u`, which a site's `module` need not bear.
    return f"{DIE}{MODULES + loads if loads else ''}set -uo pipefail\n"


DIE = """\
die() { printf '%s recipes: %s\\n' "$(date +%T)" "$1" >&2; exit 1; } # the job's last words, for `recipes logs`
"""

FAILED = r"ERROR:[0-9]|nable to locate|nknown module"
"""Words of `module load` for a module that did not load, where it ends with 0 all the same (Modules 3); an extended
regular expression. A module's own words may well say ERROR, such as NCCL_ASYNC_ERROR_HANDLING."""

MODULES = """\
# A module that does not load ends the job here, in its own words; Modules 3 has such words and yet ends with 0.
if ! type module >/dev/null 2>&1; then
    for init in "${LMOD_PKG:-}/init/bash" "${MODULESHOME:-}/init/bash" /etc/profile.d/{z00_lmod,lmod,modules}.sh; do
        # shellcheck disable=SC1090 # the site's own
        if [[ -r $init ]] && . "$init"; then break; fi
    done
fi
load() {
    local words ended
    words=$(mktemp) || die "no temporary file can be made on $HOSTNAME"
    module load "$1" 2>"$words"
    ended=$?
    cat "$words" >&2
    if ((ended)) || grep -Eq 'FAILED' "$words"; then
        die "module load $1 fails on $HOSTNAME: $(tr -s '[:space:]' ' ' <"$words")"
    fi
    rm -f "$words"
}
""".replace("FAILED", FAILED)

# What Slurm says of the job stays: `SLURM_JOB*`, its nodes and tasks, and how its commands reach the controller.
INHERITED = """\
# What srun would take as options from the environment (srun(1)) is dropped: the lines below say what is meant.
for name in "${!S@}"; do
    case $name in
        SLURM_JOB* | SLURM_CONF* | SLURM_CLUSTER_NAME | SLURM_WORKING_CLUSTER | SLURM_JWT | SLURM_HET_SIZE) ;;
        SLURM_SACK_* | SLURM_SPANK_* | SLURM_NNODES | SLURM_NODELIST | SLURM_TASKS_PER_NODE | SLURM_RESTART_COUNT) ;;
        SLURM_ARRAY_* | SLURM_SUBMIT_* | SLURM_TOPOLOGY_ADDR* | SLURMD_NODENAME) ;;
        SLURM_NODEID | SLURM_PROCID | SLURM_LOCALID) ;;
        SLURM_* | SLURMD_* | SBATCH_* | SRUN_* | SALLOC_* | SQUEUE_* | SINFO_* | SACCT_* | SCANCEL_* | SCONTROL_*)
            unset "$name" ;;
    esac
done
# A torchrun or a GPU selection in the shell that submitted (--export=ALL): every rank and every job gets its own.
unset RANK_VARIABLES
[[ ${SLURM_JOB_GPUS:-} ]] || unset CUDA_VISIBLE_DEVICES
""".replace("RANK_VARIABLES", " ".join(RANK_VARIABLES))


def host(python: str, nodes: int, gpus: int) -> str:
    """Refuse a node that cannot run the rest: an older Python, or another shape than the recipe was made for."""
    tasks = nodes * gpus
    return f"""\
# Refused here, with the reason, rather than by a traceback or a hang: an older Python, another number of ranks.
host_python={quoted(python)}
check='import sys; v = sys.version_info; v >= (3, 9) or sys.exit("is Python %d.%d" % v[:2])'
why=$("$host_python" -c "$check" 2>&1) || die "the batch script needs Python 3.9 or later; on $HOSTNAME $host_python \
${{why##*$'\\n'}}: name another as software.host_python"
if ((${{SLURM_JOB_NUM_NODES:-{nodes}}} != {nodes} || ${{SLURM_NTASKS:-{tasks}}} != {tasks})); then
    die "this is a script for {nodes} nodes and {tasks} ranks; Slurm gave $SLURM_JOB_NUM_NODES and $SLURM_NTASKS \
(SBATCH_* variables and options of sbatch win over the script): render it for that size"
fi
"""
