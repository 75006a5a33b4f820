# Two commands: `make quickstart`, then `make test`. Both make .venv when it is missing or out of date.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
GOLDENS := tests/nemo2/test_goldens.py tests/cli/test_surface.py tests/slurm/script/test_batch_script.py \
	tests/nemo2/export/test_export.py::test_a_complete_recipe_is_what_export_writes_today \
	tests/examples/test_finetune_project.py::test_its_recipe_is_what_export_writes
TWO := --numprocesses 2 --dist loadscope --no-loadscope-reorder

.PHONY: help quickstart test test-all test-long test-slurm soak lint format goldens benchmarks docs figures pictures clean
help:
	@sed -n 's/^\([a-z-]*\):.*## /  make \1\t/p' $(MAKEFILE_LIST) | expand -t 22

quickstart: $(STAMP) ## train tiny_llama3 on real text on this machine, stop, go on
	@sh scripts/quickstart.sh $(BIN)

test: $(STAMP) ## the default tests
	$(BIN)/python -m pytest $(TWO) -m "not slow and not slurm and not long"

test-all: $(STAMP) ## the slow ones too, as .ci/run does; not those marked long
	$(BIN)/python -m pytest $(TWO) -m "not long"

test-long: $(STAMP) ## those that would take .ci/run over its hour: every shape, planted bugs, drills, fine-tunings
	$(BIN)/python -m pytest $(TWO) -m "long and not slurm"
	SUPERPOD_EXPORT=model $(BIN)/python -m pytest tests/nemo2/export/test_export.py

test-slurm: $(STAMP) ## those on a real Slurm, as root: tests/slurm/testbed/testbed.sh
	$(BIN)/python -m pytest -m slurm

soak: $(STAMP) ## twenty random faults on a run of real NeMo on the testbed, as root: half an hour
	$(BIN)/python -m tests.slurm.testbed.soak

lint: $(STAMP) ## what the style checks say
	$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/pyright

format: $(STAMP) ## mend what can be mended by itself
	$(BIN)/ruff check --fix . && $(BIN)/ruff format .

goldens: $(STAMP) ## write the goldens anew; review the diff
	$(BIN)/python -m pytest $(GOLDENS) --update-goldens -q

benchmarks: $(STAMP) ## measure what has a target
	for b in cli_startup planner_speed planner_accuracy; do $(BIN)/python benchmarks/$$b.py || exit 1; done
	$(BIN)/python -m benchmarks.checkpoint_start

docs: $(STAMP) ## write the tables of docs/ that come from code and recipes
	$(BIN)/python scripts/recipe_docs.py && $(BIN)/python scripts/cause_docs.py

figures: $(STAMP) ## put the newest quickstart into the README
	$(BIN)/python scripts/figures.py

pictures: $(STAMP) ## make the pictures of the README and docs/, in Chromium
	$(BIN)/python scripts/pictures.py $(ONLY)

clean: ## remove the environment and caches; runs/ and data/ stay
	rm -rf $(VENV) .pytest_cache .ruff_cache .hypothesis

$(STAMP): pyproject.toml constraints.txt scripts/install.sh
	@sh scripts/install.sh "$(PYTHON)" $(VENV)
