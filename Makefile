# Two commands need nothing but Python ≥ 3.11 and make: `make train` and `make test`. The rest of the time, use
# `.venv/bin/python train.py ...` as README.md shows.

PYTHON ?= python3
VENV := .venv
INSTALLED := $(VENV)/.installed
TRAIN := train.py --config=configs/fsdp.py

.PHONY: train test test-topology test-cluster lint format lock clean

train: $(INSTALLED)
	@echo "python $(TRAIN)"
	@$(VENV)/bin/python $(TRAIN)

test: $(INSTALLED)
	$(VENV)/bin/python -m pytest -n 2 --dist loadgroup -q

# What each strategy sends on TPUs, compiled for a slice that is not there, and the tools with it. Installs the TPU
# compiler, for Linux on x86-64.
test-topology: $(INSTALLED)
	$(VENV)/bin/pip install --quiet --disable-pip-version-check --no-deps 'libtpu==0.0.42.*'
	$(VENV)/bin/python -m pytest -n 2 --dist loadgroup -q tests/analysis/test_topology.py tests/tools/test_with_tpu_compiler.py

# A real SLURM of one node on this machine, and a job that is requeued in mid-run; needs Debian, and root to install it.
test-cluster: $(INSTALLED)
	tests/cluster/slurm.sh

lint: $(INSTALLED)
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

format: $(INSTALLED)
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

$(INSTALLED): requirements.lock
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed, and $(PYTHON) is " + sys.version.split()[0] + "; name another with make PYTHON=...")'
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/pip install --quiet --disable-pip-version-check --require-hashes -r requirements.lock
	@touch $(INSTALLED)

# Writes requirements.lock anew from pyproject.toml, for every platform and Python version; needs `pip install uv`.
lock:
	uv pip compile pyproject.toml --extra dev --universal --fork-strategy fewest --python-version 3.11 --generate-hashes \
	  --no-emit-index-url --no-header --upgrade --output-file requirements.lock

clean:
	rm -rf $(VENV) .pytest_cache .ruff_cache .mypy_cache
