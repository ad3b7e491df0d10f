# A bare machine needs Python 3.11 or newer, make and a C++ compiler (inductor). `make` lists the targets.
PYTHON ?= $(shell command -v python3.11 || command -v python3.12 || command -v python3.13 || echo python3)
NPROC ?= 2
TORCH ?= 2.15.0

BIN := .venv/bin
PYTEST := $(BIN)/python -m pytest -n 2 --dist loadgroup
INSTALL = $(BIN)/python -m pip install --constraint constraints.txt --editable

TRAINERS := .venv-trainers/bin

# What `make bench` measures of long contexts, and the plots that are made of it
FIGURES := docs/figures/long-context
COMPARED := "Ulysses by hand" "Ulysses by hand, tuned" autosp "autosp, layers checkpointed" "autosp, all, small tiles"

GPU_PYTHON ?= python3
# What `make gpu` needs beside torch; none of it asks for a torch.
GPU_NEEDS := editables hatchling hypothesis networkx pydantic pytest pytest-xdist syrupy 'transformers>=5.8,<6'

.PHONY: help env demo test further quick trainers check compat gpu wheels bench bench-further zoo zoo-diffusion zoo-mesh cells proofs peers mutate third-party clean

help:  ## this list
	@sed -n 's/^\([a-z-]*\):.*## /make \1\t/p' Makefile

env: .venv/test.stamp  ## the environment in .venv, pinned by constraints.txt

demo: env  ## train a Llama on one device and across NPROC=2 ranks, compare
	$(BIN)/autosp demo --ranks $(NPROC)

test: env  ## every test, with some of its cases where it has many that take long
	$(PYTEST) --cases=some

further: env  ## the other cases, and four processes: with `make test` all there is
	$(PYTEST) --cases=further

quick: env  ## the engine and the core of AutoSP, without processes: for every edit
	$(PYTEST) --cases=some -m 'not gloo and not slow' tests/graph tests/match tests/ops tests/pattern tests/spmd \
		tests/autosp/test_config.py tests/autosp/test_gradients.py tests/autosp/test_refusals.py \
		tests/test_architecture.py tests/test_plan.py tests/test_rule.py tests/test_report.py

trainers: .venv-trainers/test.stamp  ## the scripts of docs/trainers.md under their trainers, in .venv-trainers
	$(TRAINERS)/python -m pytest -n 2 --dist worksteal tests/trainers

check: .venv/dev.stamp  ## lint, types, then all tests and cases
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright
	$(PYTEST)

compat: .venv-$(TORCH)/test.stamp  ## all tests and cases on another torch, from PyPI, in .venv-TORCH: make compat TORCH=2.15.0
	.venv-$(TORCH)/bin/python -m pytest -n 2 --dist loadgroup

gpu: .venv-gpu/stamp  ## what one CUDA card does, ten minutes: gpu.json and a table; GPU_PYTHON is the Python that has torch
	.venv-gpu/bin/python -m tests.gpu

wheels:  ## the folder wheels/, from which `make gpu` installs without an index; FOR: pip's options for another machine
	grep -v -e '^torch==' constraints.txt > .constraints-without-torch
	$(PYTHON) -m pip download --dest wheels --only-binary=:all: --constraint .constraints-without-torch $(FOR) $(GPU_NEEDS)

bench: .venv/bench.stamp  ## most tables of docs/benchmarks.md; the machine must be quiet
	$(BIN)/python -m tests.bench.engines
	$(BIN)/python -m tests.bench.rewriters
	$(BIN)/python -m tests.bench.masks
	$(BIN)/python -m tests.bench.saved
	$(BIN)/python -m tests.bench.caches --layers 2
	$(BIN)/python -m tests.bench.checks
	$(BIN)/python -m tests.bench.passes
	$(BIN)/python -m tests.bench.regions --layers 8
	$(BIN)/python -m tests.bench.shards
	$(BIN)/python -m tests.bench.long_context --table steps --ways $(COMPARED)

bench-further: .venv/bench.stamp  ## the other tables, of many lengths, layers and ranks, and the plots; hours
	$(BIN)/python -m tests.bench.budget
	$(BIN)/python -m tests.bench.regions --layers 32 --rounds 3
	$(BIN)/python -m tests.bench.long_context --table steps longest --out $(FIGURES).jsonl
	$(BIN)/python -m tests.bench.long_context --table layers lengths --ways "Ulysses by hand" "autosp, layers checkpointed" "autosp, equal layers once"
	$(BIN)/python -m tests.bench.long_context --table lengths --out $(FIGURES).jsonl --ways $(COMPARED)
	for ranks in 2 4 8; do $(BIN)/python -m tests.bench.long_context --table lengths --ranks $$ranks --alone --rounds 1 \
		--out $(FIGURES).jsonl --ways $(COMPARED); done
	$(BIN)/python -m tests.bench.plots $(FIGURES).jsonl $(FIGURES).svg

zoo: env  ## the table of docs/zoo.md: every model against one device, resumed where it was stopped (zoo.jsonl)
	$(BIN)/python -m tests.zoo --table docs/zoo.md

zoo-diffusion: .venv/zoo.stamp  ## the table of docs/zoo-diffusion.md: transformers of diffusers, resumed where it was stopped (zoo-diffusion.jsonl)
	$(BIN)/python -m tests.zoo --diffusion --out zoo-diffusion.jsonl --table docs/zoo-diffusion.md

zoo-mesh: env  ## the table of docs/zoo-mesh.md: three parallelisms on eight ranks, resumed where it was stopped (zoo-mesh.jsonl)
	$(BIN)/python -m tests.zoo --mesh dp=2,sp=2,tp=2 --out zoo-mesh.jsonl --table docs/zoo-mesh.md

cells: env  ## the table of docs/attention-cells.md: every strategy of attention, resumed where it was stopped (cells.jsonl)
	$(BIN)/python -m tests.zoo.attention --table docs/attention-cells.md

proofs: env  ## the table of docs/proofs.md: which shipped rules are proved, resumed where it was stopped (proofs.jsonl)
	$(BIN)/python -m tests.bench.proofs --table docs/proofs.md

peers: env  ## the table of docs/peers.md: the test suites of other rewriters
	$(BIN)/python -m tests.peers.suites

mutate: env  ## the mutants of docs/proofs.md: shipped rules with one thing changed, after `make proofs`; resumed where it was stopped (mutants.jsonl)
	nice $(BIN)/python -m tests.bench.mutants --table docs/proofs.md

third-party: .venv-third-party/stamp  ## a rule plan and AutoSP in compilers of others, in .venv-third-party (two gigabytes)
	.venv-third-party/bin/python -m pytest tests/backends/test_third_party.py

clean:  ## remove the environment and every cache
	rm -rf .venv .venv-* dist wheels gpu.json .constraints-without-torch zoo.jsonl zoo-diffusion.jsonl zoo-mesh.jsonl cells.jsonl proofs.jsonl mutants.jsonl corpus.jsonl .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

.venv/bin/python:
	$(PYTHON) -m venv .venv

# Versions of docs/backends.md; none of them asks for a torch of its own.
.venv-third-party/stamp: pyproject.toml constraints.txt Makefile
	$(PYTHON) -m venv .venv-third-party
	.venv-third-party/bin/python -m pip install --constraint constraints.txt --editable '.[test]' \
		openvino==2026.4.1 iree-turbine==3.9.0 iree-base-compiler==3.13.0 iree-base-runtime==3.13.0 apache-tvm==0.27.0.post1
	@touch $@

.venv/test.stamp: pyproject.toml constraints.txt | .venv/bin/python
	$(INSTALL) '.[test]'
	@touch $@

.venv/zoo.stamp: .venv/test.stamp
	$(INSTALL) '.[test,zoo]'
	@touch $@

.venv/bench.stamp: .venv/test.stamp
	$(INSTALL) '.[bench]'
	@touch $@

.venv/dev.stamp: .venv/test.stamp
	$(INSTALL) '.[dev]'
	@touch $@

# deepspeed's setup.py imports torch, so it is built in the environment that has it
.venv-trainers/test.stamp: pyproject.toml constraints.txt constraints-trainers.txt
	test -x $(TRAINERS)/python || $(PYTHON) -m venv .venv-trainers
	$(TRAINERS)/python -m pip install --constraint constraints.txt --editable '.[test]' setuptools wheel
	$(TRAINERS)/python -m pip install --constraint constraints.txt --constraint constraints-trainers.txt \
		--no-build-isolation deepspeed
	$(TRAINERS)/python -m pip install --constraint constraints.txt --constraint constraints-trainers.txt \
		--editable '.[test,trainers]'
	@touch $@

# The machine's torch is used as it is. If GPU_PYTHON is of an environment itself, its packages are found by the .pth file.
.venv-gpu/stamp: pyproject.toml constraints.txt Makefile
	$(GPU_PYTHON) -c 'import torch' || (echo 'GPU_PYTHON=$(GPU_PYTHON) has no torch: name a Python that has one for CUDA' && exit 1)
	$(GPU_PYTHON) -m venv --system-site-packages .venv-gpu
	$(GPU_PYTHON) -c 'import os, torch; print(os.path.dirname(os.path.dirname(torch.__file__)))' \
		> "$$(.venv-gpu/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/machine.pth"
	grep -v -e '^torch==' -e '^setuptools==' constraints.txt > .venv-gpu/constraints.txt
	if test -d wheels; then .venv-gpu/bin/python -m pip install --no-index --find-links wheels $(GPU_NEEDS); \
		else .venv-gpu/bin/python -m pip install --constraint .venv-gpu/constraints.txt $(GPU_NEEDS); fi
	.venv-gpu/bin/python -m pip install --no-index --no-deps --no-build-isolation --editable .
	@touch $@

# Not torch's pin, nor that of setuptools, of which each torch wants its own.
.venv-%/test.stamp: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv-$*
	grep -v -e '^torch==' -e '^setuptools==' constraints.txt > .venv-$*/constraints.txt
	.venv-$*/bin/python -m pip install --constraint .venv-$*/constraints.txt torch==$* --editable '.[test]'
	@touch $@
