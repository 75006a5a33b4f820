"""Slurm's commands take options from the environment too. The profile and the script alone say what a job is.

sbatch(1) puts `SBATCH_*` above the lines of the script: SBATCH_EXPORT=NONE loses the run's folder, SBATCH_ARRAY_INX
makes ten jobs of one, SBATCH_WAIT does not return before the job ends. A job submitted from inside another inherits
its `SLURM_*`, which srun(1) takes as options in its turn. `SQUEUE_FORMAT` and the like change what is read back.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

KEPT = ("SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_CLUSTERS", "SLURM_JWT", "SLURM_SACK_KEY", "SLURM_SACK_SOCKET")
"""They name the cluster and who is asking, and no option of a job."""

_OPTION = re.compile(r"(SLURM|SLURMD|SBATCH|SRUN|SALLOC|SQUEUE|SINFO|SACCT|SCANCEL|SCONTROL|SACCTMGR)_[A-Z0-9_]+")

CLEAN = f"""\
for name in $(env | sed -n 's/^\\(S[A-Z]*_[A-Z0-9_]*\\)=.*/\\1/p'); do
    case $name in
        {" | ".join(KEPT)}) ;;
        SLURM_* | SLURMD_* | SBATCH_* | SRUN_* | SALLOC_*) unset "$name" ;;
        SQUEUE_* | SINFO_* | SACCT_* | SCANCEL_* | SCONTROL_* | SACCTMGR_*) unset "$name" ;;
    esac
done
exec "$@"
"""
"""The same for `sh -c`, on a machine whose environment is not known here."""


def slurm_options(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables of an environment that Slurm's commands would take as options."""
    return {name: value for name, value in environ.items() if _OPTION.fullmatch(name) and name not in KEPT}


def without_options(environ: Mapping[str, str]) -> dict[str, str]:
    """A copy of an environment without them."""
    ignored = slurm_options(environ)
    return {name: value for name, value in environ.items() if name not in ignored}


def ignored_note(environ: Mapping[str, str]) -> str:
    """What of a user's settings for sbatch does not count, and how to make it count; '' when there is none."""
    names = sorted(name for name in slurm_options(environ) if name.startswith("SBATCH_"))
    if not names:
        return ""
    verb = "is" if len(names) == 1 else "are"
    # Names only: SBATCH_EXPORT=ALL,HF_TOKEN=... holds a token, and any value may hold a line break.
    shown = ", ".join(names)
    return f"{shown} {verb} set here and not used: the profile says what a job is (its [slurm] table, slurm.options)"
