"""All of the project's checks, as `make test` runs them: the tree agrees with its pages, then every page and test.

Clean, export, README and `git status` must leave the tree as it was; then pytest, which also runs each page in a fresh process.
"""
import subprocess, sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BIN = Path(sys.executable).parent
BY_HAND = {'__init__.py'}


def run(*cmd): subprocess.run([str(c) for c in cmd], check=True, cwd=ROOT)


def tree():
    "What git sees: changed and new files with the hash of their content."
    git = lambda *a: subprocess.run(['git', *a], check=True, cwd=ROOT, capture_output=True, text=True).stdout
    names = [n for n in git('status', '--porcelain', '--no-renames', '-uall').splitlines()]
    return {n: git('hash-object', n[3:].strip('"')) if (ROOT/n[3:].strip('"')).is_file() else '' for n in names}


def agrees():
    before = tree()
    run(BIN/'nbdev-clean')
    for module in (ROOT/'edge0_lab').rglob('*.py'):
        if module.name not in BY_HAND and '__pycache__' not in module.parts: module.unlink()
    run(BIN/'nbdev-export')
    run(sys.executable, 'tools/readme.py', '--check')
    after = tree()
    moved = sorted(set(before.items()) ^ set(after.items()))
    if moved: sys.exit('check: pages and modules disagree; export and commit:\n' + '\n'.join(n for n, _ in moved))
    print('check: clean, export, README and git status agree')


if __name__ == '__main__':
    agrees()
    sys.exit(subprocess.run([sys.executable, '-m', 'pytest', '-n', '2', '--dist', 'worksteal', *sys.argv[1:]], cwd=ROOT).returncode)
