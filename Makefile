# Two commands do all the set-up: `make train` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
RUN ?= runs/$(shell date +%Y%m%d-%H%M%S)
ARGS ?=
# Tests run in one thread each, so that two workers take half the time on two cores.
WORKERS ?= -n 2 --dist worksteal
# Pinned versions. The package index's torch of that version is the CUDA build; a machine set up with a CPU file takes that.
CONSTRAINTS := constraints.txt
# Of the dependencies, what a machine may lack that has torch, transformers, peft, accelerate and pytest.
GPU_LACKS := attrs cattrs certifi charset-normalizer diffusers docstring_parser httpcore2 httpx2 idna importlib_metadata msgspec \
	filelock optree requests tomli_w truststore typeguard tyro urllib3
PIP := $(BIN)/python -m pip --disable-pip-version-check

.PHONY: train test test-all test-lesser-cpu test-pretraining test-simulated-gpu gpu-pack gpu-first gpu-second lint docs bench clean

train: $(VENV)/installed
	$(BIN)/fluvial train ddpo --processes auto --out $(RUN) $(ARGS)
	@printf '\nNext: . $(BIN)/activate && fluvial sample $(RUN)\n'

test: $(VENV)/installed-test
	$(BIN)/python -P tests/sessions.py $(WORKERS) $(ARGS)

# With the tests marked `long`, of the site, too, and those on a local Ray, which takes 250 MB that `make test` does without.
test-all: $(VENV)/installed-ray $(VENV)/installed-docs
	$(BIN)/python -P tests/sessions.py --all $(WORKERS) $(ARGS)

# The tests marked `bits` on the code paths of an AMD processor with AVX2 (tests/README.md, "Bits"). Needs Linux and a C compiler.
test-lesser-cpu: $(VENV)/installed-test
	@mkdir -p build
	$(CC) -shared -fPIC -o build/not_intel.so tests/shared/helpers/not_intel.c
	LD_PRELOAD=$(CURDIR)/build/not_intel.so ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 FLUVIAL_LESSER_CPU=1 \
		PYTHONSAFEPATH=1 $(BIN)/python -P -m pytest -m "bits and not whole" $(WORKERS) $(ARGS)

# The shipped base weights are made again, to the last update; `make test` makes the first forty.
test-pretraining: $(VENV)/installed-test
	FLUVIAL_NO_TYPECHECK=1 $(BIN)/python -P -m pytest -m whole $(WORKERS) tests/bench/test_pretrain.py $(ARGS)

# Every recipe and adapter on simulated GPUs, 1 and 8 ranks; no GPU and no compiler is needed.
test-simulated-gpu: $(VENV)/installed-test
	FLUVIAL_NO_TYPECHECK=1 $(BIN)/python -P -m pytest -m simulated $(WORKERS) tests/engines/extensions/simulate tests/engines/extensions/dryrun tests/engines/extensions/plan $(ARGS)

# Two visits to a GPU, from a plain folder with its own python3 and torch, and nothing installed: 330 s and 460 s at most. Rows
# and logs are in $OUT. The machine needs what `make gpu-pack` collects here, on one with a package index.
gpu-pack: $(BIN)/python
	$(PIP) download --quiet --no-deps --only-binary=:all: --python-version 3.12 --implementation cp --abi cp312 \
		$(foreach tag,manylinux_2_28 manylinux_2_17 manylinux2014,--platform $(tag)_x86_64) --platform any \
		--constraint $(CONSTRAINTS) --dest build/gpu-pack $(GPU_LACKS)

gpu-first gpu-second:
	sh bench/gpu/visit.sh $(@:gpu-%=%)

# The tree as the namespace of packages that it is, for tools that read sources.
build/types/fluvial:
	@mkdir -p $@ && cd $@ && ln -sfn ../../../core ../../../kernels ../../../engines ../../../models ../../../bench . && ln -sfn ../../../tests/properties testing

lint: $(VENV)/installed-test | build/types/fluvial
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	MYPYPATH=build/types $(BIN)/python -P -m mypy -p fluvial
	MYPYPATH=build/types:tests/shared $(BIN)/python -P -m mypy tests

# The site of all pages and of the docstrings: build/site/index.html.
docs: $(VENV)/installed-docs | build/types/fluvial
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -P -m mkdocs build --strict --quiet $(ARGS)

bench: $(VENV)/installed
	$(BIN)/python -P -m fluvial.bench phases
	$(BIN)/python -P -m fluvial.bench traffic
	$(BIN)/python -P -m fluvial.bench kernels --device cpu

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/installed: pyproject.toml $(CONSTRAINTS) | $(BIN)/python
	$(PIP) install --quiet --constraint $(CONSTRAINTS) --editable .
	touch $@

$(VENV)/installed-test: $(VENV)/installed
	$(PIP) install --quiet --constraint $(CONSTRAINTS) --editable '.[test]'
	touch $@

$(VENV)/installed-ray: $(VENV)/installed-test
	$(PIP) install --quiet --constraint $(CONSTRAINTS) --editable '.[test,ray]'
	touch $@

$(VENV)/installed-docs: $(VENV)/installed
	$(PIP) install --quiet --constraint $(CONSTRAINTS) --editable '.[docs]'
	touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info
