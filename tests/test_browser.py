"`make lab` in a real browser: JupyterLab opens on the right page, and pages run there as they do under test."
import pytest

from lab_browser import chromium, errors_of, lab, notebook_ready, open_notebook, page_at, run_all

pytestmark = pytest.mark.browser


@pytest.fixture(scope='module')
def address(tmp_path_factory):
    chromium()
    with lab(tmp_path_factory.mktemp('lab')) as url: yield url


def test_make_lab_opens_a_page_that_runs(address):
    with page_at(address) as (page, wrong):
        notebook_ready(page, address.rsplit('/', 1)[-1])
        open_notebook(page, 'index.ipynb')
        cells = run_all(page)
        assert any('bench kernels' in str(c.get('outputs')) for c in cells) and not errors_of(cells)
        assert not wrong
