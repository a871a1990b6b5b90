# make run       train the bundled model on arithmetic (ARGS="--train.steps 5" changes any option)
# make test      every fast test; make test-all: lint and slow tests too; make lint: ruff and mypy
# make capstone  base -> SFT -> DPO -> GRPO with an evaluation of each (ARGS="--seed 1"; about 20 minutes on two cores)
# make test-vllm train through a real vLLM, in an environment of its own (.venv-vllm, about 4 GB); about 10 minutes
# make crash     kill runs at 200 random points and resume each; make fuzz: fuzz the verifiers' readers
# make clean     remove the virtual environment and caches (never runs/)
# What is missing is installed into .venv first, in the versions of constraints.txt. PYTHON=/path/to/python chooses Python.

VENV := .venv
PY := $(VENV)/bin/python
INSTALL := $(PY) -m pip install --disable-pip-version-check --no-compile --constraint constraints.txt

# Installing compiles nothing (it takes a minute); what is imported is compiled once and kept, even where the shell says not
# to: without, every process compiles torch and transformers again, for about ten seconds.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: run capstone test test-all test-vllm lint fuzz crash clean
.DELETE_ON_ERROR:

# An environment whose interpreter is gone (a Python upgrade, a moved folder) is made anew.
ifneq ($(shell $(PY) -c 'print("works")' 2>/dev/null),works)
$(shell rm -f $(VENV)/*.stamp $(VENV)/made)
endif

run: $(VENV)/run.stamp
	$(VENV)/bin/tinyllm grpo --config examples/arithmetic.toml $(ARGS)

capstone: $(VENV)/run.stamp
	$(VENV)/bin/tinyllm capstone $(ARGS)

# Two workers of one thread each: what two cores do best. Each begins with half of the files, so that what a file's tests
# share is made in one of them; who has done first takes from the other.
test: $(VENV)/test.stamp
	OMP_NUM_THREADS=1 $(PY) -m pytest -m "not slow" -n 2 --dist worksteal $(ARGS)

# Tests that start Ray stay in one worker: two clusters at once are too much for two cores.
test-all: lint test
	OMP_NUM_THREADS=1 $(PY) -m pytest -m slow -n 2 --dist loadgroup $(ARGS)

test-vllm: $(VENV)/test.stamp
	sh scripts/vllm.sh
	$(PY) -m pytest tests/real_vllm.py $(ARGS)

lint: $(VENV)/test.stamp
	$(PY) -m ruff check
	$(PY) -m ruff format --check
	$(PY) -m mypy

# Coverage-guided fuzzing of the verifiers' own readers; about 10 minutes.
fuzz: $(VENV)/test.stamp
	$(INSTALL) 'atheris>=3'
	$(PY) tests/fuzz_readers.py 200000

# Kills runs at 200 random points and resumes them; about 6 minutes.
crash: $(VENV)/test.stamp
	OMP_NUM_THREADS=1 $(PY) -m pytest tests/test_resume.py -k any_point --kill-points 200 -n 2 $(ARGS)

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -prune -exec rm -rf {} +

$(VENV)/made: scripts/setup.sh
	PYTHON="$(PYTHON)" sh scripts/setup.sh venv $(VENV)
	touch $@

# setuptools first and no isolated builds: every version that is used is in constraints.txt.
$(VENV)/run.stamp: pyproject.toml constraints.txt | $(VENV)/made
	$(INSTALL) setuptools
	$(INSTALL) --no-build-isolation --editable '.[run]'
	touch $@

$(VENV)/test.stamp: $(VENV)/run.stamp
	sh scripts/setup.sh tools $(VENV)
	$(INSTALL) --no-build-isolation --editable '.[dev]'
	touch $@
