# make run    virtual environment, install, the tiny config from start to closing table
# make test   the whole suite; `make test PARITY=1` adds the comparisons with transformers (installs torch)
# make test-full  every cell of the engine's product, about 30 minutes of one core; writes tests/results
# make lock   writes requirements.lock from the environment

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# An NVIDIA driver answers nvidia-smi, a TPU VM has its accelerator devices; everything else is a CPU machine.
PLATFORM := $(shell if nvidia-smi -L >/dev/null 2>&1; then echo gpu; elif ls /dev/accel0 /dev/vfio/0 >/dev/null 2>&1; then echo tpu; else echo cpu; fi)
REQUIREMENTS := $(if $(filter gpu,$(PLATFORM)),requirements.txt,requirements-$(PLATFORM).txt)
PARITY ?=

.PHONY: run test test-full lock clean

run: $(VENV)/installed
	$(BIN)/python main.py --config configs/rlzero_tiny.py

# A file at a time to each of two processes: what a file compiles is compiled once.
test: $(VENV)/installed-test $(if $(PARITY),$(VENV)/installed-parity)
	$(BIN)/python -m pytest -n 2 --dist loadfile

# Programs of a few milliseconds: compiling them is what takes long.
test-full: $(VENV)/installed-test
	XLA_FLAGS=--xla_backend_optimization_level=0 $(BIN)/python -m pytest -m full

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
