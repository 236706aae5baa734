# make serve     spindle serve: ARGS="--model FOLDER --port 8080", ARGS=--help for more
# make install   spindle with EXTRAS into .venv: sim (0.3 GB), advise, serve, convert (1.8 GB)
# make wheel     one wheel of all that serves, with these extras, into dist
# make help      these lines
# make format    what ruff can mend, in place
# make lint      ruff, mypy, import-linter; TensorRT need not be installed
# make check     lint, types, import contracts, fast unit and property tests: under a minute
# make test      the same and the everyday tests: under eight minutes
# make test-all  the rest: deliberate faults, many draws, restarts, the real model, training
# make vllm      vLLM's environment for --engine vllm: its CPU build, 4 GB into .venv-vllm
# make test-vllm vLLM behind Spindle's front, and the policy inside vLLM: 20 minutes
# make vllm-wheel  the same as a wheel of one import name, spindle_vllm, into dist
# make fleet     the environment of the Dynamo worker: .venv-fleet, 0.5 GB, half a minute
# make docs-pages  the pages of docs/reference and the config.pbtxt that the code writes
# make docs      the site of docs/ into build/site; index.html opens as a file
# make dev       the packages of tests and benches into .venv: 1.5 GB more
# make bench     the load sweep: ARGS="--quick --out FILE" for eight minutes, else a day
# make audit     look the pinned packages up among PyPI's advisories, over the network
# PYTHON         a Python 3.11 or 3.12 with a shared library, for .venv

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
DOCS := .venv-docs
FLEET := .venv-fleet
EXTRAS ?= sim
PINS := requirements.txt requirements-convert.txt

.PHONY: help dev serve install wheel format lint check test test-all vllm test-vllm vllm-wheel fleet docs-pages docs bench audit clean

serve: $(BIN)/spindle
	@exec $(BIN)/spindle serve $(ARGS)

install: | $(BIN)/python
	$(BIN)/pip install --quiet --disable-pip-version-check --editable '.[$(EXTRAS)]'

# build/lib is setuptools' own and would keep modules that are gone.
wheel:
	@rm -rf build/lib
	@$(PYTHON) -m pip wheel --quiet --no-deps --wheel-dir dist .
	@ls dist/spindle-*.whl

help:
	@sed -n 's/^# \(make \|PYTHON\)/\1/p' $(MAKEFILE_LIST)

format: $(VENV)/.lint
	$(BIN)/ruff check --fix --quiet .
	$(BIN)/ruff format .

lint: $(VENV)/.lint
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

check: lint $(VENV)/.test
	$(BIN)/pytest -q -m "not slow and not medium" tests/unit tests/property

test: lint $(VENV)/.test
	$(BIN)/pytest -m "not slow"

test-all: $(VENV)/.test $(DOCS)/.ready $(FLEET)/.ready
	$(BIN)/pytest -m slow

dev: $(VENV)/.test

fleet: $(FLEET)/.ready

docs-pages: $(VENV)/.lint
	$(BIN)/python -m docs.tools.reference

docs: $(DOCS)/.ready
	NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/mkdocs build --quiet --clean

bench: $(VENV)/.test
	$(BIN)/python -m backend.cli bench $(ARGS)

# torchvision and the like need not fit this torch, and text models need none of them.
VLLM := .venv-vllm
vllm: $(VLLM)/.vllm

test-vllm: $(VLLM)/.vllm $(VENV)/.test
	$(BIN)/pytest -n0 -m slow tests/server/test_vllm.py tests/server/test_vllm_small.py
	PYTHONPATH=$(CURDIR) $(VLLM)/bin/python -m pytest -o addopts=--import-mode=importlib \
		-W default -p no:cacheprovider tests/hosts

# By any Python with pip, that of vLLM's environment, too.
vllm-wheel:
	@$(PYTHON) -m engines_build.vllm_wheel

$(VLLM)/.vllm: tests/hosts/requirements.txt
	$(PYTHON) -m venv $(VLLM)
	$(VLLM)/bin/pip install --quiet --disable-pip-version-check -r $<
	$(VLLM)/bin/pip uninstall --quiet --yes torchvision torchaudio torchcodec
	@touch $@

$(VENV)/.serve: $(PINS) | $(BIN)/python
	@echo "spindle: installing the pinned packages into $(VENV), once: about 2 minutes;"
	@echo "spindle: 1.8 GB with a CPU build of torch, more with CUDA"
	$(BIN)/pip install --quiet --disable-pip-version-check $(PINS:%=-r %)
	@touch $@

# The command of this source tree: what is changed here is what it runs.
$(BIN)/spindle: $(VENV)/.serve
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable .

$(VENV)/.lint: requirements-dev.txt $(VENV)/.serve
	grep -Ev '^(-r|tensorrt)' $< > $@.txt
	$(BIN)/pip install --quiet --disable-pip-version-check $(PINS:%=-r %) -r $@.txt
	@touch $@

$(VENV)/.test: requirements-dev.txt $(VENV)/.lint
	$(BIN)/pip install --quiet --disable-pip-version-check -r requirements-dev.txt
	@touch $@

# An environment of its own: what draws the site is nothing that serves.
$(DOCS)/.ready: requirements-docs.txt | $(BIN)/python
	$(BIN)/python -m venv $(DOCS)
	$(DOCS)/bin/pip install --quiet --disable-pip-version-check --no-deps -r requirements-docs.txt
	@touch $@

# An environment of its own: Dynamo's versions are not those of what serves.
$(FLEET)/.ready: requirements-fleet.txt | $(BIN)/python
	$(BIN)/python -m venv $(FLEET)
	$(FLEET)/bin/pip install --quiet --disable-pip-version-check --no-deps -r requirements-fleet.txt
	@touch $@

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 12))' || \
		{ echo "spindle: error: Python 3.11 or 3.12 is needed, PYTHON=$(PYTHON) is $$($(PYTHON) -V 2>&1): try make PYTHON=python3.11" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

# --strict: a package that could not be looked up is a failure, not silence.
audit: $(BIN)/python
	$(BIN)/python -m venv build/audit
	build/audit/bin/pip install --quiet --disable-pip-version-check pip-audit==2.10.1
	build/audit/bin/pip-audit --strict --no-deps --disable-pip $(PINS:%=-r %)

clean:
	rm -rf $(VENV) $(VLLM) $(DOCS) $(FLEET) build dist .run *.egg-info
