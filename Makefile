# make demo: a real model, served on an emulated chip, says one sentence.
# make test: every test. Both work in a clean clone; stamps in .venv make the second time fast.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# What is imported is compiled once and kept (--no-compile leaves the rest, 300 MB, alone).
unexport PYTHONDONTWRITEBYTECODE
plugin_sources := $(wildcard bridge/plugin/* bridge/plugin/ffi/*)

.PHONY: demo test test-originals install clean

demo: install
	$(BIN)/python -m launch.demo .demo

test: install .libtt/stamp
	$(BIN)/python -m pytest

# The kernels of the TPU serving stacks are asked what they answer; the answers are kept for `make test`.
# They need CPython 3.12, so their environment is one of its own.
PYTHON312 ?= python3.12
test-originals: .originals/stamp
	.originals/bin/python tests/originals/ask.py --write

.originals/stamp: requirements-originals.txt
	$(PYTHON312) -m venv .originals
	.originals/bin/python -m pip install --quiet --no-deps -r requirements-originals.txt
	touch $@

# The real compiler for silicon, which tests/libtt asks. Beside the environment and not in it:
# its own start-up file and JAX plugin would speak for a chip that is not there.
.libtt/stamp: requirements-libtt.txt | $(VENV)/project.stamp
	$(BIN)/python -m pip install --quiet --no-deps --upgrade --target .libtt -r requirements-libtt.txt
	touch $@

install: $(VENV)/project.stamp

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit("Python 3.11 or 3.12 is needed: make PYTHON=python3.11" if sys.version_info[:2] not in ((3, 11), (3, 12)) else 0)'
	$(PYTHON) -m venv $(VENV)

$(VENV)/requirements.stamp: requirements.txt | $(VENV)/bin/python
	$(BIN)/python -m pip install --quiet --no-compile --no-deps -r requirements.txt
	$(BIN)/python -m launch.torch_libraries
	touch $@

$(VENV)/project.stamp: $(VENV)/requirements.stamp pyproject.toml CMakeLists.txt $(filter-out %.so,$(plugin_sources))
	$(BIN)/python -m pip install --quiet --no-deps --no-build-isolation --editable .
	touch $@

clean:
	rm -rf build dist $(VENV) .libtt .originals .demo bridge/plugin/*.so
