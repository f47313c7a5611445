# Two commands need nothing but Python 3.11, 3.12 or 3.13 and make: `make train` and `make test`. The rest of the time,
# use `.venv/bin/python train.py ...` as docs/commands.md shows.
#
# The Python version chooses the stack: 3.11 the last jax made for it, 3.12 and later the newest. To have both side by
# side, give the second an environment of its own: `make test PYTHON=python3.13 VENV=.venv-3.13`.

PYTHON ?= python3
VENV ?= .venv
INSTALLED := $(VENV)/.installed
COMPILERS := $(VENV)/.compilers
EMULATORS := $(VENV)/.emulators
# Python writes bytecode, whatever the environment says. Otherwise each process of a test would compile all sources again.
PYTEST := PYTHONDONTWRITEBYTECODE= $(VENV)/bin/python -m pytest -n 2 --dist worksteal -q
LOCK := uv pip compile --universal --fork-strategy requires-python --python-version 3.11 --generate-hashes \
  --no-emit-index-url --no-header --constraint requirements.lock
TRAIN := train.py --config=configs/fsdp.py

.PHONY: train test test-all test-topology test-cluster upgrade-check accelerator site lint format lock lock-others sbom fuzz clean

train: $(INSTALLED)
	@echo "python $(TRAIN)"
	@$(VENV)/bin/python $(TRAIN)

# Each promise of README.md once, in a few minutes. Fails if it compiles more programs than `test_programs` in
# pyproject.toml, so that it stays short (tests/budget.py).
test: $(INSTALLED)
	$(PYTEST) -m "not full"

# Everything: `make test`, then what is left of the suite, with both compilers and the emulators of buckets.
test-all: test $(COMPILERS) $(EMULATORS)
	$(PYTEST) -m full

# Compiles every strategy for a TPU slice and for a host of GPUs, and compares what it sends with theory; also tests the
# tools that use the TPU compiler. `make test-all` includes it.
test-topology: $(COMPILERS)
	$(PYTEST) tests/lab/analysis/test_topology.py tests/lab/analysis/test_gpu_topology.py \
	  tests/lab/analysis/test_accelerator_programs.py tests/tools/test_with_tpu_compiler.py

# A real SLURM of two nodes on this machine, and jobs that are hurt and requeued; needs Debian, and root to install it.
test-cluster: $(INSTALLED)
	tests/cluster/slurm.sh

# Compiles some steps for CPUs, TPUs and GPUs with the jax of each environment that is there, and fails if the newest one
# needs over a tenth more than the record says. RECORD=1 writes the record; WORKSPACE.md says when.
upgrade-check: STACKS ?= $(wildcard .venv .venv-*)
upgrade-check: $(COMPILERS)
	$(VENV)/bin/python -m tools.benchmark upgrade $(if $(RECORD),--record) $(STACKS:%=%/bin/python)

# On a machine with GPUs or TPUs: checks and measures them in steps of under ten minutes each, and fails where there are
# none. `make accelerator STEP=parity` runs one step; docs/accelerator.md says what to install first.
accelerator: $(INSTALLED)
	$(VENV)/bin/python -m tools.benchmark accelerator $(if $(STEP),--step=$(STEP))

# Writes docs/index.html, one page to browse: every strategy in pictures, a calculator, and the guide.
site: $(INSTALLED)
	$(VENV)/bin/python -m tools.site

lint: $(INSTALLED)
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

format: $(INSTALLED)
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

$(INSTALLED): requirements.lock
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14) and "Python 3.11, 3.12 or 3.13 is needed, and $(PYTHON) is " + sys.version.split()[0] + "; name another with make PYTHON=...")'
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/pip install --quiet --disable-pip-version-check --require-hashes -r requirements.lock
	@touch $(INSTALLED)

# The compilers for TPUs and for NVIDIA GPUs, for the installed jax, on Linux on x86-64. A download of 130 MB for GPUs and
# more for TPUs.
$(COMPILERS): $(INSTALLED) compilers.lock
	$(VENV)/bin/pip install --quiet --disable-pip-version-check --require-hashes -r compilers.lock
	@touch $(COMPILERS)

# Emulators of Google Cloud Storage and S3, for tests: the extra `storage-tests`. They ask for an older python-dateutil
# than matplotlib does, and work with the newer one, so the list is installed as it is.
$(EMULATORS): $(INSTALLED) emulators.lock
	$(VENV)/bin/pip install --quiet --disable-pip-version-check --require-hashes --no-deps -r emulators.lock
	@touch $(EMULATORS)

# Writes requirements.lock anew from pyproject.toml, for every platform, with the newest packages that each Python
# version can have; needs `pip install uv`.
lock:
	uv pip compile pyproject.toml --extra dev --universal --fork-strategy requires-python --python-version 3.11 \
	  --generate-hashes --no-emit-index-url --no-header --upgrade --output-file requirements.lock
	$(MAKE) lock-others

# The same for compilers.lock and emulators.lock, which have the versions of requirements.lock where both name a package.
lock-others:
	echo 'jax[tpu]  jax[cuda13-local]' | tr -s ' ' '\n' | $(LOCK) --output-file compilers.lock -
	grep -o '^python-dateutil==[^ ]*' requirements.lock > .dateutil
	sed -n 's/^storage-tests = //p' pyproject.toml | grep -o '"[^"]*"' | tr -d '"' | $(LOCK) --override .dateutil --output-file emulators.lock -
	rm .dateutil

# A bill of materials of what `make train` installs: every package, its version and its hashes, as CycloneDX 1.5.
sbom: $(INSTALLED)
	$(VENV)/bin/python -m tools.sbom > sbom.json

# Damaged and hostile files for every reader; needs `pip install '.[fuzz]'`. Not part of `make test`.
fuzz: $(INSTALLED)
	$(VENV)/bin/python -m tests.fuzz --cases=$(or $(CASES),10000)

clean:
	rm -rf $(VENV) .venv-* .pytest_cache .ruff_cache .mypy_cache
