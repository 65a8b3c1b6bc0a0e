# make run        install into a virtual environment, run configs/demo.py from its start to the closing table
# make test       the tests that are neither slow nor long: what matters, in minutes
# make test-slow  slower tests, which CI runs too; PARITY=1 installs torch and adds the comparisons with transformers;
#                 UNTIL=SECONDS (since the epoch) begins none after that, the most valuable ones first;
#                 ONLY=--lf runs what failed the last time
# make test-all   all tests: also further cases of others, and those that take minutes; PARITY=1 as above
# make lint       ruff check, ruff format --check, mypy
# make docs       the documentation as a site in site/, which is refused with a dead link in it
# make lock       renew the lock files: the newest versions that the requirements allow, with their hashes
#
# Environments are built from the lock files, every download checked by its hash; LOCKED= takes the newest versions that
# the requirements allow instead (make test LOCKED= PYTHON=python3.12 VENV=.venv-newest).

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# An NVIDIA driver answers nvidia-smi, a TPU VM has its accelerator devices; everything else is a CPU machine.
PLATFORM := $(shell if nvidia-smi -L >/dev/null 2>&1; then echo gpu; elif ls /dev/accel0 /dev/vfio/0 >/dev/null 2>&1; then echo tpu; else echo cpu; fi)
REQUIREMENTS := $(if $(filter gpu,$(PLATFORM)),requirements.txt,requirements-$(PLATFORM).txt)
LOCK := $(if $(filter cpu,$(PLATFORM)),requirements.lock,requirements-$(PLATFORM).lock)
LOCKED ?= yes
FLAGS := --quiet --disable-pip-version-check
INSTALLED := $(if $(LOCKED),--require-hashes -r $(LOCK),-r $(REQUIREMENTS))
INSTALLED_TEST := $(if $(LOCKED),--require-hashes -r requirements-test.lock,-r requirements-test.txt)
INSTALLED_DOCS := $(if $(LOCKED),--require-hashes -r requirements-docs.lock,-r requirements-docs.txt)
PARITY ?=
UNTIL ?=
ONLY ?=

.PHONY: run test test-all test-slow lint docs lock clean

run: $(VENV)/installed
	$(BIN)/python main.py --config configs/demo.py

# Two processes; one that has finished takes tests from the other. They share a compile cache that outlives the run
# (SPECRL_TEST_CACHE, by default below ~/.cache/specrl_jax/tests). Python's own cache is on:
# without it each process writes the assertions of all tests again, a dozen seconds.
PYTEST := PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -n 2 --dist worksteal

test: $(VENV)/installed-test
	$(PYTEST) -m "not slow and not long"

test-all: $(VENV)/installed-test $(if $(PARITY),$(VENV)/installed-parity)
	$(PYTEST)

test-slow: $(VENV)/installed-test $(if $(PARITY),$(VENV)/installed-parity)
	$(PYTEST) -m "slow and not long" $(if $(UNTIL),--dist loadfile --no-loadscope-reorder --until $(UNTIL)) $(ONLY)

lint: $(VENV)/installed-test
	$(BIN)/python -m ruff check .
	$(BIN)/python -m ruff format --check .
	$(BIN)/python -m mypy

# Needs no jax: docstrings are read, not imported. The variable silences an advertisement.
docs: $(VENV)/installed-docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --quiet
	@! grep -rE '<(script|link|img)[^>]* (src|href)="(https?:)?//' site --include=*.html || (echo "the site needs the network"; false)
	@echo "open site/index.html"

# The test tools take the versions of the lock that CI tests.
UV := $(BIN)/uv pip compile --quiet --universal --generate-hashes --no-annotate --no-header --python-version 3.11
lock: $(VENV)/installed-test
	$(BIN)/python -m pip install $(FLAGS) uv
	$(UV) --upgrade requirements-cpu.txt --output-file requirements.lock
	$(UV) --upgrade requirements.txt --constraints requirements.lock --output-file requirements-gpu.lock
	$(UV) --upgrade requirements-tpu.txt --constraints requirements.lock --output-file requirements-tpu.lock
	$(UV) --upgrade requirements-test.txt --constraints requirements.lock --output-file requirements-test.lock
	$(UV) --upgrade requirements-docs.txt --constraints requirements.lock --output-file requirements-docs.lock

clean:
	rm -rf $(VENV)

$(VENV)/installed: $(REQUIREMENTS) requirements-common.txt $(LOCK)
	@echo "installing packages into $(VENV): about a minute"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install $(FLAGS) $(INSTALLED)
	touch $@

$(VENV)/installed-test: $(VENV)/installed requirements-test.txt requirements-experiments.txt requirements-test.lock
	$(BIN)/python -m pip install $(FLAGS) $(INSTALLED_TEST)
	touch $@

$(VENV)/installed-docs: requirements-docs.txt requirements-docs.lock
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install $(FLAGS) $(INSTALLED_DOCS)
	touch $@

$(VENV)/installed-parity: $(VENV)/installed-test requirements-parity.txt
	$(BIN)/python -m pip install $(FLAGS) -r requirements-parity.txt
	$(BIN)/python -m pip install $(FLAGS) --no-deps trl==1.16.0  # for its chat templates, which nothing imports
	touch $@
