# make demo | test | lint | bench | setup | gpu-check | clean. EXTRAS=cuda or EXTRAS=tpu adds the accelerator's libraries.
VENV ?= .venv
EXTRAS ?=
PYTEST_ARGS ?=
GPU_CHECK_ARGS ?=
BENCH_ARGS ?= --json bench.json --explain-buckets
export VENV

.PHONY: help setup demo test lint bench gpu-check clean

help:
	@echo "make demo   set up and generate from a few prompts with the scheduler trace"
	@echo "make test   set up and run the tests (PYTEST_ARGS='-n 2 tests/trace' passes arguments on)"
	@echo "make lint   ruff and mypy"
	@echo "make bench  set up and measure the standing workload, into bench.json (BENCH_ARGS='latency --model FOLDER')"
	@echo "make setup  only the set-up: a virtual environment in $(VENV) (PYTHON=..., EXTRAS=cuda or tpu)"
	@echo "make gpu-check  what a GPU has to show, in 8 minutes; sets nothing up (GPU_CHECK_ARGS=--help, PYTHON=...)"
	@echo "make clean  remove what the others made"

setup:
	@tools/setup.sh $(EXTRAS)

demo: setup
	@echo "Four prompts, three slots and a pool of seven small blocks: the trace shows chunks, waiting and a preemption."
	$(VENV)/bin/python -m jaxpaged.generate --max-tokens 48 --max-num-seqs 3 --block-size 32 --num-blocks 7 \
	    --max-num-batched-tokens 64 --trace -- \
	    "Why is the sky blue?" \
	    "Write a haiku about a compiler." \
	    "What is 7 times 8? Answer with the number." \
	    "Translate to French: Good morning, my friend."

test:
	@tools/setup.sh test $(EXTRAS)
	$(VENV)/bin/python -m pytest $(PYTEST_ARGS)

lint:
	@tools/setup.sh dev $(EXTRAS)
	$(VENV)/bin/python -m ruff check .
	$(VENV)/bin/python -m ruff format --check .
	$(VENV)/bin/python -m mypy

bench: setup
	$(VENV)/bin/python -m jaxpaged.bench $(BENCH_ARGS)

# Needs no network: the environment there is, else PYTHON or python3 with jax, flax, numpy and jaxtyping.
gpu-check:
	@PYTHONPATH="$(CURDIR)" $(or $(PYTHON),$(wildcard $(VENV)/bin/python),python3) -m benchmarks.gpu_check $(GPU_CHECK_ARGS)

clean:
	rm -rf $(VENV) $(VENV).unfinished .pytest_cache .mypy_cache .ruff_cache .hypothesis dist bench.json
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
