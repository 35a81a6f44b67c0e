# `make demo` and `make test` do all set-up themselves, in .venv, and do it again only when its inputs change.
# Every step leaves its stamp only after it succeeded, so an interrupted set-up goes on where it stopped.

ifeq ($(filter 4.% 5.%,$(MAKE_VERSION)),)
$(error GNU make 4 or newer is needed, this is $(MAKE_VERSION))
endif

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

# PYTHON=/path/to/python3.12 chooses the interpreter of a new .venv; otherwise the first suitable one of these.
PYTHON_NAMES := $(or $(PYTHON),python3.11 python3.12 python3 python)
CXX ?= g++
MIN_GXX := 11
MIN_FREE_GB := 10

VENV := .venv
STAMPS := $(VENV)/.stamps
BIN := $(VENV)/bin
PY := $(BIN)/python
PIP := $(PY) -m pip
MODELS := $(or $(INPLACEKV_MODELS),.models)
SMALL_MODELS := qwen3_moe mixtral deepseek_v2 deepseek_v2_yarn deepseek_v4 smollm2

export HF_HUB_OFFLINE := 1
export PIP_DISABLE_PIP_VERSION_CHECK := 1
export PIP_NO_INPUT := 1
export PIP_ROOT_USER_ACTION := ignore

CXX_SOURCES = $(shell find cpu_attn -name '*.cpp' -o -name '*.h' -o -name '*.hpp' -o -name '*.inc' 2>/dev/null)
CXX_TESTS = $(shell find tests -name '*.cpp' -o -name '*.h' -o -name '*.hpp' 2>/dev/null)

, := ,
say = @printf '\033[1m==> %s\033[0m\n' $(1)

.PHONY: help demo test lint format bench fuzz fuzz-arm gpu-test gpu-bench setup clean distclean FORCE

help:  ## list the targets
	@awk -F':.*## ' '/^[a-z-]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: setup  ## run the demo on the CPU (sets everything up first)
	$(PY) examples/demo.py

TESTS ?= tests
test: setup  ## run all tests (sets everything up first); TESTS=path and ARGS="-k name" narrow them
	$(PY) -m pytest $(TESTS) $(ARGS)

bench: $(STAMPS)/project  ## measure the attention kernels on this machine
	$(PY) -m cpu_attn.bench $(ARGS)

FUZZ := build/fuzz
fuzz: $(STAMPS)/requirements  ## random inputs through the attention kernels, under sanitizers; ARGS="600 7": seconds, first seed
	$(BIN)/cmake -S . -B $(FUZZ) -G Ninja -DCPU_ATTN_FUZZ=ON -DCMAKE_MAKE_PROGRAM=$(abspath $(BIN))/ninja >/dev/null
	$(BIN)/cmake --build $(FUZZ)
	$(FUZZ)/cpu_attn_fuzz $(or $(ARGS),60)

# The leak checker traces its own process, which the emulator does not let it.
FUZZ_ARM := build/fuzz-arm
fuzz-arm: $(STAMPS)/requirements  ## the same through the NEON kernel, emulated (on Debian: g++-aarch64-linux-gnu qemu-user)
	$(BIN)/cmake -S . -B $(FUZZ_ARM) -G Ninja -DCPU_ATTN_FUZZ=ON -DCMAKE_MAKE_PROGRAM=$(abspath $(BIN))/ninja \
	  -DCMAKE_SYSTEM_NAME=Linux -DCMAKE_SYSTEM_PROCESSOR=aarch64 -DCMAKE_CXX_COMPILER=aarch64-linux-gnu-g++ >/dev/null
	$(BIN)/cmake --build $(FUZZ_ARM)
	ASAN_OPTIONS=detect_leaks=0 qemu-aarch64 -L /usr/aarch64-linux-gnu $(FUZZ_ARM)/cpu_attn_fuzz $(or $(ARGS),60)

# A GPU host may have no network: GPU_PYTHON=python3 names an interpreter that has what is needed, and nothing is set up.
GPU_PY := $(or $(GPU_PYTHON),$(PY))
ifneq ($(filter gpu-%,$(MAKECMDGOALS)),)
GPU_SETUP := $(shell $(GPU_PY) -c 'import sys, importlib.util as u; sys.exit(u.find_spec("sglang") is None)' 2>/dev/null || echo setup)
ifneq ($(and $(GPU_PYTHON),$(GPU_SETUP)),)
$(error GPU_PYTHON=$(GPU_PYTHON) has no SGLang)
endif
endif

gpu-test: $(GPU_SETUP)  ## run the tests that need a CUDA GPU; GPU_PYTHON=python3 uses an interpreter that has SGLang
	$(GPU_PY) -m pytest -m gpu tests $(ARGS)

gpu-bench: $(GPU_SETUP)  ## measure on a CUDA GPU (see benchmarks/README.md); ARGS="--only fits" for some of it
	$(GPU_PY) -m benchmarks.gpu $(ARGS)

lint: $(STAMPS)/requirements  ## check style, types and spelling; change nothing
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/codespell
	$(if $(CXX_SOURCES),$(BIN)/clang-format --dry-run -Werror $(CXX_SOURCES) $(CXX_TESTS))

format: $(STAMPS)/requirements  ## rewrite the sources in the project's style
	$(BIN)/ruff check --fix --quiet . || true
	$(BIN)/ruff format .
	$(if $(CXX_SOURCES),$(BIN)/clang-format -i $(CXX_SOURCES) $(CXX_TESTS))

setup: $(STAMPS)/project $(MODELS)/.prepared  ## only the set-up: .venv, the compiled library, small checkpoints

clean:  ## remove what was built here, caches and checkpoints; keep .venv
	rm -rf build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis $(STAMPS)/project .models
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +

distclean: clean  ## remove .venv as well
	rm -rf $(VENV)

$(STAMPS)/venv:
	$(call say,"set-up 1/4: virtual environment in $(VENV)")
	@found=; for name in $(PYTHON_NAMES); do \
	  if "$$name" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 13))' 2>/dev/null; \
	  then found="$$name"; break; fi; done; \
	[ -n "$$found" ] || { echo "error: Python 3.11 or 3.12 is needed (tried: $(PYTHON_NAMES)); set PYTHON=/path/to/python" >&2; exit 1; }; \
	[ -x $(PY) ] && $(PY) -c '' 2>/dev/null || rm -rf $(VENV); \
	"$$found" -m venv $(VENV) || { echo "error: $$found cannot make a virtual environment (on Debian: apt install python3-venv)" >&2; exit 1; }; \
	$(PY) --version
	@mkdir -p $(STAMPS) && touch $@

# SGLang's own metadata asks for a hundred CUDA packages that a CPU host cannot use. So: torch with its dependencies,
# the closure of the rest without, everything at the version named in requirements/.
$(STAMPS)/requirements: $(STAMPS)/venv requirements/cpu.txt requirements/test.txt
	@$(PY) -c 'import torch' 2>/dev/null || { \
	  free_gb=$$(( $$(df -Pk . | awk 'NR == 2 { print $$4 }') / 1048576 )); \
	  [ $$free_gb -ge $(MIN_FREE_GB) ] || { echo "error: $(MIN_FREE_GB) GB of disk are needed, $$free_gb GB are free" >&2; exit 1; }; }
	$(call say,"set-up 2/4: torch (first time: 3 GB to download; 1 to 10 minutes)")
	$(PIP) install -c requirements/cpu.txt torch torchvision
	$(call say,"set-up 2/4: SGLang$(,) test and build tools (first time: 1 to 3 minutes)")
	$(PIP) install --no-deps -r requirements/cpu.txt -r requirements/test.txt
	@touch $@

# An editable install sees edits of Python files at once; it has to be renewed when files come, go or move.
$(STAMPS)/python-files: FORCE | $(STAMPS)/venv
	@find sglang_inplacekv cpu_attn sparse_attn models -name '*.py' 2>/dev/null | LC_ALL=C sort > $@.new
	@cmp -s $@.new $@ && rm $@.new || mv $@.new $@

$(STAMPS)/project: $(STAMPS)/requirements $(STAMPS)/python-files pyproject.toml CMakeLists.txt $(CXX_SOURCES)
	@major=$$($(CXX) -dumpversion 2>/dev/null | cut -d. -f1); \
	[ -n "$$major" ] || { echo "error: no C++ compiler: $(CXX) does not run (g++ $(MIN_GXX) or newer is needed)" >&2; exit 1; }; \
	$(CXX) --version | grep -qi clang || [ "$$major" -ge $(MIN_GXX) ] || \
	{ echo "error: $(CXX) $$major is too old: g++ $(MIN_GXX) or newer is needed" >&2; exit 1; }
	$(call say,"set-up 3/4: compile and install this project (editable)")
	$(PIP) install -v --no-build-isolation --no-deps -e .
	@touch $@

$(MODELS)/.prepared: $(STAMPS)/requirements $(wildcard models/*.py) | $(STAMPS)/project
	$(call say,"set-up 4/4: small checkpoints in $(MODELS)")
	@for kind in $(SMALL_MODELS); do $(PY) -m sglang_inplacekv.models $$kind; done
	@touch $@
