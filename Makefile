# polyfed: `make demo` shows it at work, `make test` proves it right. Both need Python 3.11+ and install into .venv.
#
# Only relative paths below, and modules instead of .venv/bin/* scripts: a folder's name may hold spaces, which make's
# own functions and the scripts' first lines cannot.

# The interpreter that .venv is made of; empty: the first of PYTHONS that is 3.11 or newer.
PYTHON ?=
PYTHONS = python3 python3.14 python3.13 python3.12 python3.11
# The extras of what is installed: make install, install-dev, install-all ...
EXTRAS_run =
EXTRAS_dev = dev,flower,naturals,privacy,ray
EXTRAS_all = dev,docs,flower,hub,mlflow,naturals,onnx,privacy,ray,tensorboard,vision,wandb
EXTRAS_audit = audit
EXTRAS_docs = docs
EXTRAS_release = release
# More arguments for pytest: make test ARGS="-k fedgh"
ARGS ?=

# Compiled files are kept, whatever the shell says: else each process of the tests compiles all of them anew.
unexport PYTHONDONTWRITEBYTECODE

# One thread for torch's own loops in the tests: steady on shared cores, and the same order of sums everywhere.
# One process of tests per core.
PYTEST = OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} .venv/bin/python -m pytest -ra -n auto --dist worksteal

# Lines and branches that the tests went through, in percent, by folder.
COVERAGE = for folder in src/polyfed/[a-z]*/; do printf '%-28s' "$$folder"; \
	.venv/bin/python -m coverage report --include="$$folder*" --format=total || exit; done

# What `make quick` runs: of the reports, what draws nothing.
DRAWN = $(addprefix tests/report/test_,$(addsuffix .py,figures html_report sensitivity))
QUICK = tests/functional tests/core tests/config $(filter-out $(DRAWN),$(sort $(wildcard tests/report/test_*.py))) \
	tests/engine/test_federation.py::test_only_who_changed_is_scored_again

# A sample of each file's mutants; all of them: make mutants SAMPLE=1000 (an hour)
SAMPLE ?= 14
MUTANTS = OMP_NUM_THREADS=1 .venv/bin/python scripts/mutants.py --at-least 90 --sample $(SAMPLE)

# Its theme would otherwise print a notice about its own future.
MKDOCS = NO_MKDOCS_2_WARNING=1 .venv/bin/python -m mkdocs

PIP = .venv/bin/python -m pip install --constraint constraints.txt

# Whether PYTHON is named and another version than that of .venv, which is then made anew.
VERSION = -c 'import sys; print(sys.version_info[:2])' 2>&1
OTHER = $(if $(PYTHON),$(if $(filter-out $(shell "$(PYTHON)" $(VERSION)),$(shell .venv/bin/python $(VERSION))),other))

.DEFAULT_GOAL := help
.NOTPARALLEL:
.DELETE_ON_ERROR:
.PHONY: other help demo test quick test-all repeat mutants docs docs-serve audit lint format
.PHONY: pythons release install install-dev install-all install-audit install-docs install-release clean

help: ## what can be made
	@echo "usage: make TARGET [PYTHON=python3.12]"
	@awk -F ': .*## ' '/^[a-z-]+:.*## / { printf "  %-12s %s\n", $$1, $$2 }' Makefile

demo: install ## install, then let five different networks learn together on handwritten digits
	.venv/bin/python -m polyfed compare recipes/quickstart.toml --methods local,fedavg,fedin,fedhenn,fedgh --seeds 0 --out runs/quickstart

test: lint ## install, then lint, types and all tests but the slow ones
	$(PYTEST) -m "not slow" $(ARGS)

quick: install-dev ## the tests of maths, recipes and tables, and one tiny federation: seconds, between two edits
	$(PYTEST) -m "not slow" $(QUICK) $(ARGS)

test-all: install-all lint ## the same with the slow tests, every extra, all installed by it, and coverage by folder
	$(PYTEST) --cov --cov-report= $(ARGS)
	@$(COVERAGE)

repeat: install-all ## before a release, in a clean clone: the whole suite ten times, in random order, beside load, on one core
	for seed in 1 2 3 4 5; do $(PYTEST) -x -p tests.helpers.shuffle --shuffle $$seed $(ARGS) || exit; done
	trap 'kill $$busy' EXIT; for loop in 1 2 3 4; do yes >/dev/null & busy="$$busy $$!"; done; \
		for run in 1 2 3; do $(PYTEST) -x $(ARGS) || exit; done
	for run in 1 2; do OMP_NUM_THREADS=1 taskset -c 0 .venv/bin/python -m pytest -ra -x $(ARGS) || exit; done

mutants: install-dev ## errors put into maths, messages, averaging and the batch loop: do the tests notice 9 of 10?
	$(MUTANTS) src/polyfed/functional --tests tests/functional
	$(MUTANTS) src/polyfed/core/message.py src/polyfed/methods/building_blocks/weight_averaging.py \
		src/polyfed/engine/local_training.py --tests tests/core tests/engine/test_*training.py \
		$(patsubst %,tests/methods/test_%.py,fedavg fednova scaffold fedselect) \
		tests/methods/building_blocks/test_weight_averaging.py

docs: install-docs ## the documentation as a site, into site/; a warning is an error
	$(MKDOCS) build --strict

docs-serve: install-docs ## the same in a browser, at localhost:8000, as it is being written
	$(MKDOCS) serve

audit: install-audit ## known faults of what is pinned (pip-audit, which asks over the network); unknown is an error
	.venv/bin/python -m pip_audit --strict --no-deps --disable-pip --requirement constraints.txt

pythons: install-release ## the package on every Python that is here, and with the lowest and newest dependencies (nox)
	.venv/bin/python -m nox $(ARGS)

release: install-docs install-release ## is this checkout ready to be released? prints what is missing; uploads nothing
	.venv/bin/python scripts/release.py $(ARGS)

lint: install-dev ## style (ruff) and types (mypy, strict)
	.venv/bin/python -m ruff check .
	.venv/bin/python -m ruff format --check .
	.venv/bin/python -m mypy --strict --num-workers auto

format: install-dev ## let ruff put the style right
	.venv/bin/python -m ruff check --fix .
	.venv/bin/python -m ruff format .

install: .venv/installed-run ## .venv with polyfed and what it needs

install-dev: .venv/installed-dev ## .venv with the tools of the tests, and the extras `flower`, `naturals`, `privacy` and `ray`, besides

install-all: .venv/installed-all ## .venv with all that any test can use

install-audit: .venv/installed-audit ## .venv with pip-audit besides

install-docs: .venv/installed-docs ## .venv with the tools of the documentation besides

install-release: .venv/installed-release ## .venv with nox besides

# Written last, so that what was interrupted is done again. The build tool is pinned, too, and comes first.
.venv/installed-%: .venv/pyvenv.cfg pyproject.toml constraints.txt
	$(PIP) --quiet setuptools
	$(PIP) --no-build-isolation --editable '.$(if $(EXTRAS_$*),[$(EXTRAS_$*)])'
	touch $@

.venv/pyvenv.cfg: $(OTHER)
	@for python in $(if $(PYTHON),"$(PYTHON)",$(PYTHONS)); do \
		if "$$python" -c 'import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; then \
		exec "$$python" -m venv --clear .venv; fi; done; \
	echo "polyfed needs Python 3.11 or newer with its venv module;" \
	'none such among: $(or $(PYTHON),$(PYTHONS)). Name one with: make PYTHON=/path/to/python3' >&2; exit 2

clean: ## remove what can be made again; keeps .venv and runs/
	rm -rf .nox build dist site src/*.egg-info .coverage .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -path ./.venv -prune -o -path ./runs -prune -o -name __pycache__ -type d -exec rm -rf {} +
