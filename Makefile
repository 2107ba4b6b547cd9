# README's two commands: `make quickstart` and `make test`. Contributors: `make check`.
#
#   PYTHON       interpreter to build .venv with (3.11 to 3.13)
#   TORCH_INDEX  package index to take torch from, e.g. https://download.pytorch.org/whl/cpu on a machine without a GPU
#   ARGS         overrides for the quickstart, e.g. ARGS="seed=2 num_steps=40"
#   PYTEST_ARGS  for the suite, e.g. PYTEST_ARGS="tests/areal_like -n 0"
#   MUTATION_ARGS  for the mutation runner, e.g. MUTATION_ARGS="--seed 7 --mutants 40 --only 'trainer/*'"

PYTHON ?= python3
TORCH_INDEX ?=
TORCH_VERSION ?= 2.13.0
ARGS ?=
MUTATION_ARGS ?=
VENV := .venv
SGLANG_VENV := .venv-sglang
VLLM_VENV := .venv-vllm
BIN := $(VENV)/bin
# Most of the 30,000 installed modules are never imported; Python compiles the others when they first are, and keeps that.
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile
PYTEST := $(BIN)/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder --by-file --max-worker-restart 0 -o console_output_style=classic

# The suite starts hundreds of interpreters: without compiled modules each would compile the packages again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: quickstart sglang-cpu sglang-cpu-if-possible vllm-cpu vllm-cpu-if-possible ecosystem ecosystem-if-possible environments test test-all test-part test-fast mutation check static lint words types contracts format reference docs clean

quickstart: $(VENV)/.installed
	@echo "The quickstart takes about two minutes on two cores: supervised steps, then 70 steps of RL."
	$(BIN)/areal-like train configs/quickstart.yaml $(ARGS)

# SGLang on a CPU, in an environment of its own; rebuilt when its pins change.
sglang-cpu:
	@$(PYTHON) tests/fixtures/engine_environments.py sglang $(SGLANG_VENV) --torch-version $(TORCH_VERSION) $(if $(TORCH_INDEX),--torch-index $(TORCH_INDEX))

sglang-cpu-if-possible:
	@$(MAKE) --no-print-directory sglang-cpu || echo "no SGLang here: the tests that need it are skipped"

# vLLM on a CPU, likewise.
vllm-cpu:
	@$(PYTHON) tests/fixtures/engine_environments.py vllm $(VLLM_VENV) --torch-version $(TORCH_VERSION) $(if $(TORCH_INDEX),--torch-index $(TORCH_INDEX))

vllm-cpu-if-possible:
	@$(MAKE) --no-print-directory vllm-cpu || echo "no vLLM here: the tests that need it are skipped"

# verifiers, OpenEnv and TRL, in environments of their own on top of $(VENV); rebuilt when their pins change.
ecosystem: $(VENV)/.installed-dev
	@$(BIN)/python tests/fixtures/ecosystem/build.py .venv-ecosystem

ecosystem-if-possible: $(VENV)/.installed-dev
	@$(MAKE) --no-print-directory ecosystem || true

# All at once: most of the time goes into fetching and unpacking.
ENVIRONMENTS := $(VENV)/.installed-dev sglang-cpu-if-possible vllm-cpu-if-possible ecosystem-if-possible
environments:
	@$(MAKE) --no-print-directory --jobs 3 $(ENVIRONMENTS)

# Three streams of tests, a file at a time, in the order of tests/conftest.py: two leave a seventh of two cores idle. A stream
# that dies ends the suite: pytest-xdist may wait forever for the one that replaces it. Property tests have a quarter of
# their examples.
test: environments
	$(PYTEST) -m "not thorough" --hypothesis-profile=fast $(PYTEST_ARGS)

# With the tests that are marked `thorough`, and all examples of property tests.
test-all: environments
	$(PYTEST) $(PYTEST_ARGS)

# With a third of them, another one for each commit: what CI runs.
test-part: environments
	$(PYTEST) --thorough-part $$(git rev-list --count HEAD 2>/dev/null || echo 0)/3 $(PYTEST_ARGS)

# What a change is tried with first: tests that start no process, and a quarter of the examples of property tests. The other
# tests carry the marks `e2e`, `processes` and `thorough`.
test-fast: $(VENV)/.installed-dev
	$(PYTEST) --no-processes -m "not thorough" $(PYTEST_ARGS)

# How strong the unit tests are: random changes of core modules that some test must notice.
mutation: $(VENV)/.installed-dev
	$(BIN)/python -m tests.mutation $(MUTATION_ARGS)

# The checks of `static` need only $(VENV): they run while the other environments are fetched and unpacked.
check:
	@$(MAKE) --no-print-directory --output-sync=target --jobs 3 $(ENVIRONMENTS) static
	@$(MAKE) --no-print-directory test-part

static: lint words types contracts docs

lint: $(VENV)/.installed-dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

# Terms that were replaced must not come back: file, line and what to write instead.
words: $(VENV)/.installed-dev
	$(BIN)/python tests/word_list.py

types: $(VENV)/.installed-dev
	$(BIN)/mypy

contracts: $(VENV)/.installed-dev
	$(BIN)/lint-imports

format: $(VENV)/.installed-dev
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

reference: $(VENV)/.installed
	$(BIN)/areal-like reference > docs/reference.md

docs: $(VENV)/.installed-dev
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

$(VENV)/.installed: requirements.lock pyproject.toml
	@$(PYTHON) -c 'import sys; ok = (3, 11) <= sys.version_info[:2] <= (3, 13); sys.exit(0 if ok else "areal_like needs Python 3.11, 3.12 or 3.13, and $(PYTHON) is " + sys.version.split()[0] + ": name another one, e.g. make PYTHON=python3.12")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) torch==$(TORCH_VERSION) $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX))
	$(PIP) -r requirements.lock
	$(PIP) --no-deps --editable .
	touch $@

$(VENV)/.installed-dev: $(VENV)/.installed requirements-dev.lock requirements-optional.lock requirements-linters.lock requirements-deepspeed.lock requirements-ray.lock
	$(PIP) -r requirements-dev.lock
	@$(PIP) -r requirements-optional.lock || echo "not all of requirements-optional.lock could be installed: the tests that need it are skipped"
	@$(PIP) -r requirements-linters.lock || echo "not all of requirements-linters.lock could be installed: the checks of deploy/ that need it are skipped"
	@DS_BUILD_OPS=0 $(PIP) --no-build-isolation -r requirements-deepspeed.lock || echo "DeepSpeed could not be installed: the tests of its backend are skipped"
	@$(PIP) -r requirements-ray.lock || echo "Ray could not be installed: the tests of clusters are skipped"
	touch $@

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
