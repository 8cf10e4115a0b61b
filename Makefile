# Each target sets up what it needs: a fresh machine needs Python 3.11 and make, nothing else.
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
# Tests start hundreds of processes: none of them compiles what another has.
export PYTHONDONTWRITEBYTECODE :=
READY := $(VENV)/.ready
TESTED := $(VENV)/.tested
DEPLOYED := tests/remote/test_flare.py tests/remote/test_flower.py tests/docs/test_deploying_page.py

.PHONY: install demo test test-slow test-full lint pages site release clean

install: $(READY)

demo: $(READY)
	$(BIN)/fedminimax demo

test: $(TESTED)
	$(BIN)/python -m pytest -q -n 2 --dist worksteal -m "not slow and not full"

# Servers and sites that tests start have the machine to themselves.
test-slow: $(TESTED)
	$(BIN)/python -m pytest -q -n 2 --dist worksteal -m "slow and not full" $(addprefix --ignore=,$(DEPLOYED))
	$(BIN)/python -m pytest -q -m "slow and not full" $(DEPLOYED)

# What takes an hour: not asked of every change.
test-full: $(TESTED)
	$(BIN)/python -m pytest -q -n 2 --dist worksteal -m full $(addprefix --ignore=,$(DEPLOYED))
	$(BIN)/python -m pytest -q -m full $(DEPLOYED)

lint: $(TESTED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

# The parts of the pages that come from the code. Set FEDMINIMAX_DATA to refresh what examples print with data sets.
pages: $(READY)
	$(BIN)/python docs/build.py

site: $(TESTED)
	$(BIN)/mkdocs build --strict

# What a release consists of: the wheel, and a list of all that an installation brings, in CycloneDX.
release: $(TESTED)
	rm -rf dist build && $(BIN)/python -m pip wheel --quiet --no-deps -w dist .
	$(BIN)/python -m twine check --strict dist/*
	$(PYTHON) -m venv build/plain && build/plain/bin/pip install --quiet -c constraints.txt dist/*.whl
	$(PYTHON) -m venv build/sbom && build/sbom/bin/pip install --quiet cyclonedx-bom
	build/sbom/bin/cyclonedx-py environment --output-reproducible -o dist/sbom.json build/plain/bin/python

clean:
	rm -rf $(VENV) build dist site src/*.egg-info

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e .
	touch $@

$(TESTED): $(READY)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[test]"
	touch $@
