"A real browser on a real JupyterLab: a copy of the project, `make lab` in it, and a page whose every complaint is kept."
import json, os, re, shutil, signal, socket, subprocess, sys, time
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import unquote

import pytest

ROOT = Path(__file__).resolve().parents[1]
FLAGS = ['--no-sandbox', '--disable-gpu', '--disable-breakpad', '--disable-crash-reporter', '--disable-dev-shm-usage']   # the last: a container's /dev/shm may be 64 MB, and a page that finds it full dies


def chromium():
    "Debian's browser; a test that needs it is skipped with the reason where there is none."
    for name in ('chromium', 'chromium-browser', 'google-chrome'):
        if shutil.which(name): return shutil.which(name)
    pytest.skip('no Chromium on PATH: `make test` installs it where it is root on Debian')


def project_copy(folder):
    "What git tracks, as it is now; data and the environment are links. Nothing a session saves reaches the tree."
    names = subprocess.run(['git', 'ls-files', '-co', '--exclude-standard'], cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    for name in names:
        if name.startswith('data/') or not (ROOT/name).is_file(): continue
        (folder/name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT/name, folder/name)
    (folder/'data').symlink_to(ROOT/'data')
    (folder/'.venv').symlink_to(sys.prefix)
    (folder/'.make').mkdir()
    for stamp in ('base', 'lab'): (folder/'.make'/stamp).touch()
    return folder


def alone(folder):
    "An environment with a home of its own and no first-start questions."
    settings = folder/'settings'/'@jupyterlab'/'apputils-extension'
    settings.mkdir(parents=True)
    (settings/'notification.jupyterlab-settings').write_text(json.dumps(dict(fetchNews='false', checkForUpdates=False)))
    cache = os.environ.get('EDGE0_LAB_CACHE') or Path.home()/'.cache'/'edge0_lab'
    keep = {n: v for n, v in os.environ.items() if n not in ('IN_TEST', 'EDGE0_LAB_DATA') and not n.startswith(('JUPYTER', 'PYTEST'))}
    return keep | dict(HOME=str(folder), JUPYTER_CONFIG_DIR=str(folder/'config'), JUPYTER_DATA_DIR=str(folder/'share'), JUPYTER_RUNTIME_DIR=str(folder/'run'),
                       JUPYTERLAB_SETTINGS_DIR=str(folder/'settings'), JUPYTERLAB_WORKSPACES_DIR=str(folder/'workspaces'), EDGE0_LAB_CACHE=str(cache))


def free_port():
    with socket.socket() as s:
        s.bind(('127.0.0.1', 0))
        return s.getsockname()[1]


@contextmanager
def served(cmd, cwd, env, address, wait=300):
    "Start a server in a process group of its own; give the address it prints (a pattern with one group); end the group."
    log = Path(cwd)/'server.log'                                    # kernels write there, too: the traceback of a widget's callback stands nowhere else
    with open(log, 'w') as out: p = subprocess.Popen(cmd, cwd=cwd, env=env, stdout=out, stderr=subprocess.STDOUT, start_new_session=True)
    try:
        end = time.monotonic() + wait
        while not (found := re.search(address, log.read_text())):
            assert p.poll() is None and time.monotonic() < end, f'{cmd}: no address\n{log.read_text()[-3000:]}'
            time.sleep(0.2)
        yield found[1]
        assert 'Traceback' not in log.read_text(), log.read_text()[-3000:]
    finally:
        if p.poll() is None:
            os.killpg(p.pid, signal.SIGTERM)
            try: p.wait(15)
            except subprocess.TimeoutExpired: os.killpg(p.pid, signal.SIGKILL)


@contextmanager
def lab(tmp, env=None):
    "`make lab` in a copy of the project: the address that its browser would open."
    (tmp/'home').mkdir(), (tmp/'clone').mkdir()
    copy, port = project_copy(tmp/'clone'), free_port()
    show = tmp/'home'/'show'                                       # stands for the desktop's browser: says what it is asked to open
    show.write_text('#!/bin/sh\necho "OPEN $1"\n')
    show.chmod(0o755)
    options = f'--port={port} --IdentityProvider.token= --LabApp.news_url=None --expose-app-in-browser'
    env = alone(tmp/'home') | dict(EDGE0_LAB_DATA=str(copy/'data'), BROWSER=str(show)) | (env or {})
    with served(['make', 'lab', f'LAB={options}'], copy, env, r'OPEN file://(\S+)') as page:
        yield re.search(r'href="(http[^"]+)"', Path(unquote(page)).read_text())[1]   # Jupyter shows a page that leads on


@contextmanager
def page_at(url, width=1500, height=1300, empty=None):
    "A page and the list of what went wrong on it: page errors, failed requests, answers from 400. Addresses that match `empty` are answered with nothing."
    from playwright.sync_api import sync_playwright
    wrong = []
    with sync_playwright() as p:
        browser = p.chromium.launch(executable_path=chromium(), args=FLAGS)
        page = browser.new_page(viewport=dict(width=width, height=height))
        page.set_default_timeout(180_000)                         # a bound, not a wait: the machine may be busy with other things
        if empty: page.route(empty, lambda r: r.fulfill(status=200, content_type='text/css', body=''))
        page.on('pageerror', lambda e: wrong.append(f'page error: {e}'))
        page.on('requestfailed', lambda r: None if 'ERR_ABORTED' in (r.failure or '') else wrong.append(f'{r.failure}: {r.url}'))
        page.on('response', lambda r: wrong.append(f'{r.status}: {r.url}') if r.status >= 400 else None)
        page.goto(url)
        try: yield page, wrong
        except BaseException:
            if os.environ.get('EDGE0_LAB_SHOTS'): page.screenshot(path=os.environ['EDGE0_LAB_SHOTS'])   # what was on the screen when it failed
            raise
        finally: browser.close()


def undrawn(figures):
    "What a browser's plotly says to figures (name -> {data, layout}): a sentence for each that cannot be drawn."
    import plotly
    from playwright.sync_api import sync_playwright
    draw = """async f => { const d = document.body.appendChild(document.createElement('div'));
        try { await Plotly.newPlot(d, f.data, f.layout); return d.querySelectorAll('.main-svg path').length ? '' : 'nothing in it' } catch (e) { return e.message } finally { d.remove() } }"""
    with sync_playwright() as p:
        browser = p.chromium.launch(executable_path=chromium(), args=FLAGS)
        try:
            page = browser.new_page()
            page.add_script_tag(path=Path(plotly.__file__).parent/'package_data'/'plotly.min.js')
            return {name: said for name, f in figures.items() if (said := page.evaluate(draw, dict(data=f['data'], layout=f['layout'])))}
        finally: browser.close()


FIND = "const shell = window.jupyterapp?.shell, mine = [...(shell?.widgets('main') ?? [])].find(w => w.context?.path === path);"


def notebook_ready(page, path):
    """The notebook is in front and its kernel answers.

    It is brought to the front for as long as it is not there: the lab brings the page of its own address to the front when it has started, and on a busy machine that comes late.
    """
    page.wait_for_function(f"""path => {{ {FIND}
        if (mine && shell.currentWidget !== mine) shell.activateById(mine.id)
        return mine && shell.currentWidget === mine && mine.sessionContext?.session?.kernel?.status === 'idle' }}""", arg=path)


def open_notebook(page, path):
    page.evaluate('path => { window.jupyterapp.commands.execute("docmanager:open", {path}) }', path)   # not awaited, here and below: such a wait has no bound
    notebook_ready(page, path)


def run_all(page, path):
    "Run every cell of a notebook that is open; what each gave, as its model has it."
    notebook_ready(page, path)
    page.evaluate('() => { window.jupyterapp.commands.execute("notebook:run-all-cells") }')
    page.wait_for_function(f"""path => {{ {FIND}
        return mine.content.widgets.every(c => c.model.type !== 'code' || !c.model.sharedModel.source.trim() || c.model.executionCount !== null) }}""", arg=path)
    notebook_ready(page, path)
    return page.evaluate(f'path => {{ {FIND} return mine.content.model.sharedModel.toJSON().cells }}', path)


def complaints(page, wrong):
    "What went wrong on a page, and every error or warning that stands in its outputs."
    return wrong + page.locator('[data-mime-type="application/vnd.jupyter.error"], [data-mime-type="application/vnd.jupyter.stderr"]').all_inner_texts()


def errors_of(cells): return [o for c in cells for o in c.get('outputs', []) if o['output_type'] == 'error']


class Panel:
    "The dashboard as a person has it: labels, buttons, words."
    def __init__(self, page): self.page, self.top = page, page.locator('.edge0').first
    def control(self, label): return self.top.locator('.widget-inline-hbox', has=self.page.locator('label', has_text=re.compile(rf'^{label}$')))
    def box(self, label): return self.control(label).locator('input, textarea').or_(self.top.get_by_placeholder(label, exact=True))
    def value(self, label): return self.box(label).input_value()
    def type(self, label, text):
        box = self.box(label)
        box.fill(text)
        box.press('Tab')
    def check(self, label): self.top.locator('label', has_text=re.compile(rf'^{label}$')).locator('input').check()
    def tab(self, label): self.top.locator('.lm-TabBar-tab', has_text=re.compile(rf'^{label}$')).click()
    def shown(self): return self.top.locator('.edge0-figures .widget-tab-contents > :not(.lm-mod-hidden)')
    def pick(self, label, text): self.control(label).locator('select').select_option(text)
    def press(self, label): self.top.get_by_role('button', name=label, exact=True).click()
    def wait_idle(self): self.page.wait_for_function("() => [...document.querySelectorAll('.edge0 button')].some(b => b.textContent.trim() === 'Run' && !b.disabled)")
    def tokens(self): return self.top.locator('.edge0-tokens button')
    def figure(self, start): self.page.wait_for_function("s => [...document.querySelectorAll('.edge0-figures .gtitle')].some(t => t.textContent.startsWith(s))", arg=start)
    def column(self, name):
        table = self.top.locator('table', has=self.page.locator('th', has_text=re.compile(rf'^{name}$')))
        at = table.locator('th').all_inner_texts().index(name)
        return [r.locator('td').nth(at).inner_text() for r in table.locator('tbody tr').all()]
    def row(self, what): return self.top.locator('tr', has=self.page.locator('td', has_text=re.compile(rf'^{what}$'))).locator('td').all_inner_texts()[1:3]
