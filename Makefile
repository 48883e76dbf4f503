# make demo and make test do all the set-up on a fresh machine.
PYTHON ?= python3
VENV   ?= .venv
PY     := $(VENV)/bin/python
STAMP  := $(VENV)/.installed
ORACLES ?= .venv-oracles

.PHONY: setup demo test test-drafters test-runtime test-all oracles lint clean

setup: $(STAMP)

# deepspeed's own build imports torch and finds ninja on the path, so both come first and its build is not isolated.
$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PY) -m pip install -c constraints.txt torch setuptools wheel ninja
	PATH="$(CURDIR)/$(VENV)/bin:$$PATH" $(PY) -m pip install -c constraints.txt --no-build-isolation -e '.[dev]'
	touch $@

demo: setup
	$(PY) train.py

# The fast tests, in two processes side by side; test-all adds the slow ones, which want the machine to themselves.
test: setup
	$(MAKE) --no-print-directory -j 2 test-drafters test-runtime

test-drafters: setup
	$(PY) -m pytest -m "not slow and not gpu" tests/drafters $(wildcard tests/test_*.py)

test-runtime: setup
	$(PY) -m pytest -m "not slow and not gpu" tests/runtime

test-all: setup
	$(PY) -m pytest

# What other projects make of the exports. They are installed over Outrider's own packages and without what they ask for,
# as requirements.txt says; no other target needs them.
oracles: $(ORACLES)/.installed
	$(ORACLES)/bin/python -m pytest -m oracle tests/oracles

$(ORACLES)/.installed: $(STAMP) tests/oracles/requirements.txt
	$(PY) -m venv $(ORACLES)
	$(PY) -c 'import sysconfig; print("import site; site.addsitedir(%r)" % sysconfig.get_path("purelib"))' \
		> "$$($(ORACLES)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/outrider.pth"
	$(ORACLES)/bin/python -m pip install --no-deps -r tests/oracles/requirements.txt
	touch $@

lint: setup
	$(PY) -m ruff check .

clean:
	rm -rf $(VENV) $(ORACLES)
