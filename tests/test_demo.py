"The demo: what it proves, what it refuses to call proved, and a report that a browser can open without a network."
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import edge0_lab.demo as room
from edge0_lab.decode import Lab
from edge0_lab.demo import PROMPTS, counter_rows, demo, demo_runs, expert_ties, proof, served, token_hash
from edge0_lab.synth import synth_family
from lab_browser import FLAGS, chromium

FAMILIES = ('qwen3_5_moe', 'bailing_moe_v3')


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp('demo')
    for family in FAMILIES: synth_family(family, root/family)
    return root


@pytest.fixture(scope='module')
def got(folder):
    with Lab.open(folder/FAMILIES[0]) as lab: return {name: served(lab, [5, 6, 7, 8], 6, run) for name, run in demo_runs().items()}


@pytest.fixture(scope='module')
def said(folder, request):
    "One whole demo over two families; what it printed, and its report."
    import contextlib, io
    heard = io.StringIO()
    with contextlib.redirect_stdout(heard): path = demo([str(folder/f) for f in FAMILIES], folder/'report'/'demo.html', max_tokens=4)
    return heard.getvalue(), path


def test_paths_agree(got):
    t = proof(got)
    assert t['verdict'].tolist() == ['equal to the bit']*4 + ['same tokens'] and len(set(t['hash'])) == 1
    assert set(t['path']) == {'exact', 'staged', 'hot', 'whole-layer', 'resident'}
    assert t['most'][-1] > 0, 'mlx-lm adds in another order: no difference at all would mean that it did not run'


@pytest.mark.parametrize('path', ['staged', 'hot', 'whole-layer'])
def test_a_bit_is_seen(got, path):
    out, logits = got[path]
    bent = logits.copy(); bent[2, 7] = np.nextafter(bent[2, 7], np.float32(np.inf))
    assert dict(zip(*(proof({**got, path: (out, bent)})[n] for n in ('path', 'verdict'))))[path] == 'DIFFERENT'


def test_a_token_is_seen(got):
    out, logits = got['hot']
    wrong = replace(out, tokens=[*out.tokens[:-1], (out.tokens[-1] + 1) % 50])
    for name in ('hot', 'resident'): assert dict(zip(*(proof({**got, name: (wrong, logits)})[n] for n in ('path', 'verdict'))))[name] == 'DIFFERENT'


def test_ties_excuse_only_their_own_step(got):
    out, logits = got['resident']
    far = logits.copy(); far[3:] += 0.5
    verdict = lambda ties: proof({**got, 'resident': (out, far)}, lambda: ties)['verdict'][-1]
    assert verdict([]) == verdict([(2, 1), (4, 1)]) == 'DIFFERENT'
    assert verdict([(3, 2)]) == 'same tokens, experts of layer 2 tie at token 3'
    best, ours, theirs = np.argsort(logits[-1])[-2:], got['exact'][1].copy(), logits.copy()
    ours[-1, best[0]], theirs[-1, best[0]] = ours[-1].max() - 1e-5, logits[-1].max() + 1e-5      # the two best, closer than rounding
    other = replace(out, tokens=[*out.tokens[:-1], int(best[0])])
    near = {'exact': (got['exact'][0], ours), 'resident': (other, theirs)}
    assert proof(near)['verdict'][-1] == 'logits tie at token 5'
    theirs[-1, best[0]] += 1e-2                                                                 # no tie any more
    ours[-1, best[0]] -= 1e-2
    assert proof(near)['verdict'][-1] == 'DIFFERENT'


def test_a_tie_is_found(folder):
    "Two router rows made equal: the choice between them stands on an edge wherever it matters; without that, none does."
    import mlx.core as mx
    with Lab.open(folder/FAMILIES[0]) as lab:
        block, tokens = next(iter(lab.loaded.blocks.values())), list(range(2, 30))
        before = {l for _, l in expert_ties(lab, tokens, lab.native_k, eps=1e-7)}
        keep = block.choose
        ids = np.array(lab.score(tokens).trace.ids[:, block.layer])
        assert block.layer not in before
        trace = lab.score(tokens, replace(demo_runs()['exact'], trace='logits')).trace
        gap = np.sort(trace.router_logits[:, block.layer], -1)[:, ::-1]
        k = lab.native_k
        near = np.argmin(gap[:, k - 1] - gap[:, k])
        eps = float(gap[near, k - 1] - gap[near, k])
        assert (int(near), block.layer) in expert_ties(lab, tokens, k, eps=2*eps), 'moving logits by twice the smallest gap turns that choice'
        assert all(l != block.layer for _, l in expert_ties(lab, tokens, k, eps=0.4*eps))


@pytest.mark.case(17)
def test_counters_come_before_speed(said):
    "CASE 17: path, residency, cache and bytes are said before any speed, for every tier."
    text, _ = said
    for part in text.split('\n===')[1:]:
        at = {word: part.index(word) for word in ('The same greedy tokens', 'loads', 'Memory now', '\npath ', '\nresidency', '\ncache ', '\ndrops', '\nbytes', '\nmemory', '\nspeed', 'Speed, ')}
        assert list(at.values()) == sorted(at.values()), at
        assert part.count('equal to the bit') == len(PROMPTS) and 'DIFFERENT' not in part
    assert all(f'[{d}]' in text for d in PROMPTS) and 'Report: ' in text and not re.search(r'Report: /', text)


def test_contradicting_counters_stop_it(got):
    out = got['exact'][0]
    for name in ('loads', 'drops', 'hits'):
        bad = replace(out, counters={**out.counters, 'decode': {**out.counters['decode'], name: out.counters['decode'][name] + 1}})
        with pytest.raises(AssertionError, match='x: counters contradict'): counter_rows({'x': bad})
    assert counter_rows({'x': out})['loads'][0] > 0


def test_report_has_everything_once(said):
    text, path = said
    page = path.read_text(encoding='utf8')
    assert page.count('plotly.js v') == 1 and page.count('class="plotly-graph-div"') == 2*7
    assert not re.search(r'<(?:script|link|img|iframe)[^>]+(?:src|href)=', page)
    for family in FAMILIES: assert f'<h2>{family}</h2>' in page
    assert page.count('<details>') == 2*7 and len(page) < 8_000_000


def test_a_wrong_answer_ends_in_an_error(folder, monkeypatch):
    "The report is written, then the demo fails: a script that calls it must notice."
    right = room.proof
    def wrong(got, ties=None):
        t = right(got, ties)
        t['verdict'] = np.array(['DIFFERENT', *t['verdict'][1:]])
        return t
    monkeypatch.setattr(room, 'proof', wrong)
    monkeypatch.setattr(room, 'PROMPTS', {d: PROMPTS[d] for d in ('english', 'code')})
    out = folder/'wrong.html'
    with pytest.raises(AssertionError, match='english: staged DIFFERENT'): demo([folder/FAMILIES[0]], out, max_tokens=2, quiet=True)
    assert out.exists() and 'DIFFERENT' in out.read_text()


def test_bad_arguments(tmp_path):
    with pytest.raises(ValueError, match='max_tokens: 1; allowed: from 2'): demo(max_tokens=1)
    with pytest.raises(ValueError, match='nowhere'): demo('nowhere', tmp_path/'x.html')
    assert not (tmp_path/'x.html').exists()


def test_token_hash():
    assert token_hash([1, 2]) == token_hash(np.array([1, 2])) != token_hash([2, 1]) and len(token_hash([])) == 8


@pytest.mark.browser
def test_report_in_a_browser(said):
    "No page error, no console error, no request at all, every figure drawn."
    from playwright.sync_api import sync_playwright
    binary = chromium()
    asked, errors = [], []
    with sync_playwright() as p:
        browser = p.chromium.launch(executable_path=binary, args=FLAGS)
        page = browser.new_page(viewport=dict(width=900, height=1200))
        page.on('request', lambda r: asked.append(r.url)); page.on('pageerror', lambda e: errors.append(str(e)))
        page.on('console', lambda m: errors.append(m.text) if m.type == 'error' else None)
        page.goto(said[1].as_uri())
        page.wait_for_function('document.querySelectorAll(".plotly-graph-div .main-svg").length >= 14', timeout=60_000)
        wide = page.evaluate('[...document.querySelectorAll(".plotly-graph-div")].map(d => d.getBoundingClientRect().width)')
        browser.close()
    assert not errors and [u for u in asked if not u.startswith(('file:', 'blob:', 'data:'))] == []
    assert len(wide) == 14 and max(wide) <= 760
