"Trace: the file format beyond the page's examples, and what recording may not do."
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from edge0_lab.trace import Trace, TraceRecorder


def run(T=5, L=3, k=2, E=8, layers=(0, 2), logits=False, seed=0):
    rng = np.random.default_rng(seed)
    rec = TraceRecorder(L, k, E, layers, logits=logits)
    for t in range(T):
        rec.begin_step(t)
        ids = np.stack([rng.choice(E, k, replace=False) for _ in layers])
        for l, row in zip(layers, ids): rec.call(layer=l, path='exact', slots=list(range(k)), experts=row.tolist(), loads=t, hits=k, covered=0, bytes_read=10*t, cold_bytes=0, waits=0, wait_s=0., fallbacks=0, drops=0, hot=0)
        rec.close_step(t + 1, layers, ids=ids, weights=rng.random(ids.shape), router_logits=rng.normal(size=(len(layers), E)).astype('f4') if logits else None)
    return rec.finish(range(3), model='m')


@settings(max_examples=25, deadline=None)
@given(T=st.integers(0, 6), L=st.integers(1, 4), k=st.integers(1, 3), data=st.data())
def test_round_trip(T, L, k, data, tmp_path_factory):
    layers = tuple(data.draw(st.lists(st.integers(0, L - 1), min_size=1, max_size=L, unique=True)))
    trace = run(T, L, k, 8, layers, logits=data.draw(st.booleans()))
    p = trace.save(tmp_path_factory.mktemp('t')/'a.npz')
    again = Trace.load(p)
    for name, v in vars(trace).items():
        if isinstance(v, np.ndarray):
            w = getattr(again, name)
            assert v.dtype == w.dtype and v.shape == w.shape, name
            assert v.tobytes() == w.tobytes(), name
    assert again.meta == trace.meta


def test_every_flipped_byte_is_refused_or_harmless(tmp_path):
    "Damage never becomes other numbers in silence."
    trace = run()
    raw = trace.save(tmp_path/'a.npz').read_bytes()
    rng = np.random.default_rng(0)
    refused = 0
    for at in rng.choice(len(raw), 150, replace=False):
        bad = bytearray(raw)
        bad[at] ^= 1 << int(rng.integers(8))
        (tmp_path/'b.npz').write_bytes(bytes(bad))
        try: again = Trace.load(tmp_path/'b.npz')
        except ValueError as e:
            assert 'b.npz' in str(e)
            refused += 1
            continue
        assert again.ids.tobytes() == trace.ids.tobytes() and again.weights.tobytes() == trace.weights.tobytes() and again.calls.tobytes() == trace.calls.tobytes()
    assert refused > 50


@pytest.mark.parametrize('change, word', [
    (lambda z: z.pop('ids'), 'array ids is missing'),
    (lambda z: z.update(extra=np.zeros(1)), 'array extra is unknown'),
    (lambda z: z.update(weights=z['weights'][:, :, :1]), 'array weights has shape'),
    (lambda z: z.update(tokens=z['tokens'].astype('f8')), 'array tokens has type'),
    (lambda z: z.update(meta=np.frombuffer(b'{]', 'u1')), 'meta is not JSON'),
    (lambda z: z.update(meta=np.frombuffer(b'[1]', 'u1')), 'schema'),
    (lambda z: z.pop('meta'), 'no meta'),
])
def test_wrong_files_are_refused(change, word, tmp_path):
    with np.load(run().save(tmp_path/'a.npz')) as f: z = {n: f[n] for n in f.files}
    change(z)
    np.savez(tmp_path/'b.npz', **z)
    with pytest.raises(ValueError, match='b.npz.*' + word): Trace.load(tmp_path/'b.npz')


def test_pickles_are_not_opened(tmp_path):
    np.savez(tmp_path/'b.npz', meta=np.array([{'a': 1}], dtype=object))
    with pytest.raises(ValueError, match='b.npz'): Trace.load(tmp_path/'b.npz')


def test_missing_file(tmp_path):
    with pytest.raises(FileNotFoundError): Trace.load(tmp_path/'none.npz')


def test_a_failed_save_leaves_the_old_file(tmp_path):
    trace = run()
    p = trace.save(tmp_path/'a.npz')
    before = p.read_bytes()
    trace.meta['bad'] = object()                       # not JSON
    with pytest.raises(TypeError): trace.save(p)
    assert p.read_bytes() == before and [f.name for f in tmp_path.iterdir()] == ['a.npz']


def test_half_a_step_is_overwritten():
    rec = TraceRecorder(2, 2, 8, (0, 1))
    rec.begin_step(1)
    rec.call(0, 'staged', [4, 5], [1, 2], loads=2)     # then it fails
    rec.begin_step(2)
    rec.call(1, 'exact', [0, 1], [3, 4], loads=1)
    rec.close_step(3, (0, 1), ids=np.array([[1, 2], [4, 3]]))
    t = rec.finish()
    assert t.T == 1 and t.loads.tolist() == [[-1, 1]] and t.path.tolist() == [['', 'exact']] and t.slots[0, 1].tolist() == [1, 0]


def test_slots_stand_beside_their_experts_even_where_the_choice_is_odd():
    rec = TraceRecorder(1, 3, 8, (0,))
    rec.begin_step(0)
    rec.call(0, 'staged', [9, 7, 8], [5, 6, 7])
    rec.close_step(1, (0,), ids=np.array([[7, 5, 0]]))  # 0 has no slot
    assert rec.finish().slots.tolist() == [[[8, 9, -1]]]


def test_frames_have_one_grain():
    t = run(T=4, L=3, k=2, layers=(0, 2))
    rows, experts = t.to_frame(), t.to_frame('experts')
    assert {len(v) for v in rows.values()} == {8} and {len(v) for v in experts.values()} == {16}
    assert rows['loads'].sum() == t.total('loads') and set(rows['layer']) == {0, 2}
    with pytest.raises(ValueError, match="what: 'rows'"): t.to_frame('rows')
