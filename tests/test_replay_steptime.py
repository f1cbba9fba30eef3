"The event model against a clock that ticks, the fit against known machines, the page cache against a list, batches against sets."
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from edge0_lab.batching import batch_recall, batch_replay, distinct_experts, marginal_distinct, sharded, together, uniform_distinct, unions
from edge0_lab.paper_machines import paper_table
from edge0_lab.policies import replay_routes
from edge0_lab.routes import Routes, iid_routes, marginals
from edge0_lab.settings import data_path
from edge0_lab.steptime import FITTED, Load, Machine, ReadQueue, fit_machine, judge_steptime, page_cache, reads_of, step_times


def ticking(m, now, n, nbytes, cold, dt=1e-5):
    "The same queue, by asking at every tick what moves."
    copying, pending, end = [], [], now              # (copied at, number); there at
    busy, t, to_disk, finished, started, pipe_free = 0, now, round(n*cold), 0, 0, 0.
    while finished < n:
        for c in [c for c in copying if c[0] <= t + 1e-12]:
            copying.remove(c)
            if c[1] < to_disk:
                pipe_free = max(pipe_free, c[0] + m.latency) + nbytes/m.rate
                pending.append(pipe_free + m.late)
            else:
                finished, busy, end = finished + 1, busy - 1, max(end, c[0])
        for p in [p for p in pending if p <= t + 1e-12]:
            pending.remove(p)
            finished, busy, end = finished + 1, busy - 1, max(end, p)
        while busy < m.readers and started < n:
            copying.append((t + m.copy, started))
            started, busy = started + 1, busy + 1
        t += dt
    return end


@given(st.integers(1, 12), st.integers(1, 5), st.sampled_from([0., 0.5, 1.]), st.integers(0, 3))
@settings(max_examples=60, deadline=None)
def test_the_queue_is_the_ticking_one(n, readers, cold, kind):
    m = Machine(copy=3e-4, latency=(0., 1e-3, 1e-3, 2e-3)[kind], rate=(1e12, 1e12, 1e7, 5e6)[kind], late=(0., 0., 1e-4, 0.)[kind], readers=readers)
    assert abs(ReadQueue(m).read(0., n, 4000, cold) - ticking(m, 0., n, 4000, cold)) < 2e-5*n


def test_a_step_with_nothing_to_read_is_a_sum():
    m = Machine(step=1e-3, layer=2e-4, call=3e-5, expert=1e-5, head=7e-5)
    none = np.zeros((4, 6), int)
    assert np.allclose(step_times(m, Load(3, 100, none, none, heads=2)), 1e-3 + 6*(2e-4 + 3e-5 + 3e-5) + 2*7e-5)


def test_reads_ahead_are_hidden_and_reads_on_demand_are_not():
    T, L = 20, 6
    n, none = np.full((T, L), 2), np.zeros((T, L), int)
    m = Machine(step=0., layer=1e-3, call=0., expert=0., head=0., ask=0., copy=0., latency=2e-3, rate=1e12, readers=16)
    assert np.allclose(step_times(m, Load(2, 1, n, none)), L*3e-3)
    early = n.copy()
    early[:, 0] = 0
    assert np.allclose(step_times(m, Load(2, 1, none, early, heads=L - 1))[2:], L*1e-3)
    slow = replace(m, latency=0., rate=1/1e-3)                                           # 10 ms of pipe for a step of 6 ms
    assert np.allclose(step_times(slow, Load(2, 1, none, early, heads=L - 1))[5:].mean(), 1e-2, rtol=0.02)


@given(st.lists(st.integers(0, 8), max_size=60), st.integers(0, 6))
def test_the_page_cache_is_a_list(keys, pages):
    kept, want = [], []
    for k in keys:
        want.append(k not in kept)
        kept = ([k] + [x for x in kept if x != k])[:pages]
    assert page_cache(keys, pages).tolist() == want


def test_reads_of_a_text_are_its_misses():
    rng = np.random.default_rng(0)
    r = Routes(np.array([[rng.choice(12, 3, replace=False) for _ in range(4)] for _ in range(30)], np.int32), np.zeros(30, np.int32), 12, (0, 1, 2, 3))
    on = reads_of(r, 20, 1)
    assert on.ahead.sum() == 0 and abs(on.demand.sum() - replay_routes(r, 'lru', 20).loads) <= 0.02*r.ids.size   # queues differ within a call
    off = reads_of(r, 40, 1, ahead=True)
    assert off.demand[1:, 1:].sum() == 0 and off.ahead.sum() > 0 and off.heads == 3
    warm = reads_of(r, 20, 1, pages=48)
    assert (warm.demand == on.demand).all() and (warm.demand*warm.cold).sum() == len({(l, e) for row in r.ids for l, ids in enumerate(row) for e in ids})


def test_the_fit_finds_a_known_machine():
    rng = np.random.default_rng(1)
    truth = Machine('truth', step=6e-4, layer=2e-4, call=5e-5, expert=2e-5, head=4e-5, ask=4e-5, copy=8e-5, late=2e-4)
    runs = []
    for k in (2, 8):
        for disk in (dict(latency=0., rate=1e12), dict(latency=2e-3, rate=1e9), dict(latency=1e-3, rate=1e7)):
            n = rng.integers(0, k + 1, (8, 6))
            for w in (Load(k, 14_000, n, 0*n), Load(k, 14_000, 0*n, n, 5)): runs.append((disk, w, float(step_times(replace(truth, **disk), w)[1:].mean())))
    found = fit_machine(Machine('guess'), runs, rounds=10, pull=0.005)
    for disk, w, s in runs: assert abs(step_times(replace(found, **disk), w)[1:].mean()/s - 1) < 0.03
    held = dict(latency=5e-3, rate=1e8)                                                    # a disk it has not seen
    for _, w, _ in runs: assert abs(step_times(replace(found, **held), w)[1:].mean()/step_times(replace(truth, **held), w)[1:].mean() - 1) < 0.1


@pytest.mark.skipif(not data_path('bench', 'steptime.json').exists(), reason='no data/bench/steptime.json yet: edge0-lab bench steptime --out data/bench/steptime.json')
def test_the_shipped_report_predicts_what_was_held_out():
    "Whole cells of (K, disk), at least twenty settings, within the larger of 15 % and the A/A spread."
    report = json.loads(data_path('bench', 'steptime.json').read_text())
    rows = judge_steptime(report)
    held = [r for r in rows if r['held']]
    assert len(held) >= 20 and not {(r['k'], r['disk']) for r in held} & {(r['k'], r['disk']) for r in rows if not r['held']}
    assert set(FITTED) <= set(report['machine_fitted']) and 0 < report['aa_spread'] < 0.5
    off = np.array([abs(r['predicted']/r['measured'] - 1) for r in held])
    assert np.median(off) < max(0.15, report['aa_spread'])
    chance = np.array([abs(np.exp(np.mean(np.log([x['measured'] for x in held])))/r['measured'] - 1) for r in held])
    assert off.mean() < 0.5*chance.mean()                                                  # better than saying the mean


# --- batches ----------------------------------------------------------------------------------------

def texts(T=60, requests=3, seed=0, E=16, k=3, L=2):
    rng = np.random.default_rng(seed)
    p = rng.dirichlet(np.full(E, 0.4), L)*0.9 + 0.1/E
    ids = np.array([[rng.choice(E, k, replace=False, p=q/q.sum()) for q in p] for _ in range(T*requests)], np.int32)
    return Routes(ids, np.repeat(np.arange(requests), T).astype(np.int32), E, tuple(range(L)), 'texts', domain=np.repeat(np.arange(requests)%2, T), domains=('a', 'b'))


def test_unions_are_sets():
    r = texts()
    who = together(r, 4, 20, 'any', 3)
    need = unions(r.ids, r.E, who)
    for t in range(20):
        for l in range(2): assert set(np.flatnonzero(need[t, l])) == {e for b in who[t] for e in r.ids[b, l]}
    assert (np.diff(who, axis=0) == 1).all() and all(len(set(r.request[who[:, b]])) == 1 for b in range(4))


def test_domains_are_chosen():
    r = texts(requests=6)
    for seed in range(5):
        assert len(set(r.domain[together(r, 4, 10, 'same', seed)[0]])) == 1
        assert len(set(r.domain[together(r, 4, 10, 'mixed', seed)[0]])) == 2
    for kw, name in ((dict(B=0), 'B'), (dict(B=2, mix='all'), 'mix'), (dict(B=2, steps=100), 'steps')):
        with pytest.raises(ValueError, match=name): together(r, **kw)
    with pytest.raises(ValueError, match='mix'): together(replace(r, domain=None), 2)


def test_independent_requests_need_what_the_marginals_say():
    r = iid_routes(texts(T=400))
    for B in (1, 3, 6): assert abs(distinct_experts(r, B, 'any', draws=12, steps=80).mean() - marginal_distinct(marginals(r), B)) < 0.25
    even = np.full((1, 16), 3/16)
    assert abs(marginal_distinct(even, 5) - uniform_distinct(16, 3, 5)) < 1e-12
    assert marginal_distinct(marginals(r), 5) < uniform_distinct(16, 3, 5)


def test_a_batch_of_one_is_the_request():
    r = texts(requests=1)
    who = np.arange(r.T)[:, None]
    for S in (4, 10, 25):
        g = batch_replay(unions(r.ids, r.E, who), 1, S, warm=0)
        sorted_ids = replace(r, ids=np.sort(r.ids, -1))
        assert abs(g.hit_rate - replay_routes(sorted_ids, 'lru', S).hit_rate) < 1e-12
    assert batch_replay(unions(r.ids, r.E, who), 1, 32, warm=20).loads_per_token < 0.5


def test_recall_of_unions_by_hand():
    ids = np.array([[[0, 1]], [[0, 1]], [[2, 3]], [[2, 3]]], np.int32)
    told = np.array([[[-1, -1]], [[0, 2]], [[-1, -1]], [[2, 1]]], np.int32)
    r = Routes(ids, np.array([0, 0, 1, 1], np.int32), 4, (0,), predicted=told)
    assert batch_recall(r, np.array([[0], [1]])) == (0.5, 0.5)
    assert batch_recall(r, np.array([[0, 2], [1, 3]])) == (0.75, 1.0)                    # {0,1,2,3} needed, {0,1,2} told
    with pytest.raises(ValueError, match='no predictions'): batch_recall(replace(r, predicted=None), np.array([[0], [1]]))


def test_traffic_by_hand():
    "Two nodes, experts dealt by rank: 0 and 2 here, 1 and 3 there."
    ids = np.array([[[0, 1]], [[0, 2]], [[0, 1]], [[0, 2]], [[0, 1]], [[3, 0]]], np.int32)
    r = Routes(ids, np.zeros(6, np.int32), 4, (0,))
    got = sharded(r, 2, D=8)                                                              # ranks: 0, 1, 2, 3
    assert got.calls == 4/6 and got.bytes == 4/6*32 and got.share == 0.5
    assert sharded(r, 2, hot=1.).calls == 0 and sharded(r, 1).calls == 0
    with pytest.raises(ValueError, match='nodes'): sharded(r, 0)


def test_the_page_says_what_the_papers_machines_do():
    "The shares of a step in the text of 12h are those of its table."
    shares = [round(100*r['model']) for r in paper_table() if 'share of the step' in r['what']]
    text = (Path(__file__).parents[1]/'nbs/12h_paper_machines.ipynb').read_text()
    assert 'the model says {} % at K = 2, {} % at K = 4 and {} % at K = 8'.format(*shares) in text
