# make demo: fine-tune a small model on this machine's CPU, and ask it who it is.  make demo-rl: improve one by rewards.
# make test: lint and tests.
# Both need python3 (3.11 or 3.12) with venv, and nothing else; they install into .venv what is missing there.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed

# Several processes share this machine's cores in the tests and the demo.
export OMP_NUM_THREADS := 1
export TOKENIZERS_PARALLELISM := false
export HF_HUB_OFFLINE := 1

.PHONY: help install demo demo-rl lint format test test-all test-faults clean

help:
	@echo "make demo     fine-tune a small model on the CPU, and ask it who it is"
	@echo "make demo-rl  teach a small model two-digit addition by rewards, on the CPU"
	@echo "make test     lint and the tests, of products of cases as many as hold every value"
	@echo "make test-all the same with every case"
	@echo "make test-faults every fault of docs/faults.md; MEGATUNE_WRITE_FAULTS=1 writes that page anew"
	@echo "make install  install into $(VENV)"
	@echo "make lint     ruff and mypy"
	@echo "make format   let ruff write the format that lint checks"
	@echo "make clean    remove what make demo wrote"

install: $(INSTALLED)

$(INSTALLED): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(v not in ((3, 11), (3, 12)) and \
		"megatune needs Python 3.11 or 3.12; $(PYTHON) is %d.%d. Name another: make PYTHON=python3.12" % v)'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

demo: install
	@test -f out/demo-model/config.json || $(BIN)/megatune demo-model --family qwen3 --output out/demo-model
	$(BIN)/megatune train examples/demo/demo.yaml model_name_or_path=out/demo-model output_dir=out/demo
	@$(BIN)/python examples/demo/ask.py out/demo --expect Tuna

demo-rl: install
	@rm -rf out/rl
	@$(BIN)/python examples/rl/make.py out/rl
	$(BIN)/megatune train examples/rl/warmup.yaml
	$(BIN)/megatune rl examples/rl/addition.yaml
	@$(BIN)/python examples/rl/result.py out/rl/grpo

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: install
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

test: lint
	$(BIN)/pytest -n 2 --dist loadfile --no-loadscope-reorder --covering

test-all: lint
	$(BIN)/pytest -n 2 --dist loadfile --no-loadscope-reorder

test-faults: install
	$(BIN)/pytest -n 2 --dist loadfile tests/faults

clean:
	rm -rf out
