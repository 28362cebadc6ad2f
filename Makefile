# All commands use .venv, activated or not. To use another Python: make setup PYTHON=python3.12
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

# Stamp files mark finished set-up steps, which are not repeated. An interrupted step leaves no stamp.
INSTALLED := $(VENV)/.installed
BUILT := $(VENV)/.kernels-built

# Extras to install in addition to the tools, separated by commas: make setup EXTRAS=cuda,bpe. If there is an NVIDIA
# driver, the default is cuda (CuPy); EXTRAS= installs none. Later calls add extras, and remove none.
comma := ,
space := $() $()
NVIDIA := $(or $(shell command -v nvidia-smi 2>/dev/null),$(wildcard /proc/driver/nvidia/version))
EXTRAS ?= $(if $(NVIDIA),cuda)
HAVE := $(if $(wildcard $(INSTALLED)),$(shell cat $(VENV)/.extras 2>/dev/null))
WANTED := $(sort $(HAVE) $(subst $(comma), ,$(EXTRAS)))

# Options of a study: make reproduce-mor SCALE=smoke SEEDS=0,1,2 ADDRESS=http://head:8265 RUNS=/shared/runs
# BACKEND=local trains without Ray.
# OUT=DIR is the folder for reports. Reports of two stores have the same name: without OUT=, the later one replaces the
# earlier one.
SCALE ?= cpu
SEEDS ?=
ADDRESS ?=
BACKEND ?=
RUNS ?=
OUT ?=
STUDIES := mor nvfp4 gaussws primer
REPRODUCE := $(STUDIES:%=reproduce-%)
TO := $(if $(OUT),--out $(OUT))

# GaussWS's report also contains speeds measured on this machine; they are not measured if a cluster trains.
ON_GPU := $(filter gpu paper,$(SCALE))
TIMED_cpu := --model gpt2-nano,llama2-nano --eager 0
TIMED_gpu := --model gpt2-124m,llama2-134m,llama2-1b,llama2-3b --length 1024 --eager 0
MEASURE_gaussws = $(BIN)/fewbits bench train $(if $(ON_GPU),$(TIMED_gpu),$(TIMED_cpu)) --recipes gaussws,diffq --optimizers adamw,adam-mini --no-observer --once --store $(or $(RUNS),runs) || exit $$?; \
	$(BIN)/fewbits bench kernels --generators $(if $(ON_GPU),--device cuda) --once --store $(or $(RUNS),runs) || exit $$?;

.DEFAULT_GOAL := help
.PHONY: help setup more-extras test tests test-deep test-portable mutate lint style types bench measure-gpu ui clean reproduce $(REPRODUCE)

help: ## Show this list
	@sed -n 's/^\([a-z0-9-]*\):.*## /  make \1	/p' $(firstword $(MAKEFILE_LIST)) | expand -t 26

setup: $(BUILT) ## Create .venv, install fewbits with its tools and EXTRAS, build the CPU kernels

# Byte code is kept, even if the environment says otherwise: without it, each process compiles our modules again, and
# each of pytest's workers rewrites the assertions of all test files.
TESTS := PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest --numprocesses 3 --dist loadfile --no-loadscope-reorder

# Types and tests run in parallel, because the first tests wait for clusters to start.
test: style ## Run what CI runs: lint, types, and the tests with a few random examples of each law
	@$(MAKE) --no-print-directory --jobs=2 types tests

tests: setup
	$(TESTS)

test-deep: setup ## Run the tests with all examples, repeated kill scenarios and other long checks
	FEWBITS_TESTS=deep $(TESTS)

test-portable: setup ## Run the tests that train under three instruction sets: this processor's own and two older ones
	$(BIN)/python tests/portable.py --numprocesses 3 --dist loadfile --quiet

mutate: setup ## Insert errors into the sources, and count those that tests detect: docs/measured/mutation.md
	$(BIN)/python -m tests.mutate --write

lint: style types ## Check style, format and types

style: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/clang-format --dry-run --Werror kernels/csrc/*.h kernels/csrc/*.cpp kernels/csrc/*.cu kernels/csrc/*.cuh tests/kernels/backends/gpu/simt/* tests/kernels/backends/gpu/stub/*

types: setup
	$(BIN)/mypy

bench: setup ## Measure the speed and memory of the kernels and of other libraries
	$(BIN)/fewbits bench kernels

measure-gpu: setup ## On a machine with a GPU: parity, sanitizers, benchmarks and training, in docs/measured/cuda-kernels.md
	@$(BIN)/python -m tests.measure_gpu

ui: setup ## Show the trials of runs/ in MLflow, on 127.0.0.1:5000
	$(BIN)/fewbits ui

reproduce-mor: ## Run the missing trials of the MoR study and write its report: SCALE, SEEDS, BACKEND, ADDRESS, RUNS, OUT
reproduce-nvfp4: ## Do the same for the NVFP4 study
reproduce-gaussws: ## Do the same for the GaussWS study, and measure training and generators once per store
reproduce-primer: ## Do the same for the primer of number formats and mixed precision

MEASURED = $(BIN)/fewbits sweep $$of; swept=$$?; if [ $$swept -gt 1 ]; then exit $$swept; fi; $(MEASURE_$*) \
	$(BIN)/fewbits report $$of $(TO); reported=$$?; if [ $$swept -ne 0 ]; then exit $$swept; fi; exit $$reported

# If trials fail, the report is still written and names them; make then ends with the sweep's exit status.
$(REPRODUCE): reproduce-%: setup
	@of="study=$* scale=$(SCALE) $(if $(SEEDS),seeds=[$(SEEDS)]) $(if $(RUNS),--runs $(RUNS)) $(if $(ADDRESS),--address $(ADDRESS)) $(if $(BACKEND),--backend $(BACKEND))"; \
	$(if $(if $(ADDRESS),,$(MEASURE_$*)),$(MEASURED),$(BIN)/fewbits report $$of $(TO) --sweep)

# If a study fails, the others still run; the index contains the reports that exist.
reproduce: setup ## Reproduce all studies, and write one page with the verdicts of all papers
	@status=0; for study in $(STUDIES); do $(MAKE) --no-print-directory reproduce-$$study || status=$$?; \
	if [ $$status -gt 2 ]; then exit $$status; fi; done; \
	$(BIN)/fewbits report --index $(TO) || exit $$?; exit $$status

clean: ## Remove .venv, caches and build products, but not runs/ and reports/
	rm -rf $(VENV) build dist src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# torch is installed first and alone: together with packages that depend on it, pip may choose another build of it.
$(INSTALLED): pyproject.toml constraints.txt $(if $(filter-out $(HAVE),$(WANTED)),more-extras)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --no-compile --constraint constraints.txt torch
	$(BIN)/python -m pip install --no-compile --constraint constraints.txt --editable '.[$(subst $(space),$(comma),$(strip dev $(WANTED)))]'
	$(BIN)/python -m compileall -qq -j 0 $(VENV)/lib || true  # on all processors; pip would use one
	@echo $(WANTED) > $(VENV)/.extras
	touch $@

$(BUILT): $(INSTALLED) kernels/backends/build.py $(wildcard kernels/backends/compilation.py kernels/csrc/*)
	$(BIN)/python -m fewbits.kernels.backends.build
	touch $@
