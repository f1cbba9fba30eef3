"""The pictures that GitHub shows: `python tools/pictures.py` writes nbs/images. Made on purpose, never by a test.

dashboard.png  the dashboard of `make lab` in a real browser, after two runs, a click and a pin
others         probes of the shipped traces, as drawn on 14_probes
"""
import sys, tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
OUT = ROOT/'nbs'/'images'
sys.path.insert(0, str(ROOT/'tests'))


def small(path, colours=128):
    "Fewer colours: a screenshot of text and flat areas loses nothing."
    from PIL import Image
    with Image.open(path) as im: im.convert('RGB').quantize(colours, dither=Image.Dither.NONE).save(path, optimize=True)
    print(f'pictures: {path.relative_to(ROOT)}, {path.stat().st_size >> 10} KiB')


def dashboard(path):
    from lab_browser import Panel, lab, page_at
    with tempfile.TemporaryDirectory() as tmp, lab(Path(tmp)) as url, page_at(url, 1360, 1400) as (page, wrong):
        page.wait_for_selector('.edge0 button:has-text("Run")')
        panel = Panel(page)
        panel.type('tokens', '32'), panel.press('Run')
        panel.tokens().first.wait_for()
        panel.wait_idle()
        panel.press('Pin'), panel.pick('prerouter', 'on'), panel.press('Run')
        page.wait_for_selector('.edge0 :text("Against the pinned run")')
        panel.wait_idle()
        panel.tokens().nth(7).click()
        panel.figure('Experts of step 7')
        page.wait_for_timeout(2000)
        page.evaluate("document.querySelector('.edge0').scrollIntoView(true)")
        panel.top.screenshot(path=str(path))
        assert not wrong, wrong


def figures():
    import edge0_lab  # noqa: F401
    from edge0_lab.probes import PROBES, save_png
    from edge0_lab.settings import data_path
    from edge0_lab.trace import Trace
    staged, timed = (Trace.load(data_path('traces', f'{n}.npz')) for n in ('tiny-softmax-staged', 'decode-next-gate-simulated'))
    for name, trace in (('expert_map', staged), ('slot_table', staged), ('step_timeline', timed)):
        small(save_png(PROBES[name](trace), OUT/f'{name}.png', 1.5), 64)


if __name__ == '__main__':
    OUT.mkdir(exist_ok=True)
    figures()
    dashboard(OUT/'dashboard.png')
    small(OUT/'dashboard.png')
