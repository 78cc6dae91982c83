# Each target does all of its own set-up in .venv and may be interrupted and run again.
PYTHON ?= python3
FRAMEWORK ?= jax
DEMO_ARGS ?=
TEST_ARGS ?= -n 2
BENCH_ARGS ?=
VENV := .venv
CREATED := $(VENV)/created
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --disable-pip-version-check -qq
DEMO_READY := $(VENV)/ready-demo-$(FRAMEWORK)
DEV_READY := $(VENV)/ready-dev
DOCS_READY := $(VENV)/ready-docs
SETUP := pyproject.toml constraints.txt Makefile

.PHONY: demo test lint format bench docs clean
.DEFAULT_GOAL := demo

demo: $(DEMO_READY)
	$(BIN)/microbatch demo --framework $(FRAMEWORK) $(DEMO_ARGS)

test: lint
	$(BIN)/python -m pytest $(TEST_ARGS)

lint: $(DEV_READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyrefly check --summarize-errors

format: $(DEV_READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(DEV_READY)
	$(BIN)/python -m benchmarks $(BENCH_ARGS)

docs: $(DOCS_READY)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	@echo 'Wrote site/index.html'

clean:
	rm -rf $(VENV) site report.html .pytest_cache .ruff_cache

# The stamps are written last, so an interrupted installation is taken up again by the next run.
$(CREATED):
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "microbatch needs Python 3.11 or later; choose one with: make PYTHON=python3.11 $(MAKECMDGOALS)"; exit 1; }
	@echo "Setting up .venv (once; a few minutes the first time)"
	$(PYTHON) -m venv $(VENV)
	touch $@

$(DEMO_READY): $(SETUP) | $(CREATED)
	test -e $(DEV_READY) -a $(DEV_READY) -nt pyproject.toml -a $(DEV_READY) -nt constraints.txt || \
	  $(PIP) -c constraints.txt -e '.[demo,$(FRAMEWORK)]'
	touch $@

$(DEV_READY): $(SETUP) benchmarks/requirements.txt | $(CREATED)
	$(PIP) -c constraints.txt -e '.[dev]'
	$(PIP) --no-deps -r benchmarks/requirements.txt
	touch $@

$(DOCS_READY): $(DEV_READY)
	$(PIP) -c constraints.txt -e '.[dev,docs]'
	touch $@

