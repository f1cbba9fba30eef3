"""Set-up for the Makefile: `python tools/setup.py base|lab|dev|train|soak|browser`. Standard library only.

base     .venv with edge0_lab (editable) and a fast BLAS on Linux
lab      JupyterLab
dev      what tests and pages need
train    torch and transformers in .venv-train, for the recipe of the tiny tiers; skipped with the reason where pip would bring a CUDA build
soak     atheris, the coverage-guided fuzzer; where it does not install, `make soak` mutates without coverage and says so
browser  Debian's Chromium through apt-get when root; skipped with the reason elsewhere
"""
import json, os, platform, shutil, subprocess, sys, tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
APT = ['apt-get', '-o', 'DPkg::Lock::Timeout=300', '-qq', '-y']


def pip(venv, *args):
    subprocess.run([str(ROOT/venv/'bin'/'python'), '-m', 'pip', '--disable-pip-version-check', *args], check=True, cwd=ROOT)


def make_venv(name):
    if sys.version_info < (3, 11): sys.exit(f'setup: Python {platform.python_version()} found, 3.11 or newer is needed; set PYTHON=')
    if not (ROOT/name/'bin'/'python').exists():
        subprocess.run([sys.executable, '-m', 'venv', str(ROOT/name)], check=True)
        pip(name, 'install', '-q', '-U', 'pip')


def apt_install(*packages):
    "True when installed; False with the reason printed."
    if not shutil.which('apt-get') or os.geteuid() != 0:
        print(f'setup: {" ".join(packages)} not installed: needs apt-get and root')
        return False
    env = os.environ | dict(DEBIAN_FRONTEND='noninteractive')
    ok = all(subprocess.run([*APT, *cmd], env=env).returncode == 0 for cmd in (['update'], ['install', '--no-install-recommends', *packages]))
    if not ok: print(f'setup: apt-get could not install {" ".join(packages)}')
    return ok


def base():
    make_venv('.venv')
    blas = platform.system() == 'Linux' and platform.machine() == 'x86_64'
    pip('.venv', 'install', '-q', '-e', '.[blas]' if blas else '.')
    if platform.system() == 'Linux' and not blas: apt_install('libopenblas0-pthread')


def lab(): pip('.venv', 'install', '-q', '-e', '.[lab]')


def dev(): pip('.venv', 'install', '-q', '-e', '.[dev]')


def train():
    "Asks pip first what it would install: a CUDA build of torch costs gigabytes and this recipe runs on a CPU."
    make_venv('.venv-train')
    want = ['torch==2.13.0', 'transformers>=5.20,<6', 'tokenizers>=0.21', 'safetensors', 'numpy', 'tqdm', 'psutil']
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder)/'report.json'
        pip('.venv-train', 'install', '-q', '--dry-run', '--report', str(report), *want)
        brings = [p['metadata']['name'] for p in json.loads(report.read_text())['install']]
    if any(n.startswith(('nvidia', 'triton', 'cuda')) for n in brings):
        return print('setup: train skipped: pip would install a CUDA build of torch; put a CPU wheel of torch 2.13.0 on PIP_FIND_LINKS')
    pip('.venv-train', 'install', '-q', *want)


def browser():
    if not any(map(shutil.which, ('chromium', 'chromium-browser', 'google-chrome'))): apt_install('chromium', 'fonts-dejavu-core')


def soak():
    try: pip('.venv', 'install', '-q', '--only-binary', ':all:', 'atheris>=3')
    except subprocess.CalledProcessError: print('setup: atheris did not install here; make soak will mutate without coverage')


if __name__ == '__main__':
    steps = dict(base=base, lab=lab, dev=dev, train=train, soak=soak, browser=browser)
    if len(sys.argv) != 2 or sys.argv[1] not in steps: sys.exit(__doc__)
    steps[sys.argv[1]]()
