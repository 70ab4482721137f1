# make demo: train, stop, resume and export a small model on this machine. make test: everything that CI checks.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: demo test test-all test-trl test-newest test-oldest lint types unit curves

demo: $(READY)
	$(BIN)/python examples/demo.py

test: lint types unit

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(READY)
	$(BIN)/mypy

# Tests with Ray go one after the other: each starts as many processes as there are cores. They wait much, so the others
# run beside them. These wait for disks and processes too: with two workers on two cores a third of the cores' time was
# idle, so there is one more. Processes that tests start read compiled modules, whatever the environment says.
unit: export PYTHONDONTWRITEBYTECODE =
unit: $(READY)
	$(BIN)/python -m pytest -m ray $(CASES) >$(VENV)/tests_with_ray.log 2>&1 & with_ray=$$!; \
	$(BIN)/python -m pytest -m 'not ray' --numprocesses 3 --dist loadfile --no-loadscope-reorder $(CASES); \
	status=$$?; wait $$with_ray || status=$$?; cat $(VENV)/tests_with_ray.log; exit $$status

# Every case of every test, TRL's losses, and the kill campaign (docs/testing.md says when).
test-all: CASES = --all-cases --hypothesis-profile=many
test-all: test test-trl
	$(BIN)/python -m benchmarks.kill_campaign kill_campaign.json

# The losses that TRL makes today beside the recorded ones, with which ours are compared.
test-trl: $(READY)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt trl
	$(BIN)/python -m pytest --all-cases tests/engine/step/test_trl.py

# The tests of models with the newest Transformers that pip gives, which stands before the pinned one (docs/testing.md).
test-newest: $(READY)
	$(BIN)/python -m pip install --quiet --upgrade --target $(VENV)/newest transformers
	PYTHONPATH=$(VENV)/newest $(BIN)/python -m pytest tests/model tests/engine/discovery tests/engine/step/test_model_types.py

# The tests of the engine with the oldest torch that pyproject.toml takes, which comes with 4 GB of CUDA.
test-oldest: $(READY)
	$(BIN)/python -m pip install --quiet --upgrade --target $(VENV)/oldest torch==2.11.0
	PYTHONPATH=$(VENV)/oldest $(BIN)/python -m pytest --numprocesses 2 --dist loadfile tests/engine

# The committed loss curves of the reference, made again.
curves: $(READY)
	$(BIN)/python -m tests.support.make_curves

# torch first and alone, at one version: nothing that asks for a range picks another one.
$(READY): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit("megatrain-ray needs Python 3.11 or newer") if sys.version_info < (3, 11) else None'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@
