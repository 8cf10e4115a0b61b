# Each target sets up what it needs: a fresh machine needs Python 3.11 and make, nothing else.
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
TESTED := $(VENV)/.tested
DEPLOYED := tests/test_flare.py tests/test_flower.py tests/test_deploying_page.py

.PHONY: install demo test test-slow lint pages site clean

install: $(READY)

demo: $(READY)
	$(BIN)/fedminimax demo

test: $(TESTED)
	$(BIN)/python -m pytest -q -n 2 -m "not slow"

# Servers and sites that tests start have the machine to themselves.
test-slow: $(TESTED)
	$(BIN)/python -m pytest -q -n 2 -m slow $(addprefix --ignore=,$(DEPLOYED))
	$(BIN)/python -m pytest -q -m slow $(DEPLOYED)

lint: $(TESTED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

# The parts of the pages that come from the code. Set FEDMINIMAX_DATA to refresh what examples print with data sets.
pages: $(READY)
	$(BIN)/python docs/build.py

site: $(TESTED)
	$(BIN)/mkdocs build --strict

clean:
	rm -rf $(VENV) build dist site src/*.egg-info

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e .
	touch $@

$(TESTED): $(READY)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[test]"
	touch $@
