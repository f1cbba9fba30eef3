"A run replayed from its trace has the counters of the run; slots and policies against slow oracles."
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from edge0_lab.decode import Lab, RunConfig
from edge0_lab.policies import Belady, Lfu, Popularity, S3Fifo, _call, replay_routes, top_experts
from edge0_lab.replay import _reproduced
from edge0_lab.replay_slots import ReplaySlots, replay_run
from edge0_lab.settings import data_path
from edge0_lab.routes import Routes, check_routes, draw_sets, from_trace, iid_routes, marginals, read_routes, shuffled_routes, write_routes

PROMPT = 'The city of Paris is the capital of '
NAMES = ('requests', 'hits', 'covered', 'misses', 'loads', 'evictions', 'fallbacks', 'calls')


def texts(draw, T=(1, 30), E=(3, 9)):
    "A random routed text; the same sets come again now and then."
    E = draw(st.integers(*E))
    k, L, T = draw(st.integers(1, min(3, E))), draw(st.integers(1, 3)), draw(st.integers(*T))
    rng = np.random.default_rng(draw(st.integers(0, 2**20)))
    pool = [[rng.choice(E, k, replace=False) for _ in range(3)] for _ in range(L)]
    ids = np.array([[pool[l][rng.integers(3)] if rng.random() < 0.5 else rng.choice(E, k, replace=False) for l in range(L)] for _ in range(T)], np.int32)
    return Routes(ids, np.zeros(T, np.int32), E, tuple(range(L)), 'random')


routed = st.composite(lambda draw: texts(draw))()


# --- the counters of recorded runs -------------------------------------------------------------------

RUNS = {
    'on demand, tight': RunConfig(decode='exact', cache_slots=8),
    'on demand, one call does not fit': RunConfig(decode='exact', cache_slots=5),
    'on demand, roomy': RunConfig(decode='exact', cache_slots=200),
    'on demand, least often': RunConfig(decode='exact', cache_slots=100, policy='lfu'),
    'prompt on demand': RunConfig(decode='exact', prefill='exact', cache_slots=90, prefill_chunk=5),
    'hot': RunConfig(decode='hot', hot_slots=5, cache_slots=30),
    'hot, prompt too': RunConfig(decode='hot', prefill='hot', hot_slots=12, cache_slots=8, prefill_chunk=4),
    'staged, sticky': RunConfig(cache_slots=16),
    'staged, few slots': RunConfig(stage_slots=40, cache_slots=0),
    'predicted': RunConfig(prerouter='next-gate'),
    'predicted, little room': RunConfig(prerouter='next-gate', stage_slots=90, cache_slots=3, fill_thread='main'),
    'previous': RunConfig(prerouter='previous', cache_slots=20),
    'same token': RunConfig(prerouter='same-token', cache_slots=20),
    'oracle': RunConfig(prerouter='oracle', cache_slots=100),
    'shuffle': RunConfig(prerouter='shuffle', cache_slots=40),
    'trained heads': RunConfig(prerouter=True, k=4),
    'mixed paths': RunConfig(prerouter='next-gate', paths={3: 'exact', 4: 'hot', 5: 'exact'}, cache_slots=40),
}


@pytest.fixture(scope='module', params=['tiny-softmax', 'tiny-sigmoid'])
def lab(request):
    with Lab.open(request.param) as lab: yield lab


@pytest.mark.parametrize('what', RUNS)
def test_a_run_replayed_has_its_counters(lab, what):
    out = lab.generate(PROMPT, 10, RUNS[what], stop=())
    got, want = replay_run(out.trace), out.counters['decode']
    for n in ('path', 'loads', 'hits', 'covered'):
        wrong = np.argwhere(getattr(got, n) != getattr(out.trace, n))
        assert not len(wrong), (n, wrong[0].tolist(), getattr(got, n)[tuple(wrong[0])], getattr(out.trace, n)[tuple(wrong[0])])
    assert got.counters == {n: want[n] for n in NAMES}
    assert got.counters['loads'] > 0


@pytest.mark.parametrize('policy', [S3Fifo, Popularity])
def test_a_policy_object_acts_live_as_in_replay(lab, policy):
    make = (lambda: policy(70)) if policy is S3Fifo else policy
    out = lab.generate(PROMPT, 10, RunConfig(decode='exact', cache_slots=70, policy=make()), stop=())
    got = replay_run(out.trace, make())
    assert got.counters == {n: out.counters['decode'][n] for n in NAMES}
    with pytest.raises(ValueError, match='policy: None'): replay_run(out.trace)


def test_a_wrong_trace_is_not_reproduced(lab):
    "The comparison can fail: other ids, other slots."
    out = lab.generate(PROMPT, 10, RunConfig(decode='exact', cache_slots=80), stop=())
    ids = out.trace.ids.copy()
    ids[3] = ids[2]
    assert replay_run(replace(out.trace, ids=ids)).counters != replay_run(out.trace).counters
    meta = {**out.trace.meta, 'about': {**out.trace.meta['about'], 'slots': [{**out.trace.meta['about']['slots'][0], 'total': 60}]}, 'slots_of': {n: 60 for n in out.trace.meta['slots_of']}}
    assert replay_run(replace(out.trace, meta=meta)).counters['loads'] > replay_run(out.trace).counters['loads']


@pytest.mark.parametrize('run, name', [(RunConfig(hold='double'), 'hold'), (RunConfig(decode='whole-layer'), 'path')])
def test_what_cannot_be_replayed_is_refused(lab, run, name):
    with pytest.raises(ValueError, match=name): replay_run(lab.generate(PROMPT, 2, run, stop=()).trace)


def test_a_trace_of_predictions_keeps_its_last_promises(lab):
    "What was asked for the step that did not come is in the counters, so a trace without it (as they once were) is not compared."
    trace = lab.generate(PROMPT, 4, RunConfig(prerouter='next-gate'), stop=()).trace
    assert trace.meta['promised']
    old = replace(trace, meta={n: v for n, v in trace.meta.items() if n != 'promised'})
    assert 'every counter comes out' in _reproduced(trace) and 'every call comes out; totals are not compared' in _reproduced(old)
    ids = old.ids.copy()
    ids[3] = ids[1]
    assert 'figures of its calls differ' in _reproduced(replace(old, ids=ids))


# --- slots and policies -----------------------------------------------------------------------------

def plain_lru(r, S, listed=True):
    "A list, oldest first; a call holds what it finds, then loads one by one."
    cache, hits = [], 0
    for row in r.ids.tolist():
        for l, ids in enumerate(row):
            call = [(l, e) for e in ids]
            found = [x for x in call if x in cache]
            hits += len(found)
            cache = [x for x in cache if x not in call]
            cache = cache[len(cache) + len(call) - S:] if len(cache) + len(call) > S else cache
            cache += call
    return hits


@given(routed, st.integers(3, 30))
@settings(max_examples=60, deadline=None)
def test_lru_is_a_list(r, S):
    got = replay_routes(r, 'lru', S)
    assert got.hits == plain_lru(r, S) and got.hits + got.misses == r.ids.size and got.loads == got.misses


def fewest_loads(r, S):
    "Every way to evict, by search over the sets that may be resident."
    from itertools import combinations
    states = {frozenset(): 0}
    for row in r.ids.tolist():
        for l, ids in enumerate(row):
            call, new = frozenset((l, e) for e in ids), {}
            for have, cost in states.items():
                need = cost + len(call - have)
                rest = have - call
                room = min(len(rest), S - len(call))
                for keep in combinations(sorted(rest), room):
                    now = call | frozenset(keep)
                    if need < new.get(now, 1 << 30): new[now] = need
            states = new
    return min(states.values())


@given(st.composite(lambda draw: texts(draw, (1, 7), (3, 5)))(), st.integers(3, 5))
@settings(max_examples=40, deadline=None)
def test_belady_is_the_least_of_all_ways(r, S):
    assert replay_routes(r, 'belady', S).loads == fewest_loads(r, S)


@given(routed, st.integers(3, 20))
@settings(max_examples=60, deadline=None)
def test_nothing_is_lost_and_nothing_beats_belady(r, S):
    best = replay_routes(r, 'belady', S).loads
    for p in ('lru', 'lfu', 's3-fifo', 'popularity', 'oracle', 'pins'):
        for scope in ('global', 'layer'):
            g = replay_routes(r, p, S, scope)
            assert g.hits + g.covered + g.misses == r.ids.size and g.loads >= g.misses >= 0 and g.unused <= g.loads, (p, scope)
            if p in ('lru', 'lfu', 's3-fifo') and scope == 'global': assert g.loads >= best


@given(routed, st.integers(1, 2), st.sampled_from(('global', 'layer')))
@settings(max_examples=60, deadline=None)
def test_a_call_in_parts_is_one_use(r, S, scope):
    "Fewer slots than one call needs: the rest of the call is not another use, for any policy."
    best = replay_routes(r, 'belady', S, scope)
    for p in ('belady', 'lru', 'lfu', 's3-fifo', 'popularity', 'oracle'):
        g = replay_routes(r, p, S, scope)
        assert g.hits + g.covered + g.misses == r.ids.size, p
        if p in ('lru', 'lfu', 's3-fifo'): assert g.loads >= best.loads, p
    policy, seen = Lfu(), []
    policy.touch = seen.append
    _call(ReplaySlots(S, policy, listed=True), 0, [4, 5, 6])
    assert seen == [(0, 4), (0, 5), (0, 6)]


def test_policies_by_hand():
    "S3-FIFO: who was used twice moves to main, who came back as a ghost too."
    p = S3Fifo(4, 0.25)
    for key in 'aaabcd': p.touch(key)
    assert p.victim(dict.fromkeys('abcd')) == 'b' and 'a' in p.main and 'b' in p.ghost
    p.touch('b')
    assert 'b' in p.main and 'b' not in p.ghost
    q = Lfu()
    for key in 'aab': q.touch(key)
    assert q.victim(['a', 'b', 'c']) == 'c'
    m = Popularity(prior=0.5)
    for e in (1, 1, 2): m.touch((0, e))
    m.begin()
    m.touch((0, 2))
    assert m.likely(0, 1) == [2] and m.victim([(0, 1), (0, 2)]) == (0, 1)


def test_oracle_prefetch_leaves_nothing_to_wait_for():
    rng = np.random.default_rng(0)
    ids = np.stack([np.stack([rng.choice(16, 4, replace=False) for _ in range(3)]) for _ in range(40)]).astype(np.int32)
    r = Routes(ids, np.zeros(40, np.int32), 16, (0, 1, 2))
    g = replay_routes(r, 'oracle', 4*(3 + 2))
    first = 4*(3 + 1)                                   # calls before the first announcement is due
    assert g.misses <= first and g.covered > 0
    told = replace(r, predicted=np.where(np.arange(40)[:, None, None] % 2 == 0, ids, -1))
    half = replay_routes(told, 'predicted', 20)
    assert g.misses < half.misses < replay_routes(r, 'lru', 20).misses
    wrong = replace(r, predicted=np.stack([np.stack([rng.choice(16, 4, replace=False) for _ in range(3)]) for _ in range(40)]).astype(np.int32))
    assert replay_routes(wrong, 'predicted', 20).unused > 0


def test_pins_are_membership():
    rng = np.random.default_rng(1)
    r = Routes(rng.permuted(np.tile(np.arange(8), (50, 2, 1)), axis=2)[..., :3].astype(np.int32), np.zeros(50, np.int32), 8, (0, 1))
    pinned = top_experts(r, 5)
    assert pinned.sum() == 5
    want = sum(pinned[l, e] for row in r.ids.tolist() for l, ids in enumerate(row) for e in ids)
    assert replay_routes(r, 'pins', 5).hits == want
    assert (top_experts(r, 3, 'layer').sum(1) == 3).all()


def test_fresh_requests_start_cold():
    ids = np.zeros((6, 1, 1), np.int32)
    r = Routes(ids, np.array([0, 0, 1, 1, 2, 2], np.int32), 2, (0,))
    assert replay_routes(r, 'lru', 1).hits == 5 and replay_routes(r, 'lru', 1, fresh=True).hits == 3


def test_impossible_arguments_are_named():
    r = Routes(np.zeros((2, 1, 1), np.int32), np.zeros(2, np.int32), 2, (0,))
    for kw, name in ((dict(capacity=0), 'capacity'), (dict(scope='all'), 'scope'), (dict(policy='arc'), 'policy'), (dict(policy='predicted'), 'predicted')):
        with pytest.raises(ValueError, match=name): replay_routes(r, **kw)
    with pytest.raises(ValueError, match='capacity'): ReplaySlots(True)


# --- routed texts -----------------------------------------------------------------------------------

@given(routed)
@settings(max_examples=30, deadline=None)
def test_a_csv_comes_back(tmp_path_factory, r):
    path = write_routes(r, tmp_path_factory.mktemp('csv')/'r.csv')
    got = read_routes(path, r.E)
    assert (got.ids == r.ids).all() and got.layers == r.layers and (got.request == r.request).all()


HEAD = 'request,token,layer,e0,e1'
GOOD = ['0,0,0,1,2', '0,0,3,0,1', '0,1,0,2,3', '0,1,3,1,0', '1,0,0,3,1', '1,0,3,2,0']


@pytest.mark.parametrize('rows, row, column, word', [
    ([*GOOD[:2], '0,1,0,2', *GOOD[3:]], 4, 'e1', 'fields'),
    ([*GOOD[:2], '0,1,0,2,', *GOOD[3:]], 4, 'e1', 'k varies'),
    ([*GOOD[:2], '0,1,0,2,x', *GOOD[3:]], 4, 'e1', 'whole number'),
    ([*GOOD[:2], '0,1,0,2,2.5', *GOOD[3:]], 4, 'e1', 'whole number'),
    ([*GOOD[:2], '0,1,0,2,9', *GOOD[3:]], 4, 'experts', 'allowed: 0 to 3'),
    ([*GOOD[:2], '0,1,0,2,-1', *GOOD[3:]], 4, 'experts', 'allowed: 0 to 3'),
    ([*GOOD[:2], '0,1,0,2,2', *GOOD[3:]], 4, 'experts', 'twice'),
    ([*GOOD[:3], *GOOD[4:]], 4, 'layer', 'each token needs'),
    (GOOD[1:], 2, 'layer', 'each token needs'),
    (GOOD[:-1], 6, 'layer', 'each token needs'),
    ([GOOD[0], GOOD[1].replace('0,0,3', '0,0,4'), *GOOD[2:]], 3, 'layer', 'each token needs'),
    ([*GOOD[2:4], *GOOD[:2], *GOOD[4:]], 4, 'token', 'ascending'),
    ([*GOOD, '0,5,0,1,2', '0,5,3,1,2'], 8, 'request', 'a second time'),
    ([], 2, 'request', 'no rows'),
    ([*GOOD[:2], '0,1,0,2,3,1', *GOOD[3:]], 4, 'e1', '6 fields'),                         # an expert too many is not dropped
    ([*GOOD[:2], '0,1,0,2,3#1', *GOOD[3:]], 4, 'e1', 'whole number'),                     # nothing in a row is a comment
    (['# made by hand', *GOOD], 2, 'token', 'fields'),
    ([*GOOD[:2], '0,1,0,4294967298,3', *GOOD[3:]], 4, 'e0', 'nine digits'),               # would be 2 in 32 bits
    ([*GOOD[:2], '0,1,0,99999999999999999999,3', *GOOD[3:]], 4, 'e0', 'nine digits'),
    ([*GOOD[:2], '0,1,0,1_0,3', *GOOD[3:]], 4, 'e0', 'whole number'),
    ([*GOOD[:2], '0,1,0,\u0662,3', *GOOD[3:]], 4, 'e0', 'whole number'),
    (['', '', *GOOD[:2], '0,1,0,2,2', *GOOD[3:]], 6, 'experts', 'twice'),                  # rows as an editor counts them
    ([*GOOD[:2], '', '0,1,0,2,9', *GOOD[3:]], 5, 'experts', 'allowed: 0 to 3'),
    ([*GOOD[:2], '0,-1,0,2,3', *GOOD[3:]], 4, 'token', 'from 0'),
    ([g.replace(',3,', ',-3,', 1) if g.split(',')[2] == '3' else g for g in GOOD], 3, 'layer', 'from 0'),
    (['-1' + g[1:] for g in GOOD[:4]], 2, 'request', 'from 0'),
    ([*GOOD[:2], '0,1,0,2,' + '3'*200_000, *GOOD[3:]], 4, '1', 'not a CSV'),
])
def test_a_bad_csv_is_refused_with_row_and_column(tmp_path, rows, row, column, word):
    path = tmp_path/'bad.csv'
    path.write_text('\n'.join([HEAD, *rows]) + '\n')
    with pytest.raises(ValueError, match=f'bad.csv: row {row}, column {column}') as e: read_routes(path, 4)
    assert word in str(e.value)


@pytest.mark.parametrize('header, word', [('request,token,e0,e1', 'layer'), ('request,token,layer', 'experts'), ('request,token,layer,layer,e0', 'layer'),
                                          ('request,token,layer,domain,e0,e1', 'domain'), ('request,token,layer,e0,e1,e1', 'e1'), ('request,token,layer,e0,e1,', '6')])
def test_a_bad_header_is_refused(tmp_path, header, word):
    (tmp_path/'bad.csv').write_text(header + '\n' + ','.join(map(str, range(header.count(',') + 1))) + '\n')   # whole numbers, that could be experts
    with pytest.raises(ValueError, match=f'row 1, column {word}'): read_routes(tmp_path/'bad.csv')


def test_one_column_of_experts(tmp_path):
    (tmp_path/'a.csv').write_text('token,request,layer,experts\n0,7,1,3 2\n0,7,2,0 1\n1,7,1,1 0\n1,7,2,2 3\n')
    r = read_routes(tmp_path/'a.csv')
    assert r.ids.tolist() == [[[3, 2], [0, 1]], [[1, 0], [2, 3]]] and r.layers == (1, 2) and r.E == 4 and r.requests == 1
    (tmp_path/'b.csv').write_text('token,request,layer,experts\n0,7,1,3 2\n0,7,2,0\n')
    with pytest.raises(ValueError, match='row 3, column experts: 1 experts; allowed: 2'): read_routes(tmp_path/'b.csv')


def test_no_text_and_no_csv(tmp_path):
    (tmp_path/'x.csv').write_bytes(b'\xff\xfe\x00')
    with pytest.raises(ValueError, match='x.csv: row 1'): read_routes(tmp_path/'x.csv')
    long = ['0,%d,0,1,2' % t for t in range(4000)]
    (tmp_path/'y.csv').write_bytes('\n'.join([HEAD, *long]).encode() + b'\n0,4000,0,\xff,2\n')
    with pytest.raises(ValueError, match='y.csv: row 4002, column 4: not UTF-8'): read_routes(tmp_path/'y.csv')


@pytest.mark.parametrize('text', ['\ufeff' + '\n'.join([HEAD, *GOOD]), '\r\n'.join([HEAD, *GOOD, '']), '\r'.join([HEAD, *GOOD]), '\n'.join([HEAD, '', *GOOD, '', '']), '\n'.join([HEAD, *GOOD]).replace(',', ', '), '\n'.join([HEAD, *GOOD]).replace('0,0,0,1', '0,0,0,"1"')],
                         ids=['byte order mark', 'dos', 'old mac', 'empty lines', 'blanks', 'quotes'])
def test_what_programs_write_is_read(tmp_path, text):
    (tmp_path/'a.csv').write_bytes(text.encode())
    r = read_routes(tmp_path/'a.csv', 4)
    assert r.ids.tolist() == [[[1, 2], [0, 1]], [[2, 3], [1, 0]], [[3, 1], [2, 0]]] and r.layers == (0, 3) and r.requests == 2


def test_how_many_experts_is_a_sane_number(tmp_path):
    (tmp_path/'a.csv').write_text(f'{HEAD}\n0,0,0,1,70000\n')
    with pytest.raises(ValueError, match='row 2, column experts: expert 70000; allowed: 0 to 65535'): read_routes(tmp_path/'a.csv')
    for E in (0, -1, True, 2.0, 10**9):
        with pytest.raises(ValueError, match='E: '): read_routes(tmp_path/'a.csv', E)


def test_the_command_says_what_is_wrong(tmp_path, capsys):
    from edge0_lab.cli import main
    def said(*words):
        code = main(['replay', *map(str, words)])
        return code, ''.join(capsys.readouterr())
    path = tmp_path/'A.CSV'
    path.write_text('\n'.join([HEAD, *GOOD]))
    code, text = said(path, '--capacity', 4)
    assert code == 0 and 'belady' in text and 'k = 2 of E = 4' in text
    trace = data_path('traces', 'tiny-softmax-exact.npz')
    for words, name in (((path, '--capacity', 0), 'capacity: 0'), ((path, '--scope', 'all'), 'scope'), ((path, '--experts', 3), 'row 4, column experts'), ((trace, '--experts', 64), 'experts: 64'),
                        ((tmp_path/'none.csv',), 'not a file'), (('curves', '--ks', 'two', '--out', tmp_path), 'ks'), (('curves', '--ks', '2', '--windows', 0, '--out', tmp_path), 'windows: 0'), (('curves', '--tiers', 'huge', '--out', tmp_path), 'huge')):
        code, text = said(*words)
        assert code == 2 and name in text, (words, text)


@pytest.mark.case(18)
def test_controls_keep_the_marginals():
    rng = np.random.default_rng(0)
    p = rng.dirichlet(np.full(12, 0.4), 2)
    ids = np.stack([[rng.choice(12, 3, replace=False, p=0.9*q + 0.1/12) for q in p] for _ in range(3000)]).astype(np.int32)
    r = Routes(ids, np.zeros(3000, np.int32), 12, (0, 1))
    assert np.array_equal(marginals(shuffled_routes(r)), marginals(r))
    drawn = check_routes(iid_routes(r))
    m = marginals(r)
    assert (np.abs(marginals(drawn) - m) < 5*np.sqrt(m*(1 - m)/3000) + 1e-9).all()
    always = draw_sets(np.array([1., 1., 0.5, 0.5]), 500, 3, rng)
    assert ((always == 0).any(1) & (always == 1).any(1)).all()


def test_a_trace_without_gates_is_refused(lab):
    t = lab.generate(PROMPT, 3, RunConfig(decode='exact'), stop=()).trace
    native = t.native_ids.copy()
    native[1, t.layers[2]] = -1
    with pytest.raises(ValueError, match=f'native_ids at step 1, layer {t.layers[2]}'): from_trace(replace(t, native_ids=native), 'native_ids')
    assert (from_trace(t).ids == t.ids[:, list(t.layers)]).all()
