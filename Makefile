# make demo, make test and make lint each set up what they need in .venv first.
# A plain `pip install torch` on Linux brings gigabytes of CUDA. For the CPU build give its index:
#   make demo TORCH_INDEX=https://download.pytorch.org/whl/cpu
PYTHON ?= python3
TORCH_INDEX ?=
BIN := .venv/bin

.PHONY: setup demo test lint clean

setup: .venv/.installed

.venv/.installed: requirements.lock pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit("Python 3.11 or newer is needed; name one with PYTHON=") if sys.version_info < (3, 11) else None'
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) -r requirements.lock
	$(BIN)/pip install --quiet --no-deps -e .
	touch $@

demo: setup
	BIN=$(BIN) demo/run.sh

test: setup
	$(BIN)/pytest -n 2

lint: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

clean:
	rm -rf .venv demo/out
