# The whole vocabulary of the repo. `make` alone lists it.
.DEFAULT_GOAL := help
SHELL := /bin/bash
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# What `make serve` hands on, such as: make serve ARGS="--model path/to/model --port 50060"
ARGS ?=
# Set to e.g. "torch==2.13.0 --index-url ..." for another build of torch (README).
TORCH ?= torch==2.13.0

.PHONY: compile-kernels help serve test unit system faults lint format protos bench bench-peers gpu-check soak chart locks images images-test cluster clean

help: ## list these commands
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/  make \1|\2/' | column -t -s '|'

$(VENV)/.python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "error: Pagewire needs Python 3.11 or newer, '$(PYTHON)' is $$($(PYTHON) --version 2>&1). Try: make PYTHON=python3.11 $(MAKECMDGOALS)"; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { echo "error: Python's venv module is missing. On Debian: apt-get install python3-venv"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	@touch $@

$(VENV)/.installed: $(VENV)/.python pyproject.toml
	@$(BIN)/python -c 'import torch' 2>/dev/null || $(BIN)/pip install --disable-pip-version-check $(TORCH)
	$(BIN)/pip install --disable-pip-version-check --quiet -e '.[frontend,core,worker,client]'
	@touch $@

$(VENV)/.dev: $(VENV)/.installed
	$(BIN)/pip install --disable-pip-version-check --quiet -e '.[dev]'
	@touch $@

serve: $(VENV)/.installed ## make .venv, install, fetch the model, start all three services, show one answer
	@$(BIN)/pagewire serve $(ARGS)

test: lint unit system faults ## everything that CI runs

unit: $(VENV)/.dev ## the tests that start no deployment, one file per process at a time
	$(BIN)/python -m pytest -m 'not system and not ops' -n 2 --dist loadfile

system: $(VENV)/.dev ## the tests against real processes and a real model
	$(BIN)/python -m pytest -m 'system and not ops'

faults: $(VENV)/.dev ## plant faults in the core one by one: its tests must find each
	$(BIN)/python tests/mutation/plant_faults.py

lint: $(VENV)/.dev ## ruff, mypy, import contracts, buf
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	PATH="$(BIN):$$PATH" $(BIN)/lint-imports
	$(BIN)/buf lint
	$(BIN)/buf format -d --exit-code

format: $(VENV)/.dev ## ruff and buf, in place
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/buf format -w

protos: $(VENV)/.dev ## generate the Python code of pagewire.v1 again
	PATH="$(abspath $(BIN)):$$PATH" protos/generate.sh

$(VENV)/.bench: $(VENV)/.installed
	$(BIN)/pip install --disable-pip-version-check --quiet -e '.[bench]'
	@touch $@

bench: $(VENV)/.bench ## the figures of BENCHMARKS.md that need no peer; ARGS="--sections single,batch --write"
	$(BIN)/python -m bench.run $(ARGS)

bench-peers: $(VENV)/.bench ## vLLM CPU and llama.cpp in environments of their own, side by side with ours
	$(BIN)/python -m bench.peers.install
	$(BIN)/python -m bench.run --peers vllm,llama $(ARGS)

# Installs nothing: a machine with a GPU may have its own torch and no network.
GPU_PYTHON ?= $(if $(wildcard $(BIN)/python),$(BIN)/python,$(PYTHON))
gpu-check: ## correctness and speed of the CUDA path, on a machine with a GPU; ARGS="--out DIR", or "--dry-run" without
	PYTHONPATH="$(CURDIR):$(CURDIR)/protos" $(GPU_PYTHON) -m bench.gpu_check $(ARGS)

chart: $(VENV)/.dev ## helm lint, every manifest of the chart in every Kubernetes, package; puts helm into .venv/tools
	$(BIN)/python k8s/tools/make_schema.py
	$(BIN)/python k8s/tools/make_readme.py
	helm=$$($(BIN)/python k8s/tools/get_helm.py) && $$helm lint --strict k8s/chart && $$helm lint --strict k8s/chart --values k8s/chart/values-gpu.yaml
	$(BIN)/python -m pytest tests/chart -n 2
	helm=$$($(BIN)/python k8s/tools/get_helm.py) && $$helm package k8s/chart --destination build

compile-kernels: $(VENV)/.dev ## every Triton kernel for sm_80, sm_90 and sm_100, against kernels/cuda/resources.csv
	$(BIN)/python -m kernels.cuda.variant

soak: $(VENV)/.dev ## twenty minutes of random load on real processes, and what must hold after it
	$(BIN)/python -m tests.soak.soak $(ARGS)

locks: $(VENV)/.dev ## pin what the images are made of again after a change in pyproject.toml; ARGS=--upgrade for the newest
	$(BIN)/pip install --disable-pip-version-check --quiet uv==0.13.9
	$(BIN)/python k8s/tools/lock.py $(ARGS)

images: ## build the images with buildah, podman or docker, and print their sizes; ARGS="worker-cuda" for that one
	k8s/tools/images.sh $(ARGS)

images-test: $(VENV)/.dev images ## run the images from the chart with podman, and restart frontends under load
	$(BIN)/python -m pytest -m ops tests/images

cluster: $(VENV)/.dev ## install, upgrade and roll back the chart on a real Kubernetes API server, which is built first (slow)
	k8s/tools/build_kubernetes.sh
	$(BIN)/python -m pytest -m ops tests/cluster

clean: ## remove the virtual environment and caches
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache build *.egg-info
