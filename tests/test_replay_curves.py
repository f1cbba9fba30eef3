"Curves from one pass against caches that are replayed capacity by capacity, and against lists."
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from edge0_lab.hitcurves import ONE_PASS, curve_rows, hit_curve, lru_distances, priorities, priority_distances, write_rows
from edge0_lab.policies import POLICIES, replay_routes, top_experts
from edge0_lab.replay import make_curves, open_routes, replay_command, replay_table
from edge0_lab.routes import Routes, shipped_routes, tier_routes
from edge0_lab.settings import data_path


@st.composite
def batches(draw):
    "(n, k) items with reuse, and how many there are."
    items, seed = draw(st.integers(1, 40)), draw(st.integers(0, 2**20))
    k, rng = draw(st.integers(1, min(5, items))), np.random.default_rng(seed)
    near = rng.permutation(items)[:max(k, items//3)]
    return np.array([rng.choice(near if rng.random() < 0.6 else items, k, replace=False) for _ in range(draw(st.integers(1, 60)))], np.int32), items


def list_distances(b, n):
    "Accesses by distance, from a list with the latest in front; the last cell counts first uses."
    stack, hist = [], np.zeros(n + 1, int)
    for row in b.tolist():
        for x in row: hist[stack.index(x) if x in stack else n] += 1
        for x in row:
            if x in stack: stack.remove(x)
            stack.insert(0, x)
    return hist


@given(batches())
@settings(max_examples=150, deadline=None)
def test_distances_are_those_of_a_list(case):
    b, n = case
    want = list_distances(b, n)
    assert (lru_distances([b], n) == want).all()
    assert (lru_distances([b[:7], b[7:]], n) == want).all()                     # in pieces
    k = b.shape[1]
    assert (np.cumsum(priority_distances(b, priorities(b, 'lru'), n))[k - 1:] == np.cumsum(want)[k - 1:]).all()


def test_a_long_trace_is_squeezed_many_times():
    "More accesses than the time line has places, several times over."
    rng = np.random.default_rng(0)
    b = np.array([rng.choice(700, 8, replace=False) for _ in range(3000)], np.int32)
    assert b.size > 4*4096
    assert (lru_distances([b], 700) == list_distances(b, 700)).all()


@given(batches(), st.sampled_from(['lru', 'lfu', 'belady']))
@settings(max_examples=100, deadline=None)
def test_every_capacity_of_a_curve_is_a_replay(case, policy):
    b, n = case
    r = Routes(b[:, None], np.zeros(len(b), np.int32), n, (0,))
    curve = hit_curve(r, policy)
    assert np.isnan(curve[:r.k]).all() and (np.diff(curve[r.k:]) >= -1e-12).all()
    for S in {r.k, (r.k + n)//2, n}: assert abs(curve[S] - replay_routes(r, policy, S).hit_rate) < 1e-12, S


def small_text(seed=0, T=80, L=3, E=12, k=3):
    rng = np.random.default_rng(seed)
    p = rng.dirichlet(np.full(E, 0.5), L)*0.9 + 0.1/E
    return Routes(np.array([[rng.choice(E, k, replace=False, p=q/q.sum()) for q in p] for _ in range(T)], np.int32), np.repeat([0, 1], T//2).astype(np.int32), E, tuple(range(L)), 'small')


@pytest.mark.parametrize('scope', ['global', 'layer'])
@pytest.mark.parametrize('policy', ONE_PASS)
def test_layers_share_or_do_not(policy, scope):
    r = small_text()
    curve = hit_curve(r, policy, scope)
    for S in (3, 5, 9, 12): assert abs(curve[S] - replay_routes(r, policy, S, scope).hit_rate) < 1e-12
    assert len(curve) == 1 + r.E*(r.L if scope == 'global' else 1)


def test_pins_learn_elsewhere():
    a, b = small_text(1), small_text(2)
    got = hit_curve(a, 'pins', calibration=b)[7]
    pinned = top_experts(b, 7)
    assert abs(got - np.mean([pinned[l, e] for row in a.ids for l, ids in enumerate(row) for e in ids])) < 1e-12
    assert got < hit_curve(a, 'pins')[7]


def test_the_optimum_is_above():
    r = small_text(3)
    best = hit_curve(r, 'belady')[r.k:]
    for p in ('lru', 'lfu'): assert (best >= hit_curve(r, p)[r.k:] - 1e-12).all()


def test_impossible_arguments_are_named():
    r = small_text()
    for kw, name in ((dict(policy='s3-fifo'), 'policy'), (dict(scope='both'), 'scope')):
        with pytest.raises(ValueError, match=name): hit_curve(r, **kw)
    with pytest.raises(ValueError, match='chunks: item 12'): lru_distances([np.array([[12]])], 12)
    with pytest.raises(ValueError, match='chunks: item -1'): lru_distances([np.array([[-1]])], 12)
    with pytest.raises(ValueError, match='items, prio'): priority_distances(np.zeros((2, 1), np.int32), np.zeros((3, 1)), 4)


def test_tables_have_every_policy():
    r = small_text()
    r.predicted = np.roll(r.ids, 1, 0)
    rows = curve_rows(r, r, r, shares=(0.5,))
    assert {x[0] for x in rows} == set(POLICIES) and {x[1] for x in rows} == {'text', 'shuffled', 'iid'}
    assert all(0 <= x[5] <= x[6] <= 1 for x in rows)
    text = replay_table(r, 12)
    assert all(p in text for p in POLICIES) and 'i.i.d.' in text


def test_a_table_is_written_whole(tmp_path):
    path = write_rows(tmp_path/'new'/'t.csv', ('a', 'b'), [(1, 'x'), (2, 'y')])
    assert path.read_text() == 'a,b\n1,x\n2,y\n' and [p.name for p in path.parent.iterdir()] == ['t.csv']


def test_the_command_reads_any_trace(tmp_path, capsys):
    replay_command(str(data_path('traces', 'tiny-softmax-exact.npz')))
    assert 'every counter comes out' in capsys.readouterr().out
    (tmp_path/'t.csv').write_text('request,token,layer,experts\n0,0,0,1 2\n0,1,0,2 3\n0,2,0,1 2\n')
    replay_command(str(tmp_path/'t.csv'), capacity=2, experts=8)
    assert 'k = 2 of E = 8' in capsys.readouterr().out
    with pytest.raises(ValueError, match='curves, speed'): open_routes(tmp_path/'none.npz')


def test_shipped_text_is_what_the_model_says():
    "routes.npz was made by the dense model; the lab's own pass agrees but for near ties."
    r, again = shipped_routes('tiny-softmax'), tier_routes('tiny-softmax', 8, windows=1)
    r = r.of(r.request % 3 == 0)
    same = [len(set(a) & set(b)) for a, b in zip(r.ids[:again.T].reshape(-1, 8).tolist(), again.ids.reshape(-1, 8).tolist())]
    assert np.mean(same) > 7.8 and again.requests == 7 and again.domain[0] == r.domain[0]


@pytest.mark.slow
def test_curves_are_made(tmp_path):
    made = make_curves(str(tmp_path), 'tiny-sigmoid', '2', windows=1)
    assert [p.name for p in made] == ['tiny-sigmoid-k2.csv', 'tiny-sigmoid-k2-batch.csv']
    assert made[0].read_text().count('\n') > 200
