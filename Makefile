# Everything starts here: `make lab` installs what is needed into .venv, once, and goes.
#
#   make lab      JupyterLab on the first notebook
#   make demo     a whole training in the terminal: 4 ranks, save, restore (RANKS=2 for two)
#   make test     lint and tests (T="tests/spec -k layout" for some of them)
#   make lint     ruff, pyright and the import rules
#   make soak     300 faults over a training (WORKBENCH_STORM_SEED=n for others)
#   make bench    one measurement as JSON lines, e.g. make bench B=startup
#   make clean    remove .venv
#
# PYTHON=... picks the interpreter, TORCH=cpu or TORCH=cuda the build of torch.

SHELL := /bin/sh
BIN := .venv/bin
READY := .venv/ready

# The first Python of 3.11 to 3.13 that can make a venv; else any newer one.
PYTHON ?= $(shell for want in '< (3, 14)' '< (4,)'; do \
	for name in python3 python3.13 python3.12 python3.11; do \
	$$name -c "import ensurepip, sys, venv; sys.exit(not (3, 11) <= sys.version_info $$want)" \
	2>/dev/null && echo $$name && exit; done; done)

# Without an NVIDIA GPU the CPU build: 0.2 GB instead of 3. macOS has one build for all.
TORCH ?= $(shell if [ "$$(uname)" = Linux ] && ! nvidia-smi -L >/dev/null 2>&1; \
	then echo cpu; else echo cuda; fi)
TORCH_VERSION := $(shell sed -n 's/^torch==//p' constraints.txt)
CPU_WHEELS := https://download.pytorch.org/whl/cpu
PIP := $(BIN)/python -m pip install -qq --disable-pip-version-check

RANKS ?= 4
T ?= tests
ROOT_MAY := $(shell [ "$$(id -u)" = 0 ] && echo --allow-root)

.PHONY: battery soak help install lab demo test lint bench clean

help:
	@sed -n 's/^#   //p' Makefile

install: $(READY)

$(READY): pyproject.toml constraints.txt
	@if [ -z "$(PYTHON)" ]; then \
		echo "No Python >= 3.11 with venv found. Debian: apt install python3 python3-venv;" \
		"macOS: brew install python@3.13. Or: make PYTHON=/path/to/python3" >&2; exit 1; fi
	@echo "Installing into .venv with $$($(PYTHON) --version), torch $(TORCH_VERSION) ($(TORCH))."
	@echo "This happens once and takes some minutes, most of them to download."
	@echo "1 of 3: the environment itself"
	@[ -x $(BIN)/python ] || $(PYTHON) -m venv .venv
	@echo "2 of 3: torch$(if $(filter cpu,$(TORCH)), (0.2 GB), comes with the rest)"
	@# --no-deps: the second index gives torch alone, everything else comes from the usual one.
	@[ "$(TORCH)" != cpu ] || $(PIP) --no-deps --retries 1 --timeout 20 \
		--extra-index-url $(CPU_WHEELS) "torch==$(TORCH_VERSION)+cpu" 2>.venv/torch.log || \
		echo "No CPU build of torch to be had (.venv/torch.log says why), taking the usual one."
	@echo "3 of 3: $(if $(filter cpu,$(TORCH)),,torch (up to 3 GB), )JupyterLab and all else"
	@$(PIP) --constraint constraints.txt "torch==$(TORCH_VERSION)" --editable '.[dev]'
	@echo "Installed."
	@touch $@

lab: $(READY)
	$(BIN)/jupyter lab --ip=127.0.0.1 $(ROOT_MAY) \
		--LabApp.default_url=/lab/tree/notebooks/01_first_training.ipynb

demo: $(READY)
	@$(BIN)/python -m workbench.demo -n $(RANKS)

lint: $(READY)
	@$(BIN)/ruff check --quiet .
	@$(BIN)/pyright >.venv/pyright.log || { cat .venv/pyright.log; exit 1; }
	@$(BIN)/lint-imports --no-cache >.venv/imports.log || { cat .venv/imports.log; exit 1; }
	@echo "lint: ruff, pyright and import rules passed"

test: lint
	$(BIN)/python -m pytest -q $(T)

battery: $(READY)
	$(BIN)/python -m pytest -q -m long $(T)

soak: $(READY)
	$(BIN)/python -m pytest -q -m soak tests/chaos

bench: $(READY)
	@[ -f "benchmarks/$(B).py" ] || { echo "make bench B=NAME, one of:" \
		$$(cd benchmarks && grep -l __main__ *.py | sed 's/\.py$$//'); exit 2; }
	@$(BIN)/python -m benchmarks.$(B)

clean:
	rm -rf .venv
