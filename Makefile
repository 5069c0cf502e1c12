PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV ?= .venv
ARGS ?=

.PHONY: demo test env lock

demo: env ## train with FAPO on this machine's CPU; ARGS="--help" shows the options
	$(VENV)/bin/verl-fapo demo $(ARGS)

test: env ## all tests; ARGS="-k name" selects
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/python -m pytest $(ARGS)

env: ## the virtual environment of requirements.lock
	@$(PYTHON) tools/env.py $(VENV)

lock: ## refresh requirements.lock
	$(PYTHON) tools/lock.py
