#!/bin/sh
# quickstart.sh BIN: real text, a tokenizer, a model of 3 million parameters on two ranks, a checkpoint, a resume.
set -eu
recipes=$1/recipes
say() { printf '\n\033[1m$ recipes %s\033[0m\n' "$*"; "$recipes" "$@"; }

say data build --text stdlib --vocab-size 4096 --out data/quickstart
say run tiny_llama3 --data data/quickstart --runs runs
say run tiny_llama3 --resume last --runs runs trainer.max_steps=80
printf '\nnext: . %s/activate; recipes list; recipes show tiny_llama3 --why\n' "$1"
