# Two commands:  make demo  shows that it works,  make test  runs everything that CI runs.
# Both set up .venv first: pinned dependencies (requirements/) and this package, built in place.

PYTHON ?= python3
VENV   := .venv
PY     := $(VENV)/bin/python
# Python compiles what is imported, which is a small part of the packages.
INSTALL := $(PY) -m pip --disable-pip-version-check install --no-compile

SOURCES := setup.py pyproject.toml $(wildcard csrc/*.[ch] csrc/*/*.[ch] csrc/*/*.def)

.PHONY: demo test bench wheel package clean

# TORCH_INDEX names the package index of torch, such as https://download.pytorch.org/whl/cpu.
TORCH_INDEX ?=

demo: $(VENV)/package
	$(PY) -m flash_attn
	$(PY) benchmarks/minilm.py

# MALLOC_PERTURB_ fills fresh memory with rubbish, so that a row that nobody wrote shows. The tests start hundreds of
# processes. So Python keeps what it has compiled, even if the environment says that it should not.
test: $(VENV)/package $(VENV)/test
	PYTHONDONTWRITEBYTECODE= MALLOC_PERTURB_=181 $(PY) -m pytest -n auto --dist worksteal $(TESTS)

bench: $(VENV)/package
	$(PY) benchmarks/bench_cpu.py
	$(PY) benchmarks/bench_host.py
	$(PY) benchmarks/minilm.py

# Wheels of both packages for other machines, in dist/ (docs/install.md). The last command installs and checks them.
wheel: $(VENV)/package $(VENV)/test $(VENV)/wheel
	$(PY) requirements/wheels.py --out dist
	FLASH_ATTN_WHEELS=dist $(PY) -m pytest tests/guards/test_wheels.py
	$(PY) -m twine check --strict dist/*.whl

package: $(VENV)/package

$(VENV)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	    { echo "The pinned demo and test packages need Python 3.11 or newer: make PYTHON=python3.12 ..."; exit 1; }
	@$(PYTHON) -c 'import ensurepip' || { echo "No venv in this Python: apt-get install python3-venv"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	touch $@

$(VENV)/torch: requirements/torch.txt requirements/demo.txt | $(VENV)/python
	$(PY) requirements/announce.py $(TORCH_INDEX)
	$(INSTALL) $(TORCH_INDEX:%=--index-url %) -c requirements/demo.txt -r requirements/torch.txt
	touch $@

$(VENV)/demo: requirements/demo.txt $(VENV)/torch
	$(INSTALL) --no-deps -r requirements/demo.txt
	touch $@

$(VENV)/test: requirements/test.txt $(VENV)/demo
	$(INSTALL) --no-deps -r requirements/test.txt
	touch $@

$(VENV)/wheel: requirements/wheel.txt $(VENV)/test
	$(INSTALL) --no-deps -r requirements/wheel.txt
	touch $@

$(VENV)/package: $(SOURCES) $(VENV)/demo
	$(INSTALL) --no-deps --no-build-isolation -e .
	touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info *.so flash_attn/cubins demo benchmarks/out
	rm -rf hopper/build hopper/dist hopper/*.egg-info hopper/flash_attn_3/*.so hopper/flash_attn_3/cubins tests/c/build
