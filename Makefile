# `make serve` and `make test` need nothing but Python 3.11 or newer: they make the virtual
# environment and install into it first.

PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin
WORKERS ?= 2
PORT ?= 8000

.PHONY: serve test quick lint format clean

serve: $(VENV)/serve.stamp
	@( \
	  for _ in $$(seq 600); do \
	    curl -fs http://127.0.0.1:$(PORT)/health/ready >/dev/null && break; sleep 0.2; \
	  done; \
	  printf '\ntry it:\n  curl http://127.0.0.1:$(PORT)/v1/chat/completions '; \
	  printf -- "-H 'content-type: application/json' "; \
	  printf -- "-d '{\"messages\": [{\"role\": \"user\", \"content\": \"What is pipeinfer?\"}]}'\n\n" \
	) & exec $(BIN)/pipeinfer serve --port $(PORT)

test: $(VENV)/test.stamp
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright
	$(BIN)/lint-imports
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile

# What one runs while working: no test that starts a process or loads a model.
quick: $(VENV)/test.stamp
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright
	$(BIN)/lint-imports
	$(BIN)/python -m pytest --quick -n $(WORKERS) --dist loadfile

lint: $(VENV)/test.stamp
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright
	$(BIN)/lint-imports

format: $(VENV)/test.stamp
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/serve.stamp: pyproject.toml | $(VENV)/bin/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e .
	@touch $@

$(VENV)/test.stamp: pyproject.toml | $(VENV)/bin/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[dev]'
	@touch $@ $(VENV)/serve.stamp

clean:
	rm -rf $(VENV)
