# `make` lists the targets. The first one that needs the virtual environment makes it from the locks.
PYTHON ?= python3
DEVICE ?= cpu
ARGS ?=
WORKERS ?= 4
VENV := .venv
BIN := $(VENV)/bin
ENVIRONMENT := $(VENV)/.stamp-$(DEVICE)
PROJECT := $(VENV)/.stamp-project
LOCKS_cpu := bootstrap torch cuda cpu
LOCKS_gpu := bootstrap gpu

.DEFAULT_GOAL := help
.PHONY: help setup demo test drills bench-nightly bench-ingest bench-quality bench-scale bench-train bench-evaluate lint lock clean

help: ## list the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /  \1\t/' | expand -t 18
	@echo "  variables: PYTHON=python3 (3.11 to 3.13), DEVICE=cpu or gpu, WORKERS=4, ARGS passed to demo, test and lock"

setup: $(PROJECT) ## make .venv from the locks, with nightjar in it

demo: setup ## a whole nightly run on generated data
	$(BIN)/nightjar demo $(ARGS)

test: setup ## all tests, in WORKERS processes
	$(BIN)/pytest --numprocesses $(WORKERS) --dist loadfile --no-loadscope-reorder $(ARGS)

drills: setup ## slow failure drills: nights killed in every stage, a hundred kills, hosts that do not come, cancelling, tuning
	$(BIN)/pytest -m drill $(ARGS)

bench-nightly: setup ## whole nights on the demo and on public data; writes benchmarks/nightly.md
	$(BIN)/python -m benchmarks.nightly

bench-ingest: setup ## the ingest beside pandas, the loader beside training; writes benchmarks/ingest.md
	$(BIN)/python -m benchmarks.ingest

bench-quality: setup ## transfer, features, cold items on public data, 3 seeds, about an hour; writes benchmarks/quality
	$(BIN)/python -m benchmarks.quality

bench-train: setup ## the training step beside TorchRec's example, and by sharding type; writes benchmarks/train.md
	$(BIN)/python -m benchmarks.train

bench-evaluate: setup ## the exact evaluation compared with plain numpy, quiet and under load; writes benchmarks/evaluate.md
	$(BIN)/python -m benchmarks.evaluate

bench-scale: setup ## three sizes on paper, up to 20 billion rows; writes benchmarks/scale.json and the tables of docs/scale.md
	$(BIN)/python -m benchmarks.scale

lint: setup ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

lock: ## resolve pyproject.toml into infra/locks
	@test -x $(BIN)/uv || infra/install.sh $(VENV) tools $(PYTHON)
	$(BIN)/python infra/lock.py $(BIN)/uv $(ARGS)

clean: ## remove the environment and all caches
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis build dist *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# An environment belongs to one device and one state of its locks: it is made anew, so nothing stale stays in it.
$(ENVIRONMENT): infra/install.sh $(foreach lock,$(LOCKS_$(DEVICE)),infra/locks/$(lock).txt)
	@echo "making $(VENV) for DEVICE=$(DEVICE)"
	@infra/install.sh $(VENV) $(DEVICE) $(PYTHON)
	@touch $@

$(PROJECT): $(ENVIRONMENT) pyproject.toml
	@$(BIN)/uv pip install --quiet --python $(BIN)/python --no-deps --no-build-isolation --editable .
	@touch $@
