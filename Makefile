# `make` lists the targets. The first target that needs the virtual environment creates it from the lock files.
PYTHON ?= python3
DEVICE ?= cpu
EXTRAS ?=
ARGS ?=
WORKERS ?= 4
# Several tests run at once. Each test gets one OpenMP thread, because waiting threads would take cores from the other tests.
# Tests write and sync many small files. They use memory if it has room, otherwise the default folder for temporary files.
TEST_TMP ?= $(shell test "$$(df -k --output=avail /dev/shm 2>/dev/null | tail -n 1)" -gt 4000000 2>/dev/null && echo /dev/shm)
VENV := .venv
BIN := $(VENV)/bin
ENVIRONMENT := $(VENV)/.stamp-$(DEVICE)$(addprefix -,$(EXTRAS))
PROJECT := $(VENV)/.stamp-project
LOCKS_cpu := bootstrap torch cuda cpu
LOCKS_gpu := bootstrap gpu

.DEFAULT_GOAL := help
.PHONY: help setup demo test drills bench-nightly bench-ingest bench-quality bench-scale bench-train bench-evaluate bench-ranks bench-serve \
        bench-index bench-gate bench-plan lint words spelling docs lock clean

help: ## list the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /  \1\t/' | expand -t 18
	@echo "  variables: PYTHON=python3 (3.11 to 3.13), DEVICE=cpu or gpu, EXTRAS=spark, WORKERS=4, ARGS for demo, test, drills and lock"

setup: $(PROJECT) ## create .venv from the lock files and install nightjar into it

demo: setup ## execute a complete run on generated data
	$(BIN)/nightjar demo $(ARGS)

# Test processes share compiled bytecode, also where the environment disables it.
test: setup ## run all tests in WORKERS processes
	$(if $(TEST_TMP),TMPDIR=$(TEST_TMP)) PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(BIN)/pytest --numprocesses $(WORKERS) --dist loadfile --no-loadscope-reorder $(ARGS)

drills: setup ## run the slow failure tests and write their table in docs/operations.md
	$(BIN)/pytest -m drill --junitxml=build/drills.xml $(ARGS); status=$$?; $(BIN)/python -m infra.drill_table build/drills.xml; exit $$status

bench-nightly: setup ## measure complete runs on the demo and on public data; writes benchmarks/nightly.md
	$(BIN)/python -m benchmarks.nightly

bench-ingest: setup ## compare the ingest with pandas and measure the loader; writes benchmarks/ingest.md
	$(BIN)/python -m benchmarks.ingest

bench-quality: setup ## compare models on public data with 3 seeds (about four hours on two cores); writes benchmarks/quality
	$(BIN)/python -m benchmarks.quality

bench-train: setup ## compare the training step with TorchRec's example and measure sharding types; writes benchmarks/train.md
	$(BIN)/python -m benchmarks.train

bench-evaluate: setup ## compare the exact evaluation with numpy and FAISS; writes benchmarks/evaluate.md
	$(BIN)/python -m benchmarks.evaluate

bench-ranks: setup ## measure the exact ranking on 1, 2 and 4 ranks (about 15 minutes); writes benchmarks/ranks.md
	$(BIN)/python -m benchmarks.ranks

bench-index: setup ## compare the FAISS index kinds with a million items (about 10 minutes); writes benchmarks/index.md
	$(BIN)/python -m benchmarks.index

bench-serve: setup ## measure latency and throughput of the served package with a million items (about 10 minutes); writes benchmarks/serve.md
	$(BIN)/python -m benchmarks.serve

bench-gate: setup ## measure the error rates of the champion gate over simulated runs; writes benchmarks/gate.md
	$(BIN)/python -m benchmarks.gate

bench-plan: setup ## compare the estimates of `nightjar plan` with measured runs (about 10 minutes); writes benchmarks/plan.md and the constants
	$(BIN)/python -m benchmarks.plan

bench-scale: setup ## plan three model sizes up to 20 billion rows; writes benchmarks/scale.json and the tables of docs/scale.md
	$(BIN)/python -m benchmarks.scale

lint: setup words spelling ## run ruff, mypy, the word list and the spell check
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

words: ## check that no file uses a word that infra/words.py lists
	@$(PYTHON) infra/words.py

spelling: setup ## check the spelling of code and docs
	$(BIN)/codespell $$(git ls-files '*.py' '*.md' '*.yaml' '*.html' '*.toml' Makefile)

docs: setup ## generate docs/config.md from the config schema
	$(BIN)/python -m infra.config_reference

lock: ## resolve pyproject.toml into infra/locks
	@test -x $(BIN)/uv || infra/install.sh $(VENV) tools $(PYTHON)
	$(BIN)/python infra/lock.py $(BIN)/uv $(ARGS)

clean: ## remove the environment and all caches
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis build dist *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# An environment belongs to one device and one state of the lock files. It is always created from scratch.
$(ENVIRONMENT): infra/install.sh $(foreach lock,$(LOCKS_$(DEVICE)) $(EXTRAS),infra/locks/$(lock).txt)
	@echo "creating $(VENV) for DEVICE=$(DEVICE)"
	@infra/install.sh $(VENV) $(DEVICE) $(PYTHON) $(EXTRAS)
	@touch $@

$(PROJECT): $(ENVIRONMENT) pyproject.toml
	@$(BIN)/uv pip install --quiet --python $(BIN)/python --no-deps --no-build-isolation --editable .
	@touch $@
