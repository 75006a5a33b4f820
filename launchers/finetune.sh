#!/bin/sh
# Fine-tune a Hugging Face model on this machine: sh launchers/finetune.sh MODEL DATA OUT [OVERRIDE ...]
#
# MODEL is a Hugging Face folder, DATA a file of samples (JSONL, Parquet or CSV), OUT the Hugging Face folder to write.
# The model is imported into NeMo's format once, trained, and exported with merged adapters; transformers evaluates the
# exported folder. The environment variable RECIPE selects the recipe; `recipes list sft` and `recipes list lora` list the choices.
set -eu

if [ $# -lt 3 ]; then
    echo "usage: sh launchers/finetune.sh MODEL DATA OUT [OVERRIDE ...]" >&2
    exit 2
fi
model=$1 data=$2 out=$3
shift 3
exec recipes finetune "${RECIPE:-llama3_8b_lora_h100_bf16}" --model "$model" --data "$data" --validation 0.1 --out "$out" "$@"
