# Everything a developer or an operator of one machine types. `make help` lists it.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
CORES := $(shell getconf _NPROCESSORS_ONLN)
# Half of their time tests wait for real servers, so there are two more at a time than cores.
WORKERS ?= $(shell expr $(CORES) + 2)
# What builds the image and saves it.
ENGINE ?= docker
# Where set, each of the hundreds of programs that the tests start would compile gpuscale anew.
unexport PYTHONDONTWRITEBYTECODE
# The longest first: `make check` runs as many at once as there are cores, and each prints when it ends.
CHECKS := types public-types pyright tests docs house contract doors style

.DEFAULT_GOAL := help
.PHONY: gpu-check help run install test unit properties check $(CHECKS:%=check-%) house api docs pictures format bench wheel image clean

help:  ## show this
	@awk -F ':.*## ' '/^[a-z]+:.*## /{printf "  make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

run: $(VENV)/.installed  ## install gpuscale here and start everything on this machine
	$(BIN)/gpuscalectl up $(ARGS)

install: $(VENV)/.installed  ## install gpuscale into .venv

test: $(VENV)/.dev  ## install what the tests need (RabbitMQ too, where it may) and run them all
	@sh tools/install_test_servers.sh
ifdef ARGS
	$(BIN)/python -m pytest $(ARGS)
else
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder
endif

unit: $(VENV)/.dev  ## run the tests that need no server
	$(BIN)/python -m pytest -n auto tests/unit tests/property $(ARGS)

properties: $(VENV)/.dev  ## search on with new random examples, where `make test` takes the same each time
	GPUSCALE_TEST_EXAMPLES=search $(BIN)/python -m pytest -n auto tests/property $(ARGS)

check: $(VENV)/.dev  ## lint, types, one-way doors, stale generated files
	@$(MAKE) --no-print-directory --keep-going --output-sync --jobs=$(CORES) $(CHECKS:%=check-%)

check-types:
	$(BIN)/python -m mypy services addons/*/gpuscale_* tools/generate_api.py tools/check_breaking.py tools/check_public_types.py examples bench
	MYPYPATH=tools $(BIN)/python -m mypy tools/generate_docs.py

# Room for what pyright makes for a moment: a tenth of its time goes into copying that from one small room to the next.
check-pyright check-public-types: export NODE_OPTIONS := --max-semi-space-size=64

check-pyright:
	$(BIN)/python -m pyright --pythonpath $(BIN)/python

check-public-types:
	$(BIN)/python tools/check_public_types.py

# The workers of `make test` then find the tests compiled, which each of them would do for itself.
check-tests:
	@$(BIN)/python -m pytest --collect-only -qq -p no:cacheprovider >$(VENV)/.collected || (cat $(VENV)/.collected; false)

check-docs:
	$(BIN)/python tools/generate_docs.py --check
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet

check-house:
	$(BIN)/python tools/check_size.py
	$(BIN)/python tools/house.py --check

check-contract:
	cd protos && ../$(BIN)/buf lint gpuscale/api/contract.binpb --path gpuscale
	$(BIN)/python tools/check_breaking.py
	$(BIN)/python tools/generate_api.py --check

check-doors:
	$(BIN)/lint-imports

check-style:
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

house: $(VENV)/.dev  ## measure the house: sizes, circles, names, and the files of a call's way (ARGS=--trace names them)
	@$(BIN)/python tools/house.py $(ARGS)

api: $(VENV)/.dev  ## write the Python of the contract again, after a change of a .proto file
	cd protos && ../$(BIN)/buf format -w
	$(BIN)/python tools/generate_api.py

docs: $(VENV)/.dev  ## write docs/reference again and build the site into build/site; broken links fail
	$(BIN)/python tools/generate_docs.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet

pictures: $(VENV)/.dev  ## take the pictures of the docs again, of `gpuscalectl up --demo`
	$(BIN)/python tools/pictures.py

format: $(VENV)/.dev  ## format and mend what can be mended by itself
	$(BIN)/ruff check --fix-only .
	$(BIN)/ruff format .

bench: $(VENV)/.dev  ## measure: tables of ratios to a baseline run side by side
	$(BIN)/python -m bench $(ARGS)

gpu-check: $(VENV)/.installed  ## check readings and costs on real GPUs of this host, and write a page into docs/hardware
	$(BIN)/python tools/gpu_check.py $(ARGS)

wheel: $(VENV)/.installed  ## build the wheel into dist/
	$(BIN)/python -m pip wheel --quiet --no-deps -w dist .

image: $(VENV)/.dev  ## build the image and bring docker-compose.yml up with it (ENGINE=podman where there is no docker)
	$(ENGINE) build $(ARGS) -t gpuscale:local .
	mkdir -p build && rm -f build/image.tar
	$(ENGINE) save -o build/image.tar gpuscale:local
	GPUSCALE_IMAGE=$(CURDIR)/build/image.tar $(BIN)/python -m pytest tests/e2e/test_compose.py

clean:  ## remove what was built and installed here
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache

# The pip of Python 3.11 takes a minute to choose what is pinned; where a mirror has no newer one, it will do.
$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)
	-$(PIP) --upgrade pip

$(VENV)/.installed: $(VENV)/bin/python pyproject.toml constraints.txt
	$(PIP) -e '.[all]'
	@touch $@

# In one step, which settles the versions once.
$(VENV)/.dev: $(VENV)/bin/python pyproject.toml constraints.txt requirements-dev.txt
	$(PIP) -e '.[all]' $(addprefix -e ,$(wildcard addons/*)) -r requirements-dev.txt
	@touch $(VENV)/.installed $@
