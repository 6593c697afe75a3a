# SPDX-License-Identifier: Apache-2.0
# A thin front of the CMake presets. `make help` lists the targets.

PREFIX ?= /usr/local
JOBS ?= $(shell nproc)
FUZZ_SECONDS ?= 60
EMULATE ?=
PYTHON := .venv/bin/python

# The demo compiles the CUDA kernels where there is a GPU for them: they take most of the time of a build.
DEMO_CUDA = $(shell { ls /dev/nvidia[0-9]* || nvidia-smi -L; } >/dev/null 2>&1 && echo AUTO || echo OFF)

# Lets ccache share objects between build folders and copies of the tree.
export CCACHE_BASEDIR := $(CURDIR)
export CCACHE_NOHASHDIR := 1

.DEFAULT_GOAL := help
.PHONY: help demo build test bench lint format sanitize emulate fuzz install clean setup setup-dev setup-fuzz

help:  ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 12

setup:
	@scripts/setup.sh build

setup-dev:
	@scripts/setup.sh dev

setup-fuzz:
	@scripts/setup.sh fuzz

demo: setup  ## a layer of a language model, quantized, checked and timed; a whole one where `make build` found PyTorch
	cmake --preset demo -DQUANTFUSE_CUDA=$(DEMO_CUDA)
	cmake --build --preset demo -j $(JOBS)
	build-demo/quantfuse demo
	@if $(PYTHON) -c 'import torch, quantfuse' 2>/dev/null; then \
	  $(PYTHON) -m quantfuse.bench.model --shape llama-160m --scheme int8,int4 --device cpu; fi

build: setup-dev  ## build/quantfuse, build/libquantfuse.so, the tests, and the Python package in .venv
	cmake --preset dev
	cmake --build --preset dev -j $(JOBS)
	$(PYTHON) python/link_into_venv.py

test: build  ## C++ tests, then Python tests
	ctest --preset dev -j $(JOBS)
	$(PYTHON) -m pytest -q tests/python

bench: build  ## speed on this machine; also against PyTorch where .venv has it (TORCH=1 puts it there)
	$(if $(TORCH),$(PYTHON) -m pip install --quiet torch)
	build/quantfuse bench --suite cpu --json build/bench.json
	@if $(PYTHON) -c 'import torch' 2>/dev/null; then \
	  $(PYTHON) bench/compare_torch.py --json build/bench-torch.json; \
	else echo "PyTorch is not in .venv: no comparison with it (make bench TORCH=1)"; fi

lint: setup-dev  ## format, types, and the rules of the code base
	scripts/lint.sh

format: setup-dev  ## put every source into its format
	scripts/lint.sh --fix

sanitize: setup-dev  ## the C++ tests under AddressSanitizer and UndefinedBehaviorSanitizer
	cmake --preset sanitize
	cmake --build --preset sanitize -j $(JOBS)
	ctest --preset sanitize -j $(JOBS)

emulate: setup-dev  ## the CUDA kernels on an emulated GPU (docs/emulator.md); needs nvcc and no GPU
	@if ! command -v nvcc >/dev/null && ! [ -x /usr/local/cuda/bin/nvcc ]; then echo "no nvcc here: nothing to emulate"; else \
	  set -ex; cmake --preset emulate; cmake --build --preset emulate -j $(JOBS); ctest --preset emulate -j $(JOBS) $(EMULATE); fi

fuzz: setup-fuzz  ## every reader of checkpoints against made-up files, for FUZZ_SECONDS (60)
	cmake --preset fuzz
	cmake --build --preset fuzz -j $(JOBS)
	tests/fuzz/run.sh build-fuzz $(FUZZ_SECONDS)

install: setup  ## library, headers, command, CMake package and pkg-config file into PREFIX
	cmake --preset release
	cmake --build --preset release -j $(JOBS)
	cmake --install build-release --prefix "$(PREFIX)"

clean:  ## remove what was built (not .venv)
	rm -rf build build-demo build-sanitize build-emulate build-fuzz build-release
