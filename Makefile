# `make demo` shows kvfold at work, `make test` tests it; both install what they need, once.
# Afterwards neither needs the network. Choose the interpreter with `make PYTHON=/path/to/python`.

VENV ?= .venv
CONSTRAINTS ?= constraints.txt
WORKERS ?= 2
DEMO ?= kvfold-demo
BENCH ?= kvfold-bench

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install -qq
MADE := $(VENV)/.kvfold-made
INSTALLED := $(VENV)/.kvfold-installed
TOOLS := $(VENV)/.kvfold-tools
HARNESS := $(VENV)/.kvfold-harness
PAGES := $(VENV)/.kvfold-docs

export PIP_DISABLE_PIP_VERSION_CHECK := 1
export PYRIGHT_PYTHON_IGNORE_WARNINGS := 1

# The first interpreter that starts, is 3.10 to 3.13 and can make environments; else a newer python3.
CANDIDATES := $(or $(PYTHON),python3 python3.13 python3.12 python3.11 python3.10)
USABLE := import ensurepip, sys, venv; sys.exit(not (3, 10) <= sys.version_info < (3, int(sys.argv[1])))
define find_python
for limit in 14 99; do for candidate in $(CANDIDATES); do \
	if "$$candidate" -c '$(USABLE)' $$limit >/dev/null 2>&1; then echo "$$candidate"; exit; fi; \
done; done
endef

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo test test-full test-oldest lint docs bench results results-quick install harness model clean

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/make \1|\2/p' Makefile | while IFS='|' read -r target text; do \
		printf '%-20s%s\n' "$$target" "$$text"; done

demo: $(INSTALLED) ## answer a long document with the full cache and smaller ones, side by side
	@$(BIN)/kvfold compare --out $(DEMO)

test: $(TOOLS) model ## run the test suite on tiny models and on the default model
	@$(BIN)/python -m pytest -q -n $(WORKERS)

test-full: $(TOOLS) model ## the same with the slow tests
	@$(BIN)/python -m pytest -q -n $(WORKERS) -m ""

test-oldest: ## run the test suite on the lowest supported transformers
	@$(MAKE) --no-print-directory VENV=.venv-oldest CONSTRAINTS=constraints-oldest.txt test

lint: $(TOOLS) ## check style, formatting and types
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/pyright --pythonpath $(BIN)/python

docs: $(PAGES) ## build the documentation into build/site, links and references checked
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

bench: $(INSTALLED) ## measure decode and prefill against the full cache
	@$(BIN)/kvfold bench decode --out $(BENCH)
	@$(BIN)/kvfold bench prefill --out $(BENCH)

results-quick: $(INSTALLED) model ## make the record in results/quick anew, and the README's table of it
	@BIN=$(abspath $(BIN)) bench/results.sh quick

results: $(INSTALLED) model ## make everything in results/ anew: hours
	@BIN=$(abspath $(BIN)) bench/results.sh all

install: $(TOOLS) ## make the environment, with the tools for tests and linting

harness: $(HARNESS) ## add lm-evaluation-harness (700 MB) to it, whose model `make test` then tests too

clean: ## remove the environments, caches and results; the default model stays
	@rm -rf .venv .venv-oldest .pytest_cache .ruff_cache .hypothesis build dist $(DEMO) $(BENCH)
	@find src tests -name __pycache__ -type d -prune -exec rm -rf {} +

model: $(INSTALLED)
	@$(BIN)/kvfold models fetch >/dev/null

$(MADE):
	@python=$$($(find_python)); if [ -z "$$python" ]; then \
		echo "kvfold: no Python from 3.10 with its venv module among: $(CANDIDATES);" \
			"install one, or run make PYTHON=/path/to/python" >&2; exit 2; fi; \
	echo "kvfold: making $(VENV) with $$("$$python" --version)"; \
	"$$python" -m venv --clear $(VENV)
	@touch $@

# torch comes first and by itself: nothing else may choose its version or build.
$(INSTALLED): pyproject.toml $(CONSTRAINTS) | $(MADE)
	@echo "kvfold: installing torch"
	@$(PIP) "$$(grep '^torch==' $(CONSTRAINTS))"
	@echo "kvfold: installing kvfold and its dependencies"
	@$(PIP) -c $(CONSTRAINTS) -e .
	@touch $@

$(TOOLS): $(INSTALLED)
	@echo "kvfold: installing the tools for tests and linting"
	@$(PIP) -c $(CONSTRAINTS) -e ".[dev]"
	@touch $@

$(PAGES): $(TOOLS)
	@echo "kvfold: installing the tools for the documentation"
	@$(PIP) -c $(CONSTRAINTS) -e ".[docs]"
	@touch $@

$(HARNESS): $(TOOLS)
	@echo "kvfold: installing lm-evaluation-harness"
	@$(PIP) -c $(CONSTRAINTS) -e ".[harness]"
	@touch $@
