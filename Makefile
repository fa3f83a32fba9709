# PDScope: the two commands a newcomer needs are `make demo` and `make test`. See README.md.
#
#   make demo      virtual environment, install, compile the bundled model, stream an answer
#   make test      lint, types, import rules, generated files, tests (minutes)
#   make verify    everything, the long tests too (an hour and more)
#   make lint format wheel bench clean
#
# PIP_ARGS is passed on to pip; PYTHON names the interpreter; JOBS the parallel test processes.

PYTHON ?= python3
VENV ?= .venv
PIP_ARGS ?=
JOBS ?= 2
DEMO_MODEL := examples/models/tiny-mixtral
DEMO_PLAN := plan-demo
DEMO_PROMPT ?= What should I eat for breakfast?

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --disable-pip-version-check -q
C_FILES = $(shell git ls-files 'runtime_c/*.c' 'runtime_c/*.h' 'tests/*.c' 'tests/*.h' 'benchmarks/*.c')

.PHONY: demo test verify lint format wheel bench clean
.DELETE_ON_ERROR:

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "error: $(PYTHON) is missing or older than 3.11: install Python 3.11 or newer, or name one: make PYTHON=python3.12 $(MAKECMDGOALS)" >&2; exit 1; }
	@$(PYTHON) -m venv $(VENV) || \
	  { rm -rf $(VENV); echo "error: $(PYTHON) cannot make a virtual environment: install its venv package (Debian, Ubuntu: apt install python3-venv)" >&2; exit 1; }

$(VENV)/.installed: $(BIN)/python pyproject.toml constraints.txt
	@echo "installing PDScope into $(VENV) (torch is a large download)"
	$(PIP) -c constraints.txt $(PIP_ARGS) -e .
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	$(PIP) -c constraints.txt $(PIP_ARGS) -e '.[dev]'
	@touch $@

demo: $(VENV)/.installed
	$(BIN)/pdscope-compile $(DEMO_MODEL) -o $(DEMO_PLAN) --force
	$(BIN)/pdscope-run $(DEMO_PLAN) --chat --prompt '$(DEMO_PROMPT)'
	@echo
	@echo "The plan is in $(DEMO_PLAN)/. Look at it:"
	@echo "  $(BIN)/pdscope-inspect $(DEMO_PLAN)                             what it holds"
	@echo "  $(BIN)/pdscope-inspect $(DEMO_PLAN) --layer 2 --phase decode    one layer's program"
	@echo "  $(BIN)/pdscope-run $(DEMO_PLAN) --chat                          talk to it (Ctrl-D ends)"

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	@echo clang-format --dry-run -Werror ...
	@$(BIN)/clang-format --dry-run -Werror $(C_FILES)
	$(BIN)/python -m pdscope.ir.isa --check

format: $(VENV)/.installed-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(C_FILES)

test: lint
	$(BIN)/pytest -n $(JOBS) --dist worksteal -q -m "not verify"

verify: lint
	$(BIN)/pytest -n $(JOBS) --dist worksteal -q --run-verify

wheel: $(BIN)/python
	$(BIN)/python -m pip wheel --disable-pip-version-check -q --no-deps $(PIP_ARGS) -w dist .

bench: $(VENV)/.installed
	$(BIN)/python benchmarks/decode_ceiling.py

clean:
	rm -rf build dist $(DEMO_PLAN) *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
