# Everything a contributor or a first visitor does. Needs Python 3.11 or newer and make, nothing else.
PYTHON ?= python3
VENV   ?= .venv
# Processes that share the tests: many tests wait more than they compute.
WORKERS ?= 2

BIN   := $(VENV)/bin
DEMO  := $(VENV)/.demo
DEV   := $(VENV)/.dev
SHARE := -n $(WORKERS) --dist loadgroup
PIP   := python -m pip install --disable-pip-version-check -c constraints.txt
IN    := PATH="$(abspath $(BIN)):$$PATH"

.DEFAULT_GOAL := help
.PHONY: help demo test test-all check pages bench clean

help:  ## lists these targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-8s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

demo: $(DEMO)  ## trains a small CNN on handwritten digits, on two ranks
	$(IN) coordd run -n 2 python examples/pytorch/digits.py

test: $(DEV)  ## runs the tests
	$(IN) python -m pytest $(SHARE) -m "not sweep"

test-all: $(DEV)  ## runs the tests, and the sweeps over everything of which the tests take a sample
	$(IN) python -m pytest $(SHARE)

check: $(DEV)  ## lints, checks types, layers and generated pages
	$(IN) ruff check
	$(IN) ruff format --check
	$(IN) mypy
	$(IN) lint-imports --no-logo
	$(IN) python -m coordd_tools.knob_table --check docs/knobs.md
	$(IN) python -m coordd_tools.compatibility --check docs/horovod-compatibility.md
	$(IN) python -m coordd_tools.pipeline_page --check docs/pipeline.md
	$(IN) python -m coordd_tools.named_tests docs/bad-input.md

pages: $(DEV)  ## writes the generated pages anew
	$(IN) python -m coordd_tools.knob_table docs/knobs.md
	$(IN) python -m coordd_tools.compatibility docs/horovod-compatibility.md
	$(IN) python -m coordd_tools.pipeline_page docs/pipeline.md

bench: $(DEV)  ## measures coordd beside its peers, all eight benchmarks
	for name in allreduce step tf idle memory startup sets pipeline; do $(IN) python -m coordd_tools.bench $$name || exit; done

clean:  ## removes the virtual environment, the caches and the builds
	rm -rf $(VENV) build dist .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -prune -exec rm -rf {} +

# The environment is made once, and again when what it should hold changes; first what the demo needs, then the rest.
$(DEMO): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "coordd needs Python 3.11 or newer, and '$(PYTHON)' is not. Name one: make $(MAKECMDGOALS) PYTHON=python3.11" >&2; \
	  exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(IN) $(PIP) -e ".[mpi,torch,pipeline,examples]"
	@touch $@

$(DEV): $(DEMO)
	$(IN) $(PIP) -e ".[mpi,torch,tensorflow-cpu,pipeline,tune,picture,examples,dev]"
	@touch $@
