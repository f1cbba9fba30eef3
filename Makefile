# make demo: two tiny models served four ways, and a report.   make test: every check.   make lab: JupyterLab on the dashboard.
# Each does its own set-up in .venv (a second run costs nothing); PYTHON=... chooses the interpreter, 3.11 or newer.
PYTHON ?= python3
BIN = .venv/bin
SETUP = $(PYTHON) tools/setup.py
STAMPS = pyproject.toml tools/setup.py

.PHONY: demo test lab docs pictures soak gpu-check clean
demo: .make/base
	$(BIN)/edge0-lab demo

test: .make/base .make/dev .make/train .make/browser
	$(BIN)/python tools/check.py

# LAB: more options for JupyterLab, for example LAB="--no-browser --port=8899".
lab: .make/base .make/lab
	$(BIN)/edge0-lab lab --options="$(LAB)"

# The site, offline, in _docs; and the pictures that GitHub shows, made anew on purpose.
docs: .make/base .make/dev
	$(BIN)/python tools/docs.py

pictures: .make/base .make/dev .make/lab .make/browser
	$(BIN)/python tools/pictures.py

# Hours: fuzzing, long runs, faults by chance. Can be stopped and goes on; out/soak/summary.txt says what was held, survived and lost.
soak: .make/base .make/dev .make/soak
	$(BIN)/python tests/soak/run.py

# What neither Metal nor CUDA has seen yet: the doctor with its file to send back (out/gpu-check.json), and every page on the GPU.
gpu-check: .make/base .make/dev
	$(BIN)/python tests/soak/gpu_check.py

.make/base .make/dev .make/lab .make/train .make/browser .make/soak: $(STAMPS)
	@mkdir -p .make
	$(SETUP) $(@F)
	@touch $@
.make/dev .make/lab .make/train .make/browser .make/soak: .make/base

clean:
	rm -rf .make build dist _docs _proc .pytest_cache
