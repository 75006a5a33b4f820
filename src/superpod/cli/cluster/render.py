"""`recipes render`: print the sbatch script that trains a recipe on a cluster."""

from __future__ import annotations

from superpod.cli.options.request_options import (
    AttemptTime,
    Build,
    Data,
    Name,
    Overrides,
    SharedRuns,
    TargetCluster,
    make_request,
)
from superpod.cli.options.size_options import SizeOptions, print_notes, with_size
from superpod.launch.model_check import require_built


@with_size
def render(
    name: Name,
    cluster: TargetCluster,
    overrides: Overrides = None,
    *,
    size: SizeOptions,
    data: Data = None,
    time: AttemptTime = "",
    runs: SharedRuns = "",
    build: Build = True,
) -> None:
    """Print the sbatch script that trains a recipe on a cluster; queue nothing."""
    from superpod.slurm.preflight import preflight
    from superpod.slurm.submission import request_checks
    from superpod.slurm.submission.submit import Submission, script

    profile = request_checks.load_profile(cluster, time, runs)
    request = make_request(name, overrides, data, size)
    request_checks.check_request(request, profile)
    print_notes(request.mock_data_notes)
    submission = Submission(request_checks.resolve_request(request), profile, runs, time)
    preflight.refuse_unfit(submission)
    print_notes(submission.other_gpu_note)
    require_built([submission.run], build=build)
    print(script(submission), end="")
