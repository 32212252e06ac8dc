# Everything a person or CI runs. `make` alone lists it.

LORAPLEX_HOME ?= $(HOME)/.loraplex
export LORAPLEX_HOME

VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
MODEL = $(LORAPLEX_HOME)/models/gemma-3-270m
ADAPTERS = $(patsubst examples/adapters/%/,%,$(wildcard examples/adapters/*/))
ARGS ?=
# Two tests at a time: more would fill a small machine's memory with models.
PARALLEL := --numprocesses 2 --dist loadfile

# The first of these that is new enough and can make a virtual environment is taken.
PYTHONS := $(PYTHON) python3 python3.11 python3.12 python3.13 python3.14
FITS := import sys, ensurepip, venv; sys.exit(not (3, 11) <= sys.version_info < (3, 15))

.DELETE_ON_ERROR:
.PHONY: help install serve test test-slow test-gpu lint format lock bench bench-ops aot clean

help: ## List these commands
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/\1\t\2/p' Makefile | while IFS="$$(printf '\t')" read -r name text; do \
		printf '  make %-10s %s\n' "$$name" "$$text"; done

install: $(INSTALLED) ## Make .venv with the locked dependencies and this source tree in it

$(INSTALLED): pyproject.toml requirements.lock $(BIN)/python
	$(BIN)/python -m pip install --quiet "$$(grep '^uv==' requirements.lock)"
	$(BIN)/uv pip install --python $(BIN)/python --compile-bytecode --requirement requirements.lock
	$(BIN)/uv pip install --python $(BIN)/python --no-deps --no-build-isolation --editable .
	@touch $@

$(BIN)/python:
	@for python in $(PYTHONS); do \
		if "$$python" -c '$(FITS)' 2>/dev/null; then \
			echo "Making $(VENV) with $$("$$python" --version)"; exec "$$python" -m venv --clear $(VENV); fi; done; \
	echo "Loraplex needs Python 3.11 to 3.14 with its venv module, and found none of that kind." >&2; \
	for python in $(PYTHONS); do "$$python" -c 'import sys; print("  found", sys.executable, sys.version.split()[0])' 2>/dev/null; done >&2; \
	echo "On Debian and Ubuntu: apt install python3 python3-venv. Another one: make PYTHON=/path/to/python3.12" >&2; \
	exit 1

serve: install ## Serve Gemma 3 270M and the example adapters on port 8000 (more options: ARGS="--port 8080")
	$(BIN)/python examples/prepare_model.py "$(MODEL)"
	$(BIN)/loraplex serve --model "$(MODEL)" --served-model-name base \
		$(foreach name,$(ADAPTERS),--adapter $(name)=examples/adapters/$(name)) $(ARGS)

test: lint ## Run everything that must hold before a commit: lint, types, the everyday tests
	$(BIN)/pytest $(PARALLEL) -m "not gpu and not slow" $(ARGS)

test-slow: install ## Run the tests that are too long for every day
	$(BIN)/pytest -m "slow and not gpu" $(ARGS)

test-gpu: install ## Run on a GPU what can run there: kernels and engines; warnings of other libraries are let pass
	$(BIN)/pytest -m "gpu and not slow" -W default $(ARGS)

lint: install ## Check format, style and types, and print what has grown too large
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	@$(BIN)/python tests/meta/sizes.py

format: install ## Rewrite the sources in the house format
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

lock: install ## Resolve the dependencies anew into requirements.lock
	$(BIN)/uv pip compile --universal --python-version 3.11 --all-extras --upgrade --no-header \
		--constraint constraints.txt pyproject.toml --output-file requirements.lock

bench: install ## Measure the server on Gemma 3 270M (docs/benchmarks.md)
	$(BIN)/python examples/prepare_model.py "$(MODEL)"
	$(BIN)/python benchmarks/serving/run.py "$(MODEL)" $(ARGS)

bench-ops: install ## Time each native operation against what this machine can do
	$(BIN)/python benchmarks/ops/run.py $(ARGS)

aot: install ## Compile every Triton kernel for GPUs that are not here, and check what came out
	$(BIN)/python benchmarks/aot_check.py $(ARGS)

clean: ## Remove .venv, caches and build output
	rm -rf $(VENV) build dist src/*.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
