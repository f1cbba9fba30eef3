"Every page runs in a fresh process (CASE 38), and committed pages keep the rules of size and stability."
import json, os, re, subprocess, sys
from pathlib import Path

import nbformat
import pytest

from page import flags

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted(p for p in (ROOT/'nbs').rglob('*.ipynb') if not any(part.startswith(('.', '_')) for part in p.relative_to(ROOT).parts))
NAMES = [str(p.relative_to(ROOT)) for p in PAGES]
RUN = '''
import sys
from nbdev.test import test_nb as run_page
ok, seconds = run_page(sys.argv[1], skip_flags=sys.argv[3].split(), basepath=sys.argv[2])
print(f'{seconds:.1f} s')
sys.exit(0 if ok else 1)
'''


def read(page): return nbformat.read(ROOT/page, 4)


def outputs(page): return [o for c in read(page).cells for o in c.get('outputs', [])]


@pytest.mark.case(38)
@pytest.mark.parametrize('page', NAMES)
def test_page_runs(page):
    env = os.environ | dict(IN_TEST='1')
    p = subprocess.run([sys.executable, '-c', RUN, str(ROOT/page), str(ROOT), flags()], capture_output=True, text=True, env=env, timeout=600)
    assert p.returncode == 0, p.stdout[-2000:] + p.stderr[-6000:]


@pytest.mark.case(36)
@pytest.mark.parametrize('page', NAMES)
def test_page_is_small_and_stable(page):
    assert (ROOT/page).stat().st_size < 400_000
    nb = read(page)
    assert 'widgets' not in nb.metadata
    for o in outputs(page):
        assert o.output_type != 'error', o.get('evalue')
        assert 'FigureWidget' not in json.dumps(o.get('data', {}))
        assert len(o.get('data', {}).get('text/html', '')) < 20_000
    said = json.dumps([o.get('text') or {k: v for k, v in o.get('data', {}).items() if k != 'image/png'} for o in outputs(page)])
    assert not re.findall(r'/(?:work|tmp|root|home|Users|var)/[\w.-]+', said)
    assert not re.findall(r'\b(?:[01]\d|2[0-3]):[0-5]\d:[0-5]\d\b', said), 'a clock time in an output'
    assert not re.findall(r'(?:it/s|s/it)\]', said), 'a progress bar in an output'


@pytest.mark.parametrize('page', NAMES)
def test_page_was_run(page):
    "A committed page shows what its cells give: code cells whose last line is a value or a picture have an output."
    shown = [c for c in read(page).cells if c.cell_type == 'code' and re.search(r'\.show\(\)\s*$', c.source) and not re.search(r'#\|\s*(hide|notest|slow|metal|browser|eval: false)', c.source)]
    assert all(c.outputs for c in shown), [c.source[-80:] for c in shown if not c.outputs]


def test_all_pages_together_are_small(): assert sum(p.stat().st_size for p in PAGES) < 5_000_000


def test_a_page_opens_with_a_noun_and_a_promise():
    for page in NAMES:
        first = read(page).cells[0]
        assert first.cell_type == 'markdown' and re.match(r'# .+\n\n> .+', first.source), page


def directive(page, name): return [m for c in read(page).cells if c.cell_type == 'code' for m in re.findall(rf'^#\|\s*{name}\s+(\S+)', c.source, re.M)]


def test_one_module_one_page():
    owner = {}
    for page in NAMES:
        for module in directive(page, 'default_exp'):
            assert module not in owner, f'{page} and {owner[module]} both export {module}'
            owner[module] = page
    made = {str(p.relative_to(ROOT/'edge0_lab').with_suffix('')).replace(os.sep, '.') for p in (ROOT/'edge0_lab').rglob('*.py') if p.name not in ('__init__.py', '_modidx.py')}
    assert made == set(owner), 'modules without a page, or pages without a module'


def test_exported_cells_have_no_magics():
    for page in NAMES:
        for c in read(page).cells:
            if c.cell_type == 'code' and re.match(r'#\|\s*export', c.source): assert not re.search(r'^\s*[%!]', c.source, re.M), (page, c.source[:80])


def test_exports_go_up_never_down():
    "An exported cell imports only rooms above it; pages of one room (03, 03a, 03b) are free among themselves."
    order = {m: int(re.match(r'\d+', Path(page).name)[0]) for page in NAMES for m in directive(page, 'default_exp')}
    for page in NAMES:
        mine = directive(page, 'default_exp')
        for c in read(page).cells:
            if not mine or c.cell_type != 'code' or not re.match(r'#\|\s*exporti?\b', c.source): continue
            for m in re.findall(r'^from edge0_lab\.([\w.]+) import', c.source, re.M): assert order[m] <= order[mine[0]], f'{page} imports {m}'


# Names that two rooms still define; each is to be renamed in one of them, and then leaves this list.
TWICE = {'prepare', 'PARTS', 'page_cache', 'shape_of', 'batch_rows', 'ROWS', 'KINDS', 'Load', 'POLICIES'}


def test_public_names_are_unique():
    "Each public name is defined in one module; another may pass it on (`_all_`) but not define it again."
    import ast
    home, twice = {}, set()
    for path in sorted((ROOT/'edge0_lab').rglob('*.py')):
        if path.name in ('__init__.py', '_modidx.py'): continue
        body = ast.parse(path.read_text()).body
        exported = next((ast.literal_eval(n.value) for n in body if isinstance(n, ast.Assign) and getattr(n.targets[0], 'id', '') == '__all__'), [])
        passed_on = {a.asname or a.name for n in body if isinstance(n, (ast.Import, ast.ImportFrom)) for a in n.names}
        for name in set(exported) - passed_on:
            assert name not in home or name in TWICE, f'{name}: in {home[name]} and {path.name}'
            if name in home: twice.add(name)
            home[name] = path.name
    assert twice == TWICE, f'no longer twice, take them off the list: {TWICE - twice}'
