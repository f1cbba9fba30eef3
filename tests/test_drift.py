"Drift: the chain of features, the streams, the curves, and what is shipped."
import json
from dataclasses import replace

import edge0_lab
import mlx.core as mx
import numpy as np
import pytest

from edge0_lab.bench import drift as room
from edge0_lab.bench.drift import by_position, own_choices, served_run, state_distance, streams
from edge0_lab.distill import Corpus, collect, frozen, guess, predicted
from edge0_lab.prerouter import find_heads, read_heads
from edge0_lab.settings import tier


@pytest.fixture(scope='module', params=('tiny-softmax', 'tiny-sigmoid'))
def served(request):
    t = tier(request.param)
    return t, frozen(t.checkpoint), read_heads(find_heads(t.checkpoint, 8))


def test_own_choices_one_position_at_a_time(served):
    "Against a plain loop in the order of decode: token by token, layer by layer."
    t, base, heads = served
    seen = collect(base, np.random.default_rng(0).integers(0, 4096, (2, 9)), heads.owners, 8)
    got = own_choices(seen, heads)
    for b in range(2):
        said, last = {}, {}
        for p in range(9):
            told, said = said, {}                                             # what this position says is for the next one
            for j, N in enumerate(heads.owners):
                ids = told.get(N)
                if j == 0 or p == 0 or ids is None: ids = seen.ids[j, b, p]
                assert set(ids.tolist()) == set(got.ids[j, b, p].tolist())
                before = np.full(8, heads.E) if N not in last else last[N]
                args = (mx.array(v[None].astype(d)) for v, d in ((seen.h[j, b, p], np.float32), (ids, np.uint32), (before, np.uint32)))
                logits = np.array(heads.head(N)(*args))
                last[N] = ids
                said[N + 1] = seen.router(logits, seen.bias[N + 1], check=False)[0][0]


def test_the_chain_of_features_ends(served):
    t, base, heads = served
    seen = collect(base, np.random.default_rng(1).integers(0, 4096, (4, 40)), heads.owners, 8)
    bent = replace(seen, ids=seen.ids.copy())
    bent.ids[0, :, 10] = (seen.ids[0, :, 10] + 7) % 64
    a, b = own_choices(seen, heads), own_choices(bent, heads)
    moved = (predicted(a, heads) != predicted(b, heads)).any((1, 3))           # (n, T-1)
    assert moved[0, 10] and not moved[:, :10].any() and not moved[:, 10 + 2*len(heads.owners):].any()


def test_two_streams_by_hand(served):
    t, base, heads = served
    seen = collect(base, np.random.default_rng(2).integers(0, 4096, (2, 8)), heads.owners, 8)
    one = predicted(seen, heads)
    rng = np.random.default_rng(0)
    two = one + 0.3*rng.standard_normal(one.shape).astype(np.float32)
    s = streams(seen, one, two)
    p, q = one.astype(np.float64), two.astype(np.float64)
    if seen.router.kind == 'softmax':
        p, q = (v - np.log(np.exp(v).sum(-1, keepdims=True)) for v in (p, q))
        want = (np.exp(p)*(p - q)).sum(-1)
    else:
        a, b = (1/(1 + np.exp(-v)) for v in (p, q))
        want = (a*np.log(a/b) + (1 - a)*np.log((1 - a)/(1 - b))).sum(-1)
    assert np.abs(s['kl'] - want.mean(0)).max() < 1e-3*max(1, want.max())
    sets = [[len(set(x) & set(y)) for x, y in zip(seen.choice(one)[j].reshape(-1, 8).tolist(), seen.choice(two)[j].reshape(-1, 8).tolist())] for j in range(len(heads.owners))]
    assert (s['overlap'].reshape(-1) == np.mean(sets, 0)).all()


def test_native_routing_has_no_drift(served):
    t, base, heads = served
    tokens = np.random.default_rng(3).integers(0, 4096, (2, 20))
    run = served_run(base, tokens, heads, t.consumers, native=np.ones(20, bool))
    assert np.abs(run['state']).max() < 1e-6 and np.abs(run['loss']).max() < 1e-4
    plain = served_run(base, tokens, heads, t.consumers)
    assert (plain['state'][:, 1:] > 0).all()
    cured = served_run(base, tokens, heads, t.consumers, native=(np.arange(20) < 1) | (np.arange(20) > 9))
    assert np.abs(cured['state'][:, :9] - plain['state'][:, :9]).max() < 1e-4 < np.abs(cured['state'] - plain['state']).max() and cured['state'][:, 9:].mean() < plain['state'][:, 9:].mean()


def test_bins_and_their_intervals():
    per = np.arange(48.).reshape(3, 16)
    got = by_position(per, 8)
    assert got['at'] == [1, 9] and got['mean'] == [19.5, 27.5]
    assert all(lo <= m <= hi for lo, m, hi in zip(got['low'], got['mean'], got['high']))
    assert by_position(np.ones((2, 20)), 8)['mean'] == [1, 1]                  # what does not fill a bin is left out


def test_the_command(tmp_path, monkeypatch):
    monkeypatch.setenv('EDGE0_LAB_CACHE', str(tmp_path/'cache'))
    rng = np.random.default_rng(0)
    corpus = Corpus({'train/a': rng.integers(0, 4096, 2000), 'heldout/a': rng.integers(0, 4096, 300)})
    monkeypatch.setattr(Corpus, 'open', classmethod(lambda cls, path=None: corpus))
    out = tmp_path/'drift.json'
    room.bench_drift('tiny-sigmoid', 8, heldout=2, T=40, prompt=4, windows=56, steps=1, out=str(out))
    got = json.loads(out.read_text())['8']
    assert set(got['heads']) == {"the gate's choices", 'shipped'} and set(got['loss']) == {'native', 'previous', "the gate's choices", 'shipped'}
    for h in got['heads'].values():
        assert set(h['served']) == {'given text', 'given text, native in the middle', 'its own text'}
        assert all(len(c['mean']) == 4 for run in h['served'].values() for c in run.values())


@pytest.mark.parametrize('name', ['tiny-softmax', 'tiny-sigmoid'])
def test_what_is_shipped(name):
    file = tier(name).checkpoint/'drift.json'
    if not file.exists(): pytest.skip(f'not measured yet: edge0-lab bench drift --tier {name} --k 8')
    for k, d in json.loads(file.read_text()).items():
        flat = np.array(d['heads']["the gate's choices"]['features']['kl']['mean'])
        assert flat[-8:].mean() < 2*flat[1:9].mean()                           # features alone do not pile up
        assert d['loss']['previous']['of_previous'] == [1, 1, 1]
