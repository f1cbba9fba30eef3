"The dashboard served by Voila, without a notebook around it."
import re, sys

import nbformat
import pytest

from lab_browser import alone, chromium, complaints, free_port, page_at, served

pytestmark = pytest.mark.browser
ICONS = re.compile(r'https://cdn\.jsdelivr\.net/npm/@fortawesome/.*\.css')       # Voila's template asks for it; the dashboard has no icons, and a test no network


def test_dashboard_in_voila(tmp_path):
    pytest.importorskip('voila', reason='voila is not installed: it comes with the extra "dev"')
    chromium()
    page = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("from edge0_lab.dashboard import Dashboard\nDashboard('tiny-softmax', max_tokens=8)")])
    page.metadata = dict(kernelspec=dict(display_name='python3', language='python', name='python3'))
    nbformat.write(page, tmp_path/'one.ipynb')
    (tmp_path/'home').mkdir()
    port = free_port()
    with served([sys.executable, '-m', 'voila', 'one.ipynb', '--no-browser', f'--port={port}', '--Voila.ip=127.0.0.1'], tmp_path, alone(tmp_path/'home'), rf'(http://(?:127\.0\.0\.1|localhost):{port}/)') as url:
        with page_at(url, empty=ICONS) as (page, wrong):
            page.wait_for_selector('.edge0 button:has-text("Run")')
            page.get_by_role('button', name='Run', exact=True).click()
            page.locator('.edge0-tokens button').nth(7).wait_for()
            page.wait_for_selector('.edge0-figures .js-plotly-plot .main-svg')
            assert not complaints(page, wrong)
