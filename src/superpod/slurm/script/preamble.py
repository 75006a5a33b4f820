"""Renders the first lines of a batch script.

They load modules, check Python and the size of the job, and unset Slurm's option variables.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from superpod.errors import UserError
from superpod.slurm.preflight.reserved_variables import RANK_VARIABLES


def shell_quote(text: str) -> str:
    """Return `text` quoted as one word of a shell command. Raises UserError if it contains a null byte."""
    if "\0" in text:
        raise UserError("a value contains a null byte, which a shell cannot represent", "remove the null byte")
    return shlex.quote(text)


def shell_setup(modules: Sequence[str]) -> str:
    """Return the shell code that defines `die`, loads modules and sets the shell options."""
    loads = "".join(f"load {shell_quote(name)}\n" for name in modules)
    if loads:
        loads = MODULES + loads
    # Modules are loaded before `set -u`: a site's `module` function may use unset variables.
    return f"{DIE}{loads}set -uo pipefail\n"


DIE = """\
die() { printf '%s recipes: %s\\n' "$(date +%T)" "$1" >&2; exit 1; } # `recipes logs` shows the message
"""

LOAD_FAILURE = r"ERROR:[0-9]|nable to locate|nknown module"
"""Extended regular expression for messages of `module load` about a module that did not load, for which Modules 3
exits with 0. Messages printed by a module may contain ERROR, such as NCCL_ASYNC_ERROR_HANDLING."""

MODULES = """\
# Exit if a module does not load. Modules 3 exits with 0 even then, so its messages are checked too.
if ! type module >/dev/null 2>&1; then
    for init in "${LMOD_PKG:-}/init/bash" "${MODULESHOME:-}/init/bash" /etc/profile.d/{z00_lmod,lmod,modules}.sh; do
        # shellcheck disable=SC1090 # a file of the site
        if [[ -r $init ]] && . "$init"; then break; fi
    done
fi
load() {
    local messages status
    messages=$(mktemp) || die "cannot create a temporary file on $HOSTNAME"
    module load "$1" 2>"$messages"
    status=$?
    cat "$messages" >&2
    if ((status)) || grep -Eq 'FAILED' "$messages"; then
        die "module load $1 fails on $HOSTNAME: $(tr -s '[:space:]' ' ' <"$messages")"
    fi
    rm -f "$messages"
}
""".replace("FAILED", LOAD_FAILURE)

# Variables that describe the job and the controller are kept: `SLURM_JOB*`, nodes, tasks, and `SLURM_CONF*`.
UNSET_INHERITED = """\
# Unset the variables that srun would read as options (srun(1)): the options are written out below.
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
# --export=ALL copies the environment of the submitting shell: unset torchrun's variables and CUDA_VISIBLE_DEVICES.
unset RANK_VARIABLES
[[ ${SLURM_JOB_GPUS:-} ]] || unset CUDA_VISIBLE_DEVICES
""".replace("RANK_VARIABLES", " ".join(RANK_VARIABLES))


def host_check(python: str, nodes: int, gpus: int) -> str:
    """Return shell code that exits with a message if Python is too old, or the allocation has another size."""
    tasks = nodes * gpus
    return f"""\
# Check the Python version and the size of the job now: later, they would cause a traceback or a hang.
host_python={shell_quote(python)}
check='import sys; v = sys.version_info; v >= (3, 9) or sys.exit("is Python %d.%d" % v[:2])'
why=$("$host_python" -c "$check" 2>&1) || die "the batch script needs Python 3.9 or later; on $HOSTNAME $host_python \
${{why##*$'\\n'}}: set software.host_python to a different Python"
if ((${{SLURM_JOB_NUM_NODES:-{nodes}}} != {nodes} || ${{SLURM_NTASKS:-{tasks}}} != {tasks})); then
    die "this script is for {nodes} nodes and {tasks} ranks, but Slurm allocated $SLURM_JOB_NUM_NODES nodes and \
$SLURM_NTASKS tasks (options of sbatch and SBATCH_* variables override the script): render it for that allocation"
fi
"""
