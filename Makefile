# `make demo` and `make test` do all the set-up themselves.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP_INSTALL := $(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt

.PHONY: help demo test soak format bench clean

help:
	@echo "make demo    a job on this machine that loses, freezes and gains nodes; a minute"
	@echo "make test    format, lint, types, layers, doctests, tests"
	@echo "make soak    kills in random moments, simulated jobs, a real one under faults; a random seed; 45 minutes"
	@echo "make format  rewrite the files the way 'make test' wants them"
	@echo "make bench   all benchmarks, beside torch, torchrun and torchft; writes the README's tables; an hour, root"
	@echo "make clean   remove .venv and what the tools left"

# Not isolated: an isolated build would fetch its own setuptools, past the constraints.
$(VENV)/package: pyproject.toml constraints.txt
	@echo "setting up $(VENV): torch and a few small packages, about 1 GB; once" >&2
	@$(PYTHON) -m venv $(VENV)
	@$(PIP_INSTALL) setuptools
	@$(PIP_INSTALL) --no-build-isolation --editable .
	@touch $@

$(VENV)/installed: $(VENV)/package
	@echo "adding what the tests need, about another GB; once" >&2
	@$(PIP_INSTALL) --no-build-isolation --editable '.[test]'
	@touch $@

demo: $(VENV)/package
	@$(BIN)/hieravg demo

test: $(VENV)/installed
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/pytest --cov --numprocesses 2 --dist loadfile

soak: $(VENV)/installed
	SEED=$${SEED:-$$(date +%s)}; echo "SEED=$$SEED"; export SEED; \
	  KILLS=200 $(BIN)/pytest -s tests/averaging/test_faults.py -k kill_at_any_moment && \
	  RUNS=20000 $(BIN)/pytest -s tests/membership/test_simulation.py -k keep_every_promise && \
	  $(BIN)/python -m tests.soak.elastic --minutes 30 --seed $$SEED

format: $(VENV)/installed
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# The peers that only benchmarks need.
$(VENV)/bench-installed: $(VENV)/installed
	@$(PIP_INSTALL) --no-build-isolation --editable '.[bench]'
	@touch $@

# For example: make bench FLAGS="--only plan averaging"
bench: $(VENV)/bench-installed
	$(BIN)/python benchmarks/everything.py $(FLAGS)

clean:
	rm -rf $(VENV) build *.egg-info .coverage .hypothesis .mypy_cache .pytest_cache .ruff_cache .import_linter_cache
