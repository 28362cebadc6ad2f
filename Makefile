# Everything runs from .venv, activated or not. Another Python: make setup PYTHON=python3.12
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

# Stamps: a set-up that is done is not done again; one that was interrupted has left none.
INSTALLED := $(VENV)/.installed
BUILT := $(VENV)/.kernels-built

# Extras to install beside the tools, with commas: make setup EXTRAS=cuda,bpe. CuPy comes by itself where there is an NVIDIA
# driver; EXTRAS= leaves it out. What is asked for later is installed then, and nothing is taken away.
comma := ,
space := $() $()
NVIDIA := $(or $(shell command -v nvidia-smi 2>/dev/null),$(wildcard /proc/driver/nvidia/version))
EXTRAS ?= $(if $(NVIDIA),cuda)
HAVE := $(if $(wildcard $(INSTALLED)),$(shell cat $(VENV)/.extras 2>/dev/null))
WANTED := $(sort $(HAVE) $(subst $(comma), ,$(EXTRAS)))

# What a study is reproduced with: make reproduce-mor SCALE=smoke SEEDS=0,1,2 ADDRESS=http://head:8265 RUNS=/shared/runs
# OUT=elsewhere is where reports lie, which of another store would otherwise take the place of this one's.
SCALE ?= cpu
SEEDS ?=
ADDRESS ?=
RUNS ?=
OUT ?=
STUDIES := mor nvfp4 gaussws
REPRODUCE := $(STUDIES:%=reproduce-%)
TO := $(if $(OUT),--out $(OUT))

# What GaussWS's report has besides trials: measured on this machine, so not where a cluster trains.
ON_GPU := $(filter gpu paper,$(SCALE))
TIMED_cpu := --model gpt2-nano,llama2-nano --eager 0
TIMED_gpu := --model gpt2-124m,llama2-134m,llama2-1b,llama2-3b --length 1024 --eager 0
MEASURE_gaussws = $(BIN)/fewbits bench train $(if $(ON_GPU),$(TIMED_gpu),$(TIMED_cpu)) --recipes gaussws,diffq --optimizers adamw,adam-mini --no-observer --once --store $(or $(RUNS),runs) || exit $$?; \
	$(BIN)/fewbits bench kernels --generators $(if $(ON_GPU),--device cuda) --once --store $(or $(RUNS),runs) || exit $$?;

.DEFAULT_GOAL := help
.PHONY: help setup more-extras test test-portable lint bench ui clean reproduce $(REPRODUCE)

help: ## Show this list
	@sed -n 's/^\([a-z0-9-]*\):.*## /  make \1	/p' $(firstword $(MAKEFILE_LIST)) | expand -t 26

setup: $(BUILT) ## Make .venv, install fewbits with its tools and EXTRAS, build the CPU kernels

test: lint ## Run everything CI runs: lint, types and all tests
	$(BIN)/python -m pytest --numprocesses 3 --dist loadfile --no-loadscope-reorder

test-portable: setup ## Run the tests that train under three instruction sets: this processor's own and two lower ones
	$(BIN)/python tests/portable.py --numprocesses 3 --dist loadfile --quiet

lint: setup ## Check style, format and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/clang-format --dry-run --Werror kernels/csrc/*.h kernels/csrc/*.cpp kernels/csrc/*.cu kernels/csrc/*.cuh tests/kernels/backends/simt/*

bench: setup ## Measure the kernels beside their peers
	$(BIN)/fewbits bench kernels

ui: setup ## Serve MLflow's page of runs/ on 127.0.0.1:5000
	$(BIN)/fewbits ui

reproduce-mor: ## Run what is missing of the MoR study, and write its report: SCALE, SEEDS, ADDRESS, RUNS, OUT
reproduce-nvfp4: ## The same of the NVFP4 study
reproduce-gaussws: ## The same of the GaussWS study; it also measures training and generators, once in a store

MEASURED = $(BIN)/fewbits sweep $$of; swept=$$?; if [ $$swept -gt 1 ]; then exit $$swept; fi; $(MEASURE_$*) \
	$(BIN)/fewbits report $$of $(TO); reported=$$?; if [ $$swept -ne 0 ]; then exit $$swept; fi; exit $$reported

# Trials that fail are named in the report too, which is made all the same; then the sweep's status is the end's.
$(REPRODUCE): reproduce-%: setup
	@of="study=$* scale=$(SCALE) $(if $(SEEDS),seeds=[$(SEEDS)]) $(if $(RUNS),--runs $(RUNS)) $(if $(ADDRESS),--address $(ADDRESS))"; \
	$(if $(if $(ADDRESS),,$(MEASURE_$*)),$(MEASURED),$(BIN)/fewbits report $$of $(TO) --sweep)

# One that fails does not keep the others from being made; what is there goes into the index.
reproduce: setup ## All studies, and one page with the verdicts of all papers
	@status=0; for study in $(STUDIES); do $(MAKE) --no-print-directory reproduce-$$study || status=$$?; \
	if [ $$status -gt 2 ]; then exit $$status; fi; done; \
	$(BIN)/fewbits report --index $(TO) || exit $$?; exit $$status

clean: ## Remove .venv, caches and build products; runs/ and reports/ stay
	rm -rf $(VENV) build dist src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# torch first and by itself: asked for together with packages that also want it, pip may settle on another build of it.
$(INSTALLED): pyproject.toml constraints.txt $(if $(filter-out $(HAVE),$(WANTED)),more-extras)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --no-compile --constraint constraints.txt torch
	$(BIN)/python -m pip install --no-compile --constraint constraints.txt --editable '.[$(subst $(space),$(comma),$(strip dev $(WANTED)))]'
	$(BIN)/python -m compileall -qq -j 0 $(VENV)/lib || true  # on all processors, where pip takes one
	@echo $(WANTED) > $(VENV)/.extras
	touch $@

$(BUILT): $(INSTALLED) kernels/backends/build.py $(wildcard kernels/csrc/*)
	$(BIN)/python -m fewbits.kernels.backends.build
	touch $@
