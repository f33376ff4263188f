# `make demo` and `make test` are all a newcomer needs; both make .venv where it is missing.
PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin
# what is imported is compiled then, which is a small part
CONSTRAINTS ?= constraints.txt
INSTALL = $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile --constraint $(CONSTRAINTS)

# Debian's; another browser: make pages CHROMIUM=/path/to/chrome
CHROMIUM ?= /usr/bin/chromium

NOTEBOOKS = $(patsubst nbs/%,build/notebooks/%,$(wildcard nbs/*.ipynb))

.PHONY: demo test test-changed slow test-all test-matrix interop pages lint notebooks outputs docs gallery release bench gpu host planted real mutants clean $(NOTEBOOKS)

demo: $(VENV)/.installed-demo
	$(BIN)/hookcb demo

test: $(VENV)/.installed-dev
	$(BIN)/python -m pytest

# those of the rooms that differ from BASE, and of the rooms above these
BASE ?= origin/main
test-changed: $(VENV)/.installed-dev
	$(BIN)/python -m pytest $$($(BIN)/python docs/changed.py $(BASE))

# those that take long and rarely break
slow: $(VENV)/.installed-dev
	$(BIN)/python -m pytest -m slow

test-all: test
	$(MAKE) slow

# the default tests on other versions of Python and torch; each takes gigabytes, and a Python that is not here is left out
MATRIX ?= 3.12-torch2.6.0 3.12-torch2.11.0 3.13-torch2.15.0
test-matrix: $(MATRIX:%=matrix-%)

matrix-%: build/matrix/%/constraints.txt
	@version=python$(firstword $(subst -torch, ,$*)); if $$version -c ''; \
	then $(MAKE) test PYTHON=$$version VENV=$(<D)/.venv CONSTRAINTS=$<; \
	else echo "$* is left out, as there is no $$version"; fi

.PRECIOUS: build/matrix/%/constraints.txt
build/matrix/%/constraints.txt:
	mkdir -p $(@D)
	echo 'torch==$(lastword $(subst -torch, ,$*))' > $@

# options of the two suites that may run beside others: ASIDE=--numprocesses=1 imports and prepares once what each worker would
ASIDE ?=

# with the packages of others that we follow
interop: $(VENV)/.installed-dev $(VENV)/.installed-interop
	$(BIN)/python -m pytest $(ASIDE) tests/interop

# pages of runs in a browser; with SCREENSHOTS=1 these are in build/pages
pages: $(VENV)/.installed-dev $(VENV)/.installed-pages $(CHROMIUM)
	CHROMIUM=$(CHROMIUM) $(BIN)/python -m pytest $(ASIDE) tests/pages

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy --strict hookcb

notebooks: $(NOTEBOOKS)

# puts their outputs into nbs, for readers on GitHub; of one: make outputs NOTEBOOKS=build/notebooks/01_loop.ipynb
outputs: $(NOTEBOOKS)
	$(BIN)/python docs/notebooks.py $^

# with their outputs, for the site; the kernel runs in nbs
$(NOTEBOOKS): build/notebooks/%: nbs/% $(VENV)/.installed-dev
	mkdir -p $(@D)
	$(BIN)/jupyter execute --output=../$(basename $@) $<

# the site, in build/site; the notebook that takes longest begins first, for make --jobs
docs: build/notebooks/09_many_processes.ipynb $(NOTEBOOKS) gallery $(VENV)/.installed-docs
	$(BIN)/mkdocs build

# the picture in README is taken anew if there is Chromium and it shows something else
gallery: $(VENV)/.installed-dev
	$(BIN)/python docs/gallery.py
	$(BIN)/python docs/picture.py $(wildcard $(CHROMIUM))

# fastai brings a torchvision built for CUDA, with which Lightning cannot be imported beside a torch for CPUs
bench: $(VENV)/.installed-bench
	$(BIN)/python -m pip uninstall --quiet --yes torchvision
	$(BIN)/python benchmarks/loop.py
	$(BIN)/python benchmarks/hooks.py
	$(BIN)/python benchmarks/commands.py
	$(BIN)/python benchmarks/costs.py --write
	$(BIN)/python benchmarks/costs.py --take --write
	$(BIN)/python benchmarks/costs.py --diagnose --write
	$(BIN)/python benchmarks/within.py --write
	$(BIN)/python benchmarks/growth.py --write
	$(BIN)/python benchmarks/memory.py --write
	$(BIN)/python benchmarks/profiler.py
	$(BIN)/python benchmarks/watch.py

# what a CUDA device shows in 240 s: costs, compiled models, the kernel, tests marked cuda; nothing without one
gpu: $(VENV)/.installed-dev
	$(BIN)/python benchmarks/gpu.py

# what watching costs the host, and compilation, counted and timed without a GPU
host: $(VENV)/.installed-dev
	$(BIN)/python benchmarks/host.py

# every planted fault and every control, five seeds, with the rules of three other tools; then those of two ranks
planted: $(VENV)/.installed-dev
	$(BIN)/python benchmarks/planted
	$(BIN)/python benchmarks/planted_ranks.py

# faulty programs of the kinds that people ask about, and the same programs repaired
real: $(VENV)/.installed-dev
	$(BIN)/python benchmarks/real

# small faults in the package, one at a time: how many do the tests notice? For an hour or two; goes on if interrupted
mutants: $(VENV)/.installed-dev
	$(BIN)/python benchmarks/mutants record
	$(BIN)/python benchmarks/mutants run

# wheel and sdist in dist, checked, and tried in environments of their own, two of which take gigabytes; uploads nothing
release: $(VENV)/.installed-release
	rm -rf dist
	$(BIN)/python -m build --quiet
	$(BIN)/twine check --strict dist/*
	$(BIN)/python docs/release.py

clean:
	rm -rf $(VENV)

$(BIN)/python:
	$(PYTHON) -c 'import sys; v = sys.version_info; v >= (3, 11) or sys.exit(f"hookcb needs Python 3.11 or newer, this is {v[0]}.{v[1]}; try: make PYTHON=python3.11")'
	$(PYTHON) -m venv $(VENV)

/usr/bin/chromium:
	apt-get update --quiet && apt-get install --yes --quiet --no-install-recommends chromium

# a stamp per extra: installing again only when what is asked for has changed; ALSO="pages docs" are others by the same call
$(VENV)/.installed-%: pyproject.toml $(CONSTRAINTS) | $(BIN)/python
	$(INSTALL) --editable '.[$*$(ALSO:%=,%)]'
	touch $@ $(ALSO:%=$(VENV)/.installed-%)
