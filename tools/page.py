"""Writes, runs and looks at one page.

    python tools/page.py build SCRIPT.py NB   percent script -> notebook, export its module, run with outputs saved, clean
    python tools/page.py script NB SCRIPT.py  notebook -> percent script, to edit
    python tools/page.py export NB            export the page's module only
    python tools/page.py run NB               run with outputs saved, clean
    python tools/page.py png NB DIR           every plotly figure of an executed page as PNG
"""
import os, sys, tomllib
from pathlib import Path

import nbformat

ROOT = Path(__file__).resolve().parents[1]
KERNEL = dict(display_name='python3', language='python', name='python3')


def flags():
    "Directives of cells that are not run, as nbdev has them."
    return tomllib.loads((ROOT/'pyproject.toml').read_text())['tool']['nbdev']['tst_flags']


def build(script, nb):
    import jupytext
    page = jupytext.read(script, fmt='py:percent')
    page.metadata = dict(kernelspec=KERNEL)
    for cell in page.cells: cell.metadata = {}
    write(page, nb)
    export(nb)
    run(nb)


def script(nb, dest):
    import jupytext
    jupytext.write(nbformat.read(nb, 4), dest, fmt='py:percent')


def write(page, nb):
    "Cell ids by position, so that rebuilding an unchanged page changes nothing."
    for i, cell in enumerate(page.cells): cell['id'] = f'cell{i:03d}'
    page.nbformat, page.nbformat_minor = 4, 5
    part = Path(str(nb) + '.part')
    nbformat.write(page, part)
    os.replace(part, nb)


def export(nb):
    from nbdev.export import nb_export
    os.chdir(ROOT)
    nb_export(str(Path(nb).resolve() if Path(nb).is_absolute() else ROOT/nb), lib_path=str(ROOT/'edge0_lab'))


def run(nb):
    "Execute in the notebook's folder as nbdev's tests do, outputs saved; the first error ends it with its traceback."
    from nbdev.test import test_nb as run_page
    nb = (ROOT/nb).resolve()
    part = nb.with_suffix('.ipynb.part')
    part.write_bytes(nb.read_bytes())
    ok, seconds = run_page(part, skip_flags=flags().split(), save=True, basepath=ROOT)
    if not ok:
        part.unlink()
        sys.exit(f'{nb.name}: a cell failed, see above; the page is unchanged')
    os.replace(part, nb)
    clean(nb)
    print(f'{nb.name}: {seconds:.1f} s, {nb.stat().st_size >> 10} KiB')


def clean(nb):
    from nbdev.clean import nbdev_clean
    nbdev_clean(str(nb))
    page = nbformat.read(nb, 4)
    page.metadata = dict(kernelspec=KERNEL)
    write(page, nb)


def png(nb, dest):
    Path(dest).mkdir(parents=True, exist_ok=True)
    n = 0
    for cell in nbformat.read(nb, 4).cells:
        for o in cell.get('outputs', []):
            fig = o.get('data', {}).get('application/vnd.plotly.v1+json')
            if fig is None: continue
            to_png({k: fig[k] for k in ('data', 'layout')}, Path(dest)/f'{Path(nb).stem}-{n:02d}.png')
            n += 1
    print(n, 'figures in', dest)


def to_png(fig, path):
    import plotly.io as pio
    pio.write_image(fig, path, scale=1.5)


if __name__ == '__main__':
    if len(sys.argv) < 3 or sys.argv[1] not in ('build', 'script', 'export', 'run', 'png'): sys.exit(__doc__)
    globals()[sys.argv[1]](*sys.argv[2:])
