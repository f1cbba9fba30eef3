"`make lab` in a real browser: the dashboard stands there by itself and works; chapters run there as they do under test."
import json

import nbformat
import pytest

from edge0_lab.controls import default_values, run_of
from edge0_lab.decode import Lab
from edge0_lab.probes import PROBES, available, beside
from edge0_lab.settings import data_path
from edge0_lab.trace import Trace
from lab_browser import Panel, chromium, complaints, errors_of, lab, notebook_ready, open_notebook, page_at, run_all, undrawn
from test_pages import PAGES

pytestmark = pytest.mark.browser
TOKENS, PLOTLY = 12, 'application/vnd.plotly.v1+json'


@pytest.fixture(scope='module')
def address(tmp_path_factory):
    chromium()
    with lab(tmp_path_factory.mktemp('lab')) as url: yield url


@pytest.fixture(scope='module')
def counts():
    "What the runs below must count, from a lab without a browser."
    def of(lab, **changed):
        run, n = run_of(default_values('tiny-softmax') | dict(max_tokens=str(TOKENS)) | changed)
        out = lab.generate(default_values()['prompt'], n, run)
        return out.trace, out.counters['decode']
    with Lab.open('tiny-softmax') as lab: return of(lab, decode='exact'), of(lab, decode='exact', cache_slots='8')


def test_make_lab_shows_a_dashboard_that_works(address, counts, tmp_path):
    assert address.endswith('15_dashboard.ipynb')
    (trace, loose), (_, tight) = counts
    T = trace.T
    with page_at(address) as (page, wrong):
        panel = Panel(page)
        page.wait_for_selector('.edge0 button:has-text("Run")')               # nobody has pressed anything: the page ran its cell
        panel.type('tokens', str(TOKENS)), panel.pick('decode path', 'exact')
        panel.press('Run')
        panel.tokens().nth(T - 1).wait_for()
        panel.wait_idle()
        assert panel.tokens().count() == T
        panel.figure('Slots of layer')

        the = [i for i, t in enumerate(trace.tokens) if t == trace.tokens[1]]    # a word that comes twice: each place is its own button
        assert len(the) > 1
        for step in (the[0], the[1], 4):
            panel.tokens().nth(step).click()
            panel.figure(f'Experts of step {step}')
            page.wait_for_function('i => [...document.querySelectorAll(".edge0-tokens button")].every((b, j) => b.classList.contains("mod-active") === (i === j))', arg=step)
            assert panel.column('experts') == [' '.join(map(str, trace.ids[step, l])) for l in trace.layers]
            assert panel.column('loads') == [str(trace.loads[step, l]) for l in trace.layers]
        panel.press('all tokens')
        panel.figure('Experts used in steps')

        panel.press('Pin'), panel.type('cache', '8'), panel.press('Run')
        page.wait_for_selector('.edge0 :text("Against the pinned run")')
        panel.wait_idle()
        assert panel.row('set: cache') == ['auto', '8']
        assert panel.row('decode loads') == [f"{loose['loads']:,}", f"{tight['loads']:,}"] and loose['loads'] < tight['loads']
        assert panel.row('decode drops') == ['0', '0']

        panel.type('K', '99'), panel.press('Run')
        page.wait_for_selector('.edge0-error:has-text("k: 99")')
        assert panel.tokens().count() == T                                    # what was there stays

        panel.type('K', ''), panel.type('name or path', str(tmp_path/'kept')), panel.press('Save')
        page.wait_for_selector('.edge0 :text("saved: ")')
        panel.type('cache', '64'), panel.type('tokens', '2000'), panel.press('Run')
        panel.press('Stop')
        page.wait_for_selector('.edge0 :text-is("stopped")')
        panel.wait_idle()
        assert 1 <= panel.tokens().count() < 2000
        panel.type('name or path', str(tmp_path/'kept')), panel.press('Open')
        page.wait_for_selector('.edge0 :text("opened: kept")')
        assert panel.tokens().count() == T and [panel.value(n) for n in ('cache', 'tokens', 'K')] == ['8', str(TOKENS), '']
        assert not complaints(page, wrong)


def test_every_figure_comes_up_in_its_tab(address):
    "With a prerouter each of the probes can show this run; numbers stand under it on request."
    with page_at(address) as (page, wrong):
        panel = Panel(page)
        page.wait_for_selector('.edge0 button:has-text("Run")')
        panel.type('tokens', '16'), panel.pick('prerouter', 'previous'), panel.press('Run')
        panel.tokens().nth(15).wait_for()
        panel.wait_idle()
        for name in PROBES:
            panel.tab(name.replace('_', ' '))
            panel.shown().locator('.js-plotly-plot .gtitle').first.wait_for()
            assert panel.shown().locator('.js-plotly-plot').count() == 1
        panel.check('numbers')
        panel.shown().locator('table').wait_for()
        panel.press('Pin'), panel.type('cache', '8'), panel.press('Run')
        page.wait_for_selector('.edge0 :text("Against the pinned run")')
        panel.wait_idle()
        panel.tab('slot table'), panel.check('beside the pinned run')
        panel.shown().locator('.annotation-text', has_text='pinned').wait_for()
        assert not complaints(page, wrong)


def test_a_browser_draws_every_committed_figure_and_every_comparison():
    "plotly.py makes figures that plotly.js cannot draw; only a browser knows."
    figures = {f'{page.name} cell {i}': o['data'][PLOTLY] for page in PAGES for i, c in enumerate(nbformat.read(page, 4).cells) for o in c.get('outputs', []) if PLOTLY in o.get('data', {})}
    assert len(figures) > 150
    one, two = (Trace.load(data_path('traces', f'{n}.npz')) for n in ('tiny-softmax-staged', 'tiny-softmax-exact'))
    for name, probe in PROBES.items():
        if not (available(one)[name] or available(two)[name]): figures[f'beside: {name}'] = json.loads(beside(probe(one), probe(two), ('a', 'b')).to_json())
    assert undrawn(figures) == {}
    broken = json.loads(json.dumps(figures['beside: slot_table']))
    broken['layout']['yaxis2']['matches'] = 'y'
    assert undrawn({'broken': broken})                                        # and it notices one that cannot


@pytest.mark.parametrize('path', ['chapters/memory_wall.ipynb', 'chapters/four_paths.ipynb'])
def test_a_chapter_runs_in_jupyterlab(address, path):
    with page_at(address) as (page, wrong):
        notebook_ready(page, '15_dashboard.ipynb')
        open_notebook(page, path)
        cells = run_all(page, path)
        assert not errors_of(cells)
        assert sum('application/vnd.plotly.v1+json' in o.get('data', {}) for c in cells for o in c.get('outputs', [])) >= 2
        assert not complaints(page, wrong)
