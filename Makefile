# Every target sets up .venv first (skipped when it is up to date) and uses nothing installed outside it.

PYTHON ?= $(shell for p in python3.11 python3.12 python3.13 python3; do \
	$$p -c 'import sys, venv, ensurepip; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' 2>/dev/null && echo $$p && break; done)
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

unexport PYTHONPATH
export PYTHONNOUSERSITE := 1

.PHONY: help setup demo test lint bench clean

help:
	@echo "make demo   continue a prompt and measure the packaged model's cache formats"
	@echo "make test   format, lint, types, tests with coverage: what CI runs"
	@echo "make lint   format, lint and types alone"
	@echo "make bench  time every stage on this machine's GPU"
	@echo "make clean  remove what the other targets made"

setup: $(VENV)/.stamp

# torch goes first and alone: it is most of the download, and a failure there is then plain to see
$(VENV)/.stamp: pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "Python 3.11 to 3.13 with venv is needed (Debian: apt install python3-venv)" >&2; exit 1; }
	$(PYTHON) -m venv --clear $(VENV)
	$(PIP) torch hatchling
	$(PIP) --no-build-isolation -e '.[dev,plot]'
	@touch $@

demo: setup
	$(BIN)/latentkv generate 'import os, sys' --tokens 160
	$(BIN)/latentkv eval --windows 1

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test: lint
	$(BIN)/pytest -n 2 --dist worksteal --cov=latentkv --cov-report=term:skip-covered --cov-fail-under=90

bench: setup
	$(BIN)/latentkv bench

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis .coverage .coverage.* htmlcov dist build
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
