# Every target sets up what it needs in .venv, first time and again. `make help` lists them.
#
#   PYTHON=python3.12   the interpreter for .venv            PIP_ARGS=...      more options for pip
#   DEMO_ARGS=...       options of `pcie-comm demo`          PYTEST_ARGS=...   options of pytest
#   GPU_PYTHON=...      the interpreter of `make gpu-test`   REPORT=FILE       where its report goes
#   MODEL_ARGS=--small  options of tools/model/check.py      WHEEL_ARGS=...    of tools/build_wheel.py
#   PACKAGE_ARGS=...    options of tools/check_install.py

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/installed
DOCS_STAMP := $(VENV)/docs_installed

# A driver's own file, or its tool in containers that hide /proc/driver.
HAVE_DRIVER := $(shell test -e /proc/driver/nvidia/version && echo yes || command -v nvidia-smi)

# Without a driver: known versions and no need for torch's CUDA build. With one: what suits it.
CONSTRAINTS := $(if $(HAVE_DRIVER),,--constraint constraints/cpu.txt)
DEMO_ARGS ?= --ranks 4 $(if $(HAVE_DRIVER),,--device cpu --processes)

# No ranks that must be on time: two processes share them.
QUIET_TESTS := tests/bench tests/installation tests/kernels tests/probe tests/topology \
  $(patsubst %,tests/test_%.py,build collectives example_install model snippets tools torch_ops two_shots uneven wheel wrap)

REPORT ?= build/gpu_report.json
GPU_MODULES := torch, cuda.bindings.driver, numpy, pytest, pytest_timeout, hypothesis, rich

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo test check docs model wheel package gpu-test clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-10s %s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))

demo: $(STAMP) ## four ranks run the main operation and check it; on the GPU where there is one
	$(BIN)/pcie-comm demo $(DEMO_ARGS)

test: $(STAMP) ## every test that needs no GPU
	@first=0; second=0; \
	$(BIN)/python -m pytest --no-gpu --numprocesses 2 --dist loadfile $(QUIET_TESTS) $(PYTEST_ARGS) || first=$$?; \
	$(BIN)/python -m pytest --no-gpu $(QUIET_TESTS:%=--ignore=%) $(PYTEST_ARGS) || second=$$?; \
	if [ $$first = 5 ] && [ $$second != 5 ]; then first=0; \
	elif [ $$second = 5 ] && [ $$first != 5 ]; then second=0; fi; \
	test $$first = 0 && test $$second = 0  # 5: nothing of PYTEST_ARGS was there

check: $(STAMP) ## lint, format, types, import contracts, sizes, links
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python tools/check_sizes.py
	$(BIN)/python tools/check_links.py

docs: $(DOCS_STAMP) ## the documentation site, into build/site, in strict mode; then its links
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	$(BIN)/python tools/check_links.py
	$(BIN)/python tools/check_site.py build/site

model: ## check the protocol with the model checker SPIN; says what is missing
	$(PYTHON) tools/model/check.py $(MODEL_ARGS)

wheel: $(STAMP) ## the wheel, with every kernel compiled; slow the first time, then incremental
	$(BIN)/python tools/build_wheel.py --out dist $(WHEEL_ARGS)

package: $(STAMP) ## sdist and wheel, installed and tried in a fresh environment without the compiler
	$(BIN)/python tools/check_install.py $(CONSTRAINTS) $(PACKAGE_ARGS)

# Works without a network: an interpreter that already has the modules is used as it is, and one
# that was asked for by name is never replaced.
gpu-test: ## the GPU tests, with a report in JSON
	@set -eu; \
	python="$(or $(GPU_PYTHON),$(PCIE_COMM_PYTHON))"; \
	if [ -z "$$python" ]; then \
	  python=$(PYTHON); \
	  if [ -x $(BIN)/python ]; then python=$(BIN)/python; fi; \
	  if ! "$$python" -c 'import $(GPU_MODULES)' 2>/dev/null; then \
	    $(MAKE) $(STAMP); \
	    python=$(BIN)/python; \
	  fi; \
	fi; \
	mkdir -p "$(dir $(REPORT))"; \
	echo "$$python tools/gpu_test.py --out $(REPORT)"; \
	"$$python" tools/gpu_test.py --out "$(REPORT)" $(GPU_TEST_ARGS)

$(STAMP): pyproject.toml constraints/cpu.txt
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 10) <= sys.version_info < (3, 14))' || { \
	  echo "pcie_comm needs Python 3.10 to 3.13, but PYTHON=$(PYTHON) is:" \
	    "$$($(PYTHON) --version 2>&1 || true). Name another one: make PYTHON=python3.12 ..." >&2; \
	  exit 1; }
	@test -x $(BIN)/pip || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(PIP_ARGS) $(CONSTRAINTS) \
	  --editable '.[dev]'
	@touch $@

$(DOCS_STAMP): $(STAMP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(PIP_ARGS) $(CONSTRAINTS) \
	  --editable '.[docs]'
	@touch $@

clean: ## remove builds and caches, not .venv
	rm -rf build dist pcie_comm/kernels/prebuilt .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache
	find pcie_comm tests tools -name __pycache__ -prune -exec rm -rf {} +
