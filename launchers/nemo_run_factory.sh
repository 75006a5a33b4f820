#!/bin/sh
# Train a recipe with NeMo's command line: sh launchers/nemo_run_factory.sh [RECIPE [OVERRIDE ...]]
# NeMo-Run finds the factories through this package's entry point `nemo_run.cli`. It needs GPUs, except with --dryrun.
set -eu

recipe=${1:-llama3_8b_pretrain_h100_bf16}
[ $# -eq 0 ] || shift
exec nemo llm pretrain --factory "$recipe" trainer.max_steps=100 log.log_dir=logs "$@"
