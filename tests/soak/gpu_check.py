"""`make gpu-check`: the doctor with its file to send back, then every page, on the GPU of this machine. On a machine without one the doctor runs and the pages are left to `make test`."""
import subprocess, sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
OUT = ROOT/'out'/'gpu-check.json'


def main(pages=True):
    import edge0_lab
    from edge0_lab.cli import main as cli
    from edge0_lab.doctor_machine import on_gpu
    OUT.parent.mkdir(exist_ok=True)
    bad = cli(['doctor', '--post', str(OUT)])
    if not on_gpu(): print('gpu-check: no GPU that MLX can use here; the pages were not run on one')
    elif pages: bad = subprocess.run([sys.executable, '-m', 'pytest', '-q', 'tests/test_pages.py', '-k', 'test_page_runs'], cwd=ROOT).returncode or bad
    print(f'gpu-check: {"errors, see above" if bad else "no error"}; please send {OUT.relative_to(ROOT)}')
    return bad


if __name__ == '__main__': sys.exit(main())
