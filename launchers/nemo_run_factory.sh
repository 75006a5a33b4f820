#!/bin/sh
# Start a recipe by its factory with NeMo's own command line: sh launchers/nemo_run_factory.sh [RECIPE [OVERRIDE ...]]
# NeMo-Run finds the factories by the entry point `nemo_run.cli` of this package. Needs GPUs, unless --dryrun is given.
set -eu

recipe=${1:-llama3_8b_pretrain_h100_bf16}
[ $# -eq 0 ] || shift
exec nemo llm pretrain --factory "$recipe" trainer.max_steps=100 log.log_dir=logs "$@"
