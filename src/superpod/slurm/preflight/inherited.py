"""Removes Slurm's option variables from the environment, so that only the profile and the script define a job.

`SBATCH_*` variables override the script (sbatch(1)): SBATCH_EXPORT=NONE drops the variable with the run folder,
SBATCH_ARRAY_INX turns the job into an array, SBATCH_WAIT blocks until the job ends. A job submitted from within another
inherits its `SLURM_*` variables, which srun(1) reads as options. `SQUEUE_FORMAT` and similar variables change the
output that is parsed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

KEPT_VARIABLES = (
    "SLURM_CONF",
    "SLURM_CONF_SERVER",
    "SLURM_CLUSTERS",
    "SLURM_JWT",
    "SLURM_SACK_KEY",
    "SLURM_SACK_SOCKET",
)
"""Variables that select the cluster and authenticate the user, and are not job options."""

_OPTION = re.compile(r"(SLURM|SLURMD|SBATCH|SRUN|SALLOC|SQUEUE|SINFO|SACCT|SCANCEL|SCONTROL|SACCTMGR)_[A-Z0-9_]+")

UNSET_OPTIONS = f"""\
for name in $(env | sed -n 's/^\\(S[A-Z]*_[A-Z0-9_]*\\)=.*/\\1/p'); do
    case $name in
        {" | ".join(KEPT_VARIABLES)}) ;;
        SLURM_* | SLURMD_* | SBATCH_* | SRUN_* | SALLOC_*) unset "$name" ;;
        SQUEUE_* | SINFO_* | SACCT_* | SCANCEL_* | SCONTROL_* | SACCTMGR_*) unset "$name" ;;
    esac
done
exec "$@"
"""
"""Shell code for `sh -c` that unsets these variables on a remote machine, and then executes its arguments."""


def slurm_options(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables in an environment that Slurm's commands read as options."""
    return {name: value for name, value in environ.items() if _OPTION.fullmatch(name) and name not in KEPT_VARIABLES}


def without_options(environ: Mapping[str, str]) -> dict[str, str]:
    """Return a copy of an environment without the variables that Slurm's commands read as options."""
    ignored = slurm_options(environ)
    return {name: value for name, value in environ.items() if name not in ignored}


def ignored_note(environ: Mapping[str, str]) -> str:
    """Return a note with the names of the SBATCH_* variables in an environment, which are ignored; "" if none."""
    names = sorted(name for name in slurm_options(environ) if name.startswith("SBATCH_"))
    if not names:
        return ""
    # The values are omitted: SBATCH_EXPORT=ALL,HF_TOKEN=... contains a token, and a value may contain a line break.
    return f"ignored {', '.join(names)}; set these options in the profile instead ([slurm], slurm.options)"
