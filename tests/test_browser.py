"`make lab` in a real browser: the dashboard stands there by itself and works; pages run there as they do under test."
import pytest

from edge0_lab.controls import default_values, run_of
from edge0_lab.decode import Lab
from lab_browser import Panel, chromium, errors_of, lab, notebook_ready, open_notebook, page_at, run_all

pytestmark = pytest.mark.browser
TOKENS = 12


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
        return out.trace.T, out.counters['decode']
    with Lab.open('tiny-softmax') as lab: return of(lab, decode='exact'), of(lab, decode='exact', cache_slots='8')


def test_make_lab_shows_a_dashboard_that_works(address, counts):
    assert address.endswith('15_dashboard.ipynb')
    (T, loose), (_, tight) = counts
    with page_at(address) as (page, wrong):
        panel = Panel(page)
        page.wait_for_selector('.edge0 button:has-text("Run")')               # nobody has pressed anything: the page ran its cell
        panel.type('tokens', str(TOKENS)), panel.pick('decode path', 'exact')
        panel.press('Run')
        panel.tokens().nth(T - 1).wait_for()
        assert panel.tokens().count() == T
        panel.tokens().nth(4).click()
        page.wait_for_selector('.edge0 td:has-text("exact")')                 # its experts, a row a layer
        page.wait_for_selector('.edge0-figures .js-plotly-plot .main-svg')
        page.wait_for_function("() => [...document.querySelectorAll('.edge0-figures .gtitle')].some(t => t.textContent.startsWith('Experts of step 4'))")

        panel.press('Pin'), panel.type('cache', '8'), panel.press('Run')
        page.wait_for_selector('.edge0 :text("Against the pinned run")')
        panel.wait_idle()
        assert panel.row('decode loads') == [f"{loose['loads']:,}", f"{tight['loads']:,}"] and loose['loads'] < tight['loads']
        assert panel.row('decode drops') == ['0', '0']

        panel.type('K', '99'), panel.press('Run')
        page.wait_for_selector('.edge0-error:has-text("k: 99")')
        assert panel.tokens().count() == T                                    # what was there stays

        panel.type('K', ''), panel.type('tokens', '2000'), panel.press('Run')
        panel.press('Stop')
        page.wait_for_selector('.edge0 :text-is("stopped")')
        panel.wait_idle()
        assert 1 <= panel.tokens().count() < 2000
        assert not wrong, wrong


@pytest.mark.parametrize('path', ['index.ipynb', 'chapters/memory_wall.ipynb', 'chapters/four_paths.ipynb'])
def test_a_page_runs_in_jupyterlab(address, path):
    with page_at(address) as (page, wrong):
        notebook_ready(page, '15_dashboard.ipynb')
        open_notebook(page, path)
        cells = run_all(page)
        assert not errors_of(cells)
        drawn = sum('application/vnd.plotly.v1+json' in o.get('data', {}) for c in cells for o in c.get('outputs', []))
        assert path == 'index.ipynb' or drawn >= 2
        assert not wrong, wrong
