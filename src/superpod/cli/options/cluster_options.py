"""Options of commands that submit or render a job for a cluster."""

from __future__ import annotations

from typing import Annotated

import typer

TargetCluster = Annotated[
    str,
    typer.Option("--cluster", help="Cluster profile: a built-in one such as dgx_h100, or the path of a TOML file."),
]
AttemptTime = Annotated[
    str,
    typer.Option("--time", help="Time limit per attempt in Slurm format, such as 04:00:00. Default: from the profile."),
]
SharedRuns = Annotated[str, typer.Option("--runs", help="Parent folder for run folders. Default: from the profile.")]
Model = Annotated[
    str,
    typer.Option("--model", "--hf", help="Hugging Face folder of the model to fine-tune on the samples in --data."),
]
