# Everything happens in .venv; set PYTHON to choose the interpreter.
PYTHON ?= python3
BIN := .venv/bin
# A stamp is newer than the files that decide what is installed: a second call costs nothing.
STAMP := .venv/.installed
DEMO := .venv/.demo

.PHONY: install demo test test-all check docs bench bench-gpu clean

install: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

# Only what the demo needs, unless everything is there already.
$(DEMO): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[demo]'
	@touch $@

demo: $(if $(wildcard $(STAMP)),$(STAMP),$(DEMO))
	$(BIN)/shoal train impala_cartpole
	$(BIN)/shoal play latest --seconds 11

# Every promise in its short form.
test: $(STAMP)
	$(BIN)/pytest

# The long forms too.
test-all: $(STAMP)
	$(BIN)/pytest -m ''

check: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/pytest tests/test_architecture.py

docs: $(STAMP)
	$(BIN)/python -m shoal.cli.reference > docs/settings.md
	$(BIN)/mkdocs build --strict
	@echo "open site/index.html"

bench: $(STAMP)
	$(BIN)/shoal bench all

# Needs a GPU.
bench-gpu: $(STAMP)
	$(BIN)/shoal bench gpu

clean:
	rm -rf .venv build site *.egg-info .pytest_cache .mypy_cache .ruff_cache
