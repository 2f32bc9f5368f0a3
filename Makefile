# Everything happens in .venv; set PYTHON to choose the interpreter.
PYTHON ?= python3
BIN := .venv/bin
# The stamp is newer than the files that decide what is installed: a second call costs nothing.
STAMP := .venv/.installed

.PHONY: install demo test check bench clean

install: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

demo: $(STAMP)
	$(BIN)/shoal train configs/impala_cartpole.yaml

test: $(STAMP)
	$(BIN)/pytest

check: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/pytest tests/test_architecture.py

bench: $(STAMP)
	$(BIN)/python -m bench

clean:
	rm -rf .venv build *.egg-info .pytest_cache .mypy_cache .ruff_cache
