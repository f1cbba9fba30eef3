"Behind a simulated disk: equal slots, equal routing, what is hidden; and the soak test in its short form."
import json

import edge0_lab
import numpy as np
import pytest

from edge0_lab.bench.hide import HIDE_ARMS, CostFit, balanced, exposed, hidden, hide_runs, timeline
from edge0_lab.bench.soak import bench_soak, soak, walked, watched
from edge0_lab.decode import Lab, RunConfig
from edge0_lab.settings import data_path


@pytest.fixture(scope='module')
def lab():
    with Lab.open('tiny-softmax') as l: yield l


def tokens_of(lab, n, seed=0): return np.random.default_rng(seed).integers(300, 4096, n)


def test_the_two_forms_of_the_fit(lab):
    side, queue = CostFit(lab.store, 0.84), CostFit(lab.store, 0.84, parallel=False)
    a, b = [side.due(5.0, 10**6) for _ in range(400)], [queue.due(5.0, 10**6) for _ in range(400)]
    assert max(a) <= 5 + 2.5e-3 + 1e-9 and abs(np.mean(a) - 5 - 1.17e-3 - 0.84*1.33e-3) < 1e-4
    assert (np.diff(b) > 0).all() and abs(b[-1] - 5 - 400*(1.17e-3 + 0.84*1.33e-3)) < 0.05
    again = CostFit(lab.store, 0.84)
    assert [again.due(5.0, 1) for _ in range(400)] == a                     # the same draws for every run


def test_runs_have_equal_slots_and_differ_in_one_thing(lab):
    runs = hide_runs(lab, 4, 96, lambda name: (0.001, 1e9))
    assert list(runs) == list(HIDE_ARMS) and {r.k for r in runs.values()} == {4}
    tokens = tokens_of(lab, 16)
    got = {n: exposed(lab, r, tokens[:5], tokens[5:], skip=2) for n, r in runs.items()}
    assert len({g['slot_bytes'] for g in got.values()}) == 1 and all(g['drops'] == g['fallbacks'] == 0 for g in got.values())
    a, b = got['exact, predicted routing']['trace'], got['prediction']['trace']
    assert (np.sort(a.ids[:, lab.moe_layers], -1) == np.sort(b.ids[:, lab.moe_layers], -1)).all()    # the same routing
    assert (got['exact']['trace'].predicted_ids == -1).all() and (b.predicted_ids[1:, list(lab.tier.consumers)] >= 0).all()
    waits = a.wait_s[2:].clip(0)
    assert abs(got['exact, predicted routing']['wait_consumers_ms'] - 1e3*waits[:, list(lab.tier.consumers)].sum()/9) < 1e-6
    events = timeline(b, 5)
    assert {e[0] for e in events} >= {'compute', 'head'} and all(x[2] <= x[3] for x in events)


def test_slow_loads_are_waited_for_without_a_prediction_and_less_with_one(lab):
    "6 ms a load, side by side: exact cannot but wait for each layer's; a step of prediction is longer than that."
    tokens, lazy = tokens_of(lab, 20, 1), lambda name: (0.006, 1e9)
    got = {n: [exposed(lab, r, tokens[:5], tokens[5:])] for n, r in hide_runs(lab, 4, 64, lazy).items() if n in ('exact', 'prediction')}
    assert got['exact'][0]['wait_consumers_ms'] > 6
    assert hidden(got, 'prediction')[0] > 0.2


def test_hidden_and_balanced_by_hand():
    turns = dict(exact=[dict(wait_consumers_ms=4.0), dict(wait_consumers_ms=2.0)], prediction=[dict(wait_consumers_ms=1.0), dict(wait_consumers_ms=0.0)])
    assert hidden(turns, 'prediction') == [0.75, 1.0]
    (latency, rate), compute = balanced(dict(step_ms=6.0, wait_consumers_ms=1.5, wait_others_ms=0.5, bytes=4e5))
    assert latency == 0 and compute == 4.0 and abs(4e5/rate - 4e-3) < 1e-12     # the loads of a step take its compute


def test_doors_close_behind_the_watcher(lab):
    from edge0_lab.bench.soak import DOORS
    before = [getattr(c, n) for c, n, _ in DOORS]
    with pytest.raises(KeyError):
        with watched() as seen: raise KeyError
    assert [getattr(c, n) for c, n, _ in DOORS] == before


@pytest.mark.parametrize('name', ['tiny-softmax', 'tiny-sigmoid'])
def test_soak_in_short(name):
    "Drops 0, fallbacks 0, the same bits as exact, every head counted from outside; off means off."
    rng = np.random.default_rng(0)
    with Lab.open(name) as lab:
        got = soak(lab, rng.integers(300, 4096, (2, 7)), 30)
        one = soak(lab, rng.integers(300, 4096, (1, 1)), 5, k=4)                # a prompt of one token, fewer experts
    for g in (got, one):
        assert g['differ'] == [] and g['staged']['drops'] == g['exact']['drops'] == g['staged']['fallbacks'] == 0
        assert g['on']['heads'] == g['on']['heads_expected'] > 0 < g['on']['fills']
        assert g['off']['heads'] == g['off']['fills'] == g['off']['drops'] == 0
    assert got['tokens'] == 60 and got['staged']['requests'] > 0


def test_a_bit_is_seen(lab, monkeypatch):
    import mlx.core as mx
    from edge0_lab.executors import Staged
    run, serve, calls = RunConfig(prerouter=True, trace=False, temperature=0.8), Staged.__call__, []
    a = walked(lab, run, tokens_of(lab, 6), 4)
    def bent(self, layer, x, ids):
        y = np.array(serve(self, layer, x, ids))
        calls.append(layer)
        if layer == 6 and len(calls) > 16: y.flat[0] += 1e-3
        return mx.array(y)
    monkeypatch.setattr(Staged, '__call__', bent)
    b = walked(lab, run, tokens_of(lab, 6), 4)
    assert a[1][0] == b[1][0] and a[1] != b[1]


def test_commands_refuse_nonsense():
    with pytest.raises(ValueError, match='tokens: 10'): bench_soak(tokens=10, request=500)
    with pytest.raises(ValueError, match='cold: -1'): CostFit(None, -1)


# ---- what is shipped

def shipped(name):
    file = data_path('bench', f'{name}.json')
    if not file.exists(): pytest.skip(f'not measured yet: edge0-lab bench {name} --out data/bench/{name}.json')
    return json.loads(file.read_text())


def test_shipped_hide():
    r = shipped('hide')
    assert r['simulated'] and r['k'] == 4 and len(r['disks']) == 3
    for f in r['disks'].values():
        assert len({v['slot_bytes'] for v in f['runs'].values()}) == 1 and all(v['drops'] == 0 for v in f['runs'].values())
    share = r['disks']['balanced pipe']['hidden']
    assert np.median(share['prediction']) >= 0.85 > np.median(share['slots alone'])


def test_shipped_soak():
    r = shipped('soak')
    for v in r['tiers'].values(): assert v['tokens'] >= 10_000 and v['staged']['drops'] == 0 and v['differ'] == [] and v['off']['heads'] == v['off']['fills'] == 0
