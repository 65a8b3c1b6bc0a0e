# make run        install into a virtual environment, run the tiny config from its start to the closing table
# make test       the tests that are not slow: what matters, in minutes
# make test-all   all tests; PARITY=1 installs torch and adds the comparisons with transformers (to test-slow too)
# make test-slow  what test-all runs beyond test
# make lint       ruff check, ruff format --check, mypy
# make lock       write requirements.lock from the environment

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# An NVIDIA driver answers nvidia-smi, a TPU VM has its accelerator devices; everything else is a CPU machine.
PLATFORM := $(shell if nvidia-smi -L >/dev/null 2>&1; then echo gpu; elif ls /dev/accel0 /dev/vfio/0 >/dev/null 2>&1; then echo tpu; else echo cpu; fi)
REQUIREMENTS := $(if $(filter gpu,$(PLATFORM)),requirements.txt,requirements-$(PLATFORM).txt)
PARITY ?=

.PHONY: run test test-all test-slow lint lock clean

run: $(VENV)/installed
	$(BIN)/python main.py --config configs/rlzero_tiny.py

# Two processes; one that has finished takes tests from the other. They share a compile cache that outlives the run
# (SPECRL_TEST_CACHE, by default below ~/.cache/specrl_jax/tests).
PYTEST := $(BIN)/python -m pytest -n 2 --dist worksteal

test: $(VENV)/installed-test
	$(PYTEST) -m "not slow"

test-all: $(VENV)/installed-test $(if $(PARITY),$(VENV)/installed-parity)
	$(PYTEST)

test-slow: $(VENV)/installed-test $(if $(PARITY),$(VENV)/installed-parity)
	$(PYTEST) -m slow

lint: $(VENV)/installed-test
	$(BIN)/python -m ruff check .
	$(BIN)/python -m ruff format --check .
	$(BIN)/python -m mypy

lock: $(VENV)/installed-test
	$(BIN)/python -m pip freeze --exclude-editable > requirements.lock

clean:
	rm -rf $(VENV)

$(VENV)/installed: $(REQUIREMENTS) requirements-common.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r $(REQUIREMENTS)
	touch $@

$(VENV)/installed-test: $(VENV)/installed requirements-test.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements-test.txt
	touch $@

$(VENV)/installed-parity: $(VENV)/installed-test requirements-parity.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements-parity.txt
	touch $@
