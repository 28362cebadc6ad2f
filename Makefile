# All commands use the environment .venv, which need not be activated. To use another Python: make setup PYTHON=python3.12
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

# Stamp files: each marks a finished set-up step, so that the step is not repeated. An interrupted step leaves no file.
INSTALLED := $(VENV)/.installed
BUILT := $(VENV)/.kernels-built

# The extras of pyproject.toml to install besides `dev`, separated by commas: make setup EXTRAS=cuda,bpe. If there is an
# NVIDIA driver, the default is cuda (CuPy); EXTRAS= installs none. Later calls can add extras, but remove none.
comma := ,
space := $() $()
NVIDIA := $(or $(shell command -v nvidia-smi 2>/dev/null),$(wildcard /proc/driver/nvidia/version))
EXTRAS ?= $(if $(NVIDIA),cuda)
HAVE := $(if $(wildcard $(INSTALLED)),$(shell cat $(VENV)/.extras 2>/dev/null))
WANTED := $(sort $(HAVE) $(subst $(comma), ,$(EXTRAS)))

# Options of `make reproduce-…`, for example: SCALE=smoke SEEDS=0,1,2 ADDRESS=http://head:8265 RUNS=/shared/runs
# ADDRESS=: the Ray cluster that trains. BACKEND=local: train without Ray. RUNS=: the store.
# OUT=: the folder of reports. A report is named after its study and scale, so without another OUT= the report of a second
# store replaces that of the first.
SCALE ?= cpu
SEEDS ?=
ADDRESS ?=
BACKEND ?=
RUNS ?=
OUT ?=
STUDIES := mor nvfp4 gaussws primer
REPRODUCE := $(STUDIES:%=reproduce-%)
TO := $(if $(OUT),--out $(OUT))

# GaussWS's report also contains speeds of training and of noise generators, which MEASURE_gaussws measures on this
# machine. They are not measured if ADDRESS= names a cluster.
ON_GPU := $(filter gpu paper,$(SCALE))
TIMED_cpu := --model gpt2-nano,llama2-nano
TIMED_gpu := --model llama2-134m,llama2-1b,llama2-3b,llama2-70b-4l --batch 24,8,2,2 --length 2048  # those of Table 1
MEASURE_gaussws = $(BIN)/fewbits bench train $(if $(ON_GPU),$(TIMED_gpu),$(TIMED_cpu)) --recipes gaussws,diffq --optimizers adamw,adam-mini --once --store $(or $(RUNS),runs) || exit $$?; \
	$(BIN)/fewbits bench kernels --generators $(if $(ON_GPU),--device cuda) --once --store $(or $(RUNS),runs) || exit $$?;

.DEFAULT_GOAL := help
.PHONY: help setup more-extras test tests test-deep numerics lint style types bench measure-gpu wheel ui docs clean reproduce $(REPRODUCE)

help: ## Show this list
	@sed -n 's/^\([a-z0-9-]*\):.*## /  make \1	/p' $(firstword $(MAKEFILE_LIST)) | expand -t 26

setup: $(BUILT) ## Create .venv, install fewbits with its tools and EXTRAS, build the CPU kernels

# The empty PYTHONDONTWRITEBYTECODE makes Python keep byte code, whatever the caller's environment says. Without byte code,
# each process compiles fewbits' modules again, and each of pytest's workers rewrites the assertions of all test files.
TESTS := PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest --numprocesses 3 --dist loadfile --no-loadscope-reorder

# The type check and the tests run in parallel, because the first tests mostly wait for Ray clusters to start.
test: style ## Run what CI runs: lint, type check, and all tests, property tests with a tenth of their examples
	@$(MAKE) --no-print-directory --jobs=2 types tests

tests: setup
	$(TESTS)

test-deep: ## Run all tests with all random examples, and also the long tests marked `deep` (installs the extra oracles)
	@$(MAKE) --no-print-directory setup EXTRAS=$(subst $(space),$(comma),$(strip oracles $(subst $(comma), ,$(EXTRAS))))
	FEWBITS_TESTS=deep $(TESTS)

numerics: setup ## After edits of sources that compute: compare golden digests, and record the sources
	$(BIN)/python -m tests.record_numerics

lint: style types ## Check style and format (ruff, clang-format) and types (mypy)

style: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/clang-format --dry-run --Werror kernels/csrc/*.h kernels/csrc/*.cpp kernels/csrc/*.cu kernels/csrc/*.cuh tests/kernels/backends/gpu/simt/* tests/kernels/backends/gpu/stub/*

types: setup
	$(BIN)/mypy

bench: setup ## Measure the speed of the kernels, compared with other libraries
	$(BIN)/fewbits bench kernels

measure-gpu: setup ## Test and measure kernels and training on a GPU; write reports/gpu/results.md; QUICK=1: five minutes
	@$(BIN)/python -m tests.measure_gpu $(if $(QUICK),--quick)

docs: ## Build the site in build/site, and check its links; FEWBITS_DOCS=quick does not execute the tutorials
	@$(MAKE) --no-print-directory setup EXTRAS=$(subst $(space),$(comma),$(strip docs $(subst $(comma), ,$(EXTRAS))))
	$(BIN)/python -m sphinx -W --keep-going -q -b html docs build/site

wheel: setup ## Build dist/: the source archive, and a wheel with CPU kernels for all x86-64 processors
	$(BIN)/python -m pip install --quiet build twine
	rm -rf dist
	$(BIN)/python -m build
	$(BIN)/twine check --strict dist/*

ui: setup ## Start MLflow with the trials of the store runs/, on http://127.0.0.1:5000
	$(BIN)/fewbits ui

reproduce-mor: ## Run the unfinished trials of the study MoR, write its report; SCALE= SEEDS= BACKEND= ADDRESS= RUNS= OUT=
reproduce-nvfp4: ## Do the same for the study NVFP4
reproduce-gaussws: ## Do the same for the study GaussWS; also measure training and noise generators, once for each store
reproduce-primer: ## Do the same for the study primer (number formats and mixed precision)

MEASURED = $(BIN)/fewbits sweep $$of; swept=$$?; if [ $$swept -gt 1 ]; then exit $$swept; fi; $(MEASURE_$*) \
	$(BIN)/fewbits report $$of $(TO); reported=$$?; if [ $$swept -ne 0 ]; then exit $$swept; fi; exit $$reported

# If trials fail (exit status 1 of the sweep), the report is still written and lists them; the command then ends with
# the sweep's exit status. With a higher status (wrong input, Ctrl-C), no report is written.
$(REPRODUCE): reproduce-%: setup
	@of="study=$* scale=$(SCALE) $(if $(SEEDS),seeds=[$(SEEDS)]) $(if $(RUNS),--runs $(RUNS)) $(if $(ADDRESS),--address $(ADDRESS)) $(if $(BACKEND),--backend $(BACKEND))"; \
	$(if $(if $(ADDRESS),,$(MEASURE_$*)),$(MEASURED),$(BIN)/fewbits report $$of $(TO) --sweep)

# If a study fails, the other studies still run, and the index contains the reports that exist. A status above 2, such as
# that of Ctrl-C, ends the loop.
reproduce: setup ## Run and report all studies, and write an index page with the verdicts of all
	@status=0; for study in $(STUDIES); do $(MAKE) --no-print-directory reproduce-$$study || status=$$?; \
	if [ $$status -gt 2 ]; then exit $$status; fi; done; \
	$(BIN)/fewbits report --index $(TO) || exit $$?; exit $$status

clean: ## Remove .venv, caches and build products, but not runs/ and reports/
	rm -rf $(VENV) build dist src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# torch is installed first and alone: if pip installs torch together with packages that depend on it, it may choose
# another build of torch. The kernels, which link torch's OpenMP runtime, are then compiled in the background, and the rule
# of $(BUILT) waits for them.
$(INSTALLED): pyproject.toml constraints.txt $(if $(filter-out $(HAVE),$(WANTED)),more-extras)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --no-compile --constraint constraints.txt torch
	PYTHONPATH=src $(BIN)/python -m fewbits.kernels.backends.build > /dev/null 2>&1 &
	$(BIN)/python -m pip install --no-compile --constraint constraints.txt --editable '.[$(subst $(space),$(comma),$(strip dev $(WANTED)))]'
	$(BIN)/python -m compileall -qq -j 0 -x '/(tests|transformers/models|ray/rllib|pip|setuptools|jedi|sklearn|nltk|lm_eval/tasks|databricks|virtualenv)/' $(VENV)/lib || true  # on all processors
	@echo $(WANTED) > $(VENV)/.extras
	touch $@

$(BUILT): $(INSTALLED) kernels/backends/build.py $(wildcard kernels/backends/compilation.py kernels/csrc/*)
	$(BIN)/python -m fewbits.kernels.backends.build
	touch $@
