# On a fresh machine `make conformance` and `make test` do all the set-up themselves.

PYTHON ?= python3
TRAINER ?= reference_impls.hf:HFTrainer
ARGS ?=
JOBS ?= 2
RANKS ?= 1

# Two threads on two cores make single torch calls stall for half a second and more.
export OMP_NUM_THREADS ?= 1

# The environment is installed anew when what it is made from changes, and made anew
# for another Python: the stamp's name holds the version.
VERSION := $(shell $(PYTHON) -c 'import sys; sys.version_info < (3, 11) or print("%d.%d" % sys.version_info[:2])')
STAMP := .venv/.installed-$(VERSION)

# A trainer whose name has the part `titan` or `monarch` needs the extra of that name as well:
# reference_impls.titan:TitanTrainer brings [titan].
BACKENDS := $(filter titan monarch,$(subst ., ,$(subst :, ,$(TRAINER))))

.DEFAULT_GOAL := help
.PHONY: help .venv conformance test lint bench clean

help:  ## Show what there is to make.
	@sed -n 's/^\([a-z.]*\):.*  ## /  make \1\t/p' Makefile | expand -t 20
	@echo 'Variables: TRAINER=module:Name, PYTHON=python3.12, JOBS=2, RANKS=2, ARGS="more arguments of pytest".'

.venv: $(STAMP)  ## Make the environment that everything else uses.

$(STAMP): pyproject.toml constraints.txt
	@test -n "$(VERSION)" || { echo '$(PYTHON) is no Python 3.11 or newer; name one: make PYTHON=python3.12' >&2; exit 1; }
	@.venv/bin/python$(VERSION) -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear .venv
	.venv/bin/python -m pip install -c constraints.txt -e '.[hf,dev]'
	@touch $@

$(STAMP)-%: $(STAMP)
	.venv/bin/python -m pip install -c constraints.txt -e '.[$*]'
	@touch $@

conformance: $(STAMP) $(BACKENDS:%=$(STAMP)-%)  ## Judge TRAINER (the Hugging Face reference) by the contract.
	$(if $(filter-out 1,$(RANKS)),.venv/bin/torchrun --standalone --nproc-per-node=$(RANKS) -m pytest,.venv/bin/pytest) --trainer=$(TRAINER) $(ARGS)

test: $(STAMP)  ## Run the project's own tests, and the examples in its docstrings.
	.venv/bin/pytest -n $(JOBS) --doctest-modules src forge_conformance reference_impls tests $(ARGS)

lint: $(STAMP)  ## Check format, style and types.
	.venv/bin/ruff format --check
	.venv/bin/ruff check
	.venv/bin/mypy

bench: $(STAMP)  ## Time the kit on the reference trainers.
	.venv/bin/pytest tests/benchmarks $(ARGS)

clean:  ## Remove the environment and all that was built or cached.
	rm -rf .venv build dist .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
