# make demo: fine-tune a small model on this machine's CPU, and ask it who it is.  make demo-rl: improve one by rewards.
# make test: lint and tests.  make gpu: check, test and measure on one GPU, in ten minutes.
# Both need python3 (3.11 to 3.13) with venv, and nothing else; they install into .venv what is missing there.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed

# Several processes share this machine's cores in the tests and the demo.
export OMP_NUM_THREADS := 1
export TOKENIZERS_PARALLELISM := false
export HF_HUB_OFFLINE := 1
# Every process of a run would compile the package anew.
unexport PYTHONDONTWRITEBYTECODE

# What the libraries below megatune have a part in: the hub, tokenizers and templates, models, the engine, the command line.
STACK_TESTS := tests/install tests/hub tests/demo tests/bridge tests/verify tests/test_dependencies.py \
	tests/data/test_data_hub.py tests/data/test_data_encode.py tests/data/test_data_readers_refusals.py \
	$(wildcard tests/data/test_data_templates*.py) tests/data/test_media_positions.py tests/data/test_media_images.py \
	tests/faults/test_fault_tokenizers.py tests/plan/test_plan_flops.py tests/parity/test_parity.py \
	tests/parity/test_vision.py tests/parity/test_lora.py tests/parity/test_mtp.py tests/engine/test_patches.py \
	tests/engine/test_engine_step.py tests/engine/test_engine_weights.py tests/engine/test_moe_layer.py \
	tests/engine/test_moe_options.py
# A process that dies is named, with its test, and ends the run: xdist would start the test again.
XDIST := --dist loadfile --max-worker-restart=0
WORKERS ?= 2

.PHONY: help install demo demo-rl gpu site lint format test test-all test-faults test-newest test-oldest clean

help:
	@echo "make demo     fine-tune a small model on the CPU, and ask it who it is"
	@echo "make demo-rl  teach a small model two-digit addition by rewards, on the CPU"
	@echo "make gpu      check, test and measure on one GPU within ten minutes, and write gpu-report.txt"
	@echo "make test     lint and the tests, of products of cases as many as hold every value"
	@echo "make test-all the same with every case"
	@echo "make test-newest a covering part with the newest versions that pyproject.toml admits; test-oldest: the oldest"
	@echo "make test-faults every fault of docs/faults.md; MEGATUNE_WRITE_FAULTS=1 writes that page anew"
	@echo "make site     build the documents as a site, into out/site"
	@echo "make install  install into $(VENV)"
	@echo "make lint     ruff and mypy"
	@echo "make format   let ruff write the format that lint checks"
	@echo "make clean    remove what make demo wrote"

install: $(INSTALLED)

$(INSTALLED): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(v not in ((3, 11), (3, 12), (3, 13)) and \
		"megatune needs Python 3.11, 3.12 or 3.13; $(PYTHON) is %d.%d. Name another: make PYTHON=python3.12" % v)'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev,docs]'
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

# Kernels of one rank next to their plain references; see docs/gpu.md.
GPU_TESTS := tests/engine/test_attention.py tests/engine/test_moe_experts.py tests/engine/test_cross_entropy.py \
	tests/engine/test_rotary.py tests/engine/test_engine_adam.py tests/engine/test_fp8_products.py \
	tests/engine/test_transformer_engine.py

gpu: install
	@{ timeout 60 $(BIN)/megatune doctor; timeout 150 $(BIN)/python -m pytest -q -n 0 $(GPU_TESTS); \
		$(BIN)/python benchmarks/gpu_training.py --budget_s 360 --output; } 2>&1 | tee gpu-report.txt

site: install
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: install
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

test: lint
	$(BIN)/pytest -n 2 $(XDIST) --no-loadscope-reorder --covering

test-all: lint
	$(BIN)/pytest -n 2 $(XDIST) --no-loadscope-reorder

test-faults: install
	$(BIN)/pytest -n 2 $(XDIST) tests/faults

# An environment for each, with versions/*.txt over constraints.txt.
test-newest test-oldest: test-%:
	@test -x .venv-$*/bin/python || $(PYTHON) -m venv .venv-$*
	@awk -F== 'NR == FNR { own[tolower($$1)]; print; next } !(tolower($$1) in own)' \
		versions/$*.txt constraints.txt > .venv-$*/constraints.txt
	.venv-$*/bin/python -m pip install --quiet --disable-pip-version-check -c .venv-$*/constraints.txt \
		-e '.[modelscope]' pytest pytest-xdist hypothesis
	.venv-$*/bin/pytest -n $(WORKERS) $(XDIST) --no-loadscope-reorder --covering $(STACK_TESTS)

clean:
	rm -rf out
