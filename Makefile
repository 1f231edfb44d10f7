# GradWatch. Every target that needs the virtual environment makes it first.
PYTHON ?= python3
BIN := .venv/bin
RUNTIME := .venv/.runtime
STYLE := .venv/.style
STAMP := .venv/.installed
# tests that share a training stand beside each other, and so mostly in one process
WORKERS ?= --numprocesses auto --dist worksteal
# the slow ones wait for processes and browsers part of their time
SLOW_WORKERS ?= --numprocesses $$(( $$(getconf _NPROCESSORS_ONLN) * 3 / 2 )) --dist worksteal
# compiling what no test imports takes a minute
INSTALL := $(BIN)/python -m pip install -qq --no-compile -c constraints.txt

.DEFAULT_GOAL := help
.PHONY: help demo test test-slow test-all style prose check fuzz bench gpu zoo modes pages docs clean

help:  ## this list
	@awk -F':.*## ' '/^[a-z-]+:.*## /{printf "make %-9s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: $(RUNTIME)  ## two small trainings on real data, and what GradWatch says of each
	@$(BIN)/gradwatch demo

test: $(STAMP)  ## the quick tests: three to six minutes on two cores
	@$(BIN)/python -m pytest $(WORKERS) --hypothesis-profile=quick -m 'not slow'

test-slow: $(STAMP)  ## all other tests: ranks, browser, whole catalogues
	@$(BIN)/python -m pytest $(SLOW_WORKERS) --hypothesis-profile=full -m slow

test-all: $(STAMP)  ## every test
	@$(BIN)/python -m pytest $(WORKERS) --hypothesis-profile=full

style: $(STYLE)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# what people read: pages, docstrings, messages, examples
PROSE := README.md CONTRIBUTING.md CHANGELOG.md SECURITY.md docs src examples
prose: $(STYLE)  ## spelling, and words to avoid (docs/plain_words.txt)
	$(BIN)/codespell --dictionary - --dictionary docs/plain_words.txt --ignore-words-list conet,foundin,lits,wieght \
		--skip '*.svg,*.png,docs/plain_words.txt' Makefile tests benchmarks $(PROSE)
	@$(BIN)/proselint check $$(find $(PROSE) -not -path 'docs/pictures/*' '(' -name '*.md' -o -name '*.py' ')') || { echo "see proselint's remarks above"; exit 1; }

check: style prose test-all  ## style, types, prose, every test: what has to pass before a change goes in

fuzz: $(STAMP)  ## what readers make of 10,000 damaged files of each kind: a quarter of an hour
	@PYTHONPATH=tests $(BIN)/python tests/damaged_files.py --count 10000

bench: $(STAMP)  ## what watching costs
	@$(BIN)/python -m benchmarks

gpu: $(STAMP)  ## on a GPU: checks, and what watching costs; without one, what can be checked
	@$(BIN)/python -m benchmarks.gpu

zoo: $(STAMP)  ## which faults are found, which alarms are false, which remedies cure: half an hour
	@$(BIN)/python -m benchmarks.zoo

modes: $(STAMP)  ## measure every way to train, and write the table in docs/modes.md
	@PYTHONPATH=tests $(BIN)/python tests/docs/mode_table.py

pages: $(STAMP)  ## run the examples of faults and write their alerts into docs/alerts; the tables of costs
	@PYTHONPATH=tests:docs $(BIN)/python tests/docs/alert_pages.py >/dev/null
	@PYTHONPATH=tests:docs $(BIN)/python tests/docs/cost_tables.py

docs: $(STAMP)  ## the documentation as a site: build/site/index.html
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet
	@echo "open build/site/index.html; with search: $(BIN)/python -m http.server --directory build/site"

clean:  ## remove what building, testing and the demo left behind (.venv stays)
	rm -rf build dist demo_runs lightning_logs .mypy_cache .ruff_cache .pytest_cache .hypothesis .benchmarks
	find src tests examples benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +

# torch first, at the version in constraints.txt: an unpinned one may bring gigabytes of CUDA libraries
$(RUNTIME): pyproject.toml constraints.txt
	@test -x $(BIN)/python || { echo "Making .venv with $(PYTHON)"; $(PYTHON) -m venv .venv; }
	@echo "Updating pip (dependency groups need 25.1)"
	@$(BIN)/python -m pip install -qq --upgrade 'pip>=25.1'
	@echo "Installing torch (the big one: minutes)"
	@$(INSTALL) torch
	@echo "Installing GradWatch, and scikit-learn for the demo's images"
	@$(INSTALL) -e . scikit-learn
	@touch $@

$(STYLE): $(RUNTIME)
	@echo "Installing what checks style, types and prose"
	@$(INSTALL) --group style
	@touch $@

$(STAMP): $(STYLE)
	@echo "Installing the other development tools"
	@$(INSTALL) --group dev
	@touch $@
