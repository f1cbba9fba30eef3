"Probes: each figure is its table, carries its run, stays light, and refuses what a run cannot show."
import time
from dataclasses import replace

import numpy as np
import pytest

from edge0_lab.columns import as_html, as_text, beside, columns, percent, provenance, save_png, token_text, with_text
from edge0_lab.probes import PROBES, available, table
from edge0_lab.settings import COLORS, data_path
from edge0_lab.trace import Trace, TraceRecorder


def made(T=12, L=3, E=16, k=4, layers=(1, 2), path='staged', predicted=True, logits=True, seed=0):
    "A run of a random routing: layer 0 dense, the prediction right in all but one expert, slots in order of appearance."
    rng = np.random.default_rng(seed)
    rec = TraceRecorder(L, k, E, layers, logits=logits)
    place, held = {}, {}
    for t in range(T):
        rec.begin_step(t)
        sets = np.stack([rng.choice(E, k, replace=False) for _ in layers])
        native = sets.copy()
        for l, row in zip(layers, native):
            if predicted and t: row[0] = next(e for e in range(E) if e not in row)
        for l, row in zip(layers, sets):
            new = [e for e in row.tolist() if (l, e) not in place]
            for e in row.tolist(): place.setdefault((l, e), len(place))
            rec.record('read', l, rec.t0 + t, rec.t0 + t + 0.1, 10)
            rec.record('wait', l, rec.t0 + t, rec.t0 + t + 0.2)
            rec.call(l, path, [place[l, e] for e in row.tolist()], row.tolist(), loads=len(new), hits=k - len(new), bytes_read=10*len(new), cold_bytes=4*len(new), waits=int(bool(new)), wait_s=0.2)
        rec.record('step', -1, rec.t0 + t, rec.t0 + t + 0.5)
        z = rng.normal(size=(len(layers), E)).astype('f4')
        w = np.exp(np.take_along_axis(z, sets, -1)); w /= w.sum(-1, keepdims=True)
        rec.close_step(t + 1, layers, ids=sets, weights=w, native_ids=native if predicted else sets, predicted_ids=sets if predicted and t else None, router_logits=z if logits else None)
    memory = dict(allocator_active=1, allocator_peak=2, rss=40, rss_anonymous=30, page_cache=5, checkpoint=9)
    got = rec.finish([1, 2], model='made', memory=memory, run=dict(decode=path, prerouter=predicted), disk='simulated')
    got.step_s[:] = 0.5
    return got


RUN = made()
SHIPPED = sorted(data_path('traces').glob('*.npz'))


def marks(fig):
    size = lambda d: np.size(d.z) if d.type == 'heatmap' else max(np.size(d.x if d.x is not None else ()), np.size(d.y if d.y is not None else ()))
    return sum(map(size, fig.data))


@pytest.mark.parametrize('name', PROBES)
def test_figure_and_table(name):
    "Sizes, axes, provenance; the table is columns of one length."
    fig, t = PROBES[name](RUN), table(name, RUN)
    assert len({len(v) for v in t.values()}) == 1 and len(t) >= 3
    assert 480 <= fig.layout.width <= 720 and 220 <= fig.layout.height <= 360
    assert fig.layout.title.text and fig.layout.title.subtitle.text == provenance(RUN) and 'simulated disk' in provenance(RUN)
    assert fig.layout.xaxis.title.text and (fig.layout.yaxis.title.text or name in ('step_timeline', 'memory_split'))
    assert marks(fig) <= 1100
    assert as_text(t) and as_html(t)


@pytest.mark.parametrize('name', PROBES)
def test_pure(name):
    "The trace is not changed, and the same trace gives the same figure."
    one = PROBES[name](RUN).to_json()
    assert one == PROBES[name](RUN).to_json()
    again = made()
    for part in ('ids', 'native_ids', 'predicted_ids', 'slots', 'weights', 'calls'): assert np.array_equal(getattr(RUN, part), getattr(again, part)), part


@pytest.mark.parametrize('name', PROBES)
def test_quick(name):
    "Issue 8: under 300 ms for 64 tokens; best of five, since others use this machine."
    run = made(T=64, L=9, E=64, k=8, layers=tuple(range(1, 9)))
    best = 9.
    for _ in range(5):
        t0 = time.perf_counter()
        PROBES[name](run)
        best = min(best, time.perf_counter() - t0)
    assert best < 0.3, best


def test_many_layers_stay_light():
    "A run in the shape of the 35b tier."
    run = made(T=64, L=40, E=256, k=4, layers=tuple(range(40)))
    for name, probe in PROBES.items():
        fig = probe(run)
        assert marks(fig) <= (40*256 if name == 'expert_map' else 1600), (name, marks(fig))   # a heat map is one image
        assert len(fig.to_json()) < 160_000, name


def test_overlap_against_counting_by_hand():
    t = table('gate_and_prediction', RUN)
    for i, l in enumerate(t['layer']):
        by_hand = [len(set(RUN.predicted_ids[s, l]) & set(RUN.native_ids[s, l])) for s in range(1, RUN.T)]
        assert t['overlap'][i] == pytest.approx(np.mean(by_hand)/4) and np.mean(by_hand) == 3
        free = [len(set(RUN.ids[s - 1, l]) & set(RUN.native_ids[s, l])) for s in range(1, RUN.T)]
        assert t['previous'][i] == pytest.approx(np.mean(free)/4)
    assert set(t['exact']) == {0} and set(t['chance']) == {0.25} and t['steps'].tolist() == [11, 11]


@pytest.mark.case(18)
def test_uniform_choice_shows_chance():
    "Independent uniform sets: overlap, shuffled overlap and k/E are one number; heat equals fair draws."
    run = made(T=400, E=32, predicted=False)
    t = table('adjacent_overlap', run)
    assert np.allclose(t['overlap'], 4/32, atol=0.02) and np.allclose(t['shuffled'], 4/32, atol=0.02) and np.allclose(t['lift'], 1, atol=0.15)
    heat = table('expert_heat', run)
    assert np.allclose(heat['fair'], heat['control'], atol=0.25)
    h = table('router_entropy', run)
    pick = lambda what: h['bits'][h['what'] == what]
    assert np.allclose(pick('load'), pick('fair load'), atol=0.03)


def test_adjacency_is_seen():
    "The same sets in blocks of four steps: adjacent overlap is far above the shuffled one."
    run = made(T=80, E=32, predicted=False)
    for name in ('ids', 'native_ids'): setattr(run, name, np.repeat(getattr(run, name)[::4], 4, 0))
    t = table('adjacent_overlap', run)
    assert (t['overlap'] > 0.7).all() and (t['shuffled'] < 0.25).all()


def test_scores_of_a_sigmoid_router():
    "Entropy of sigmoid scores, not of a softmax of the same logits."
    run = made(T=5, predicted=False)
    s = 1/(1 + np.exp(-run.router_logits[:, [1, 2]].astype(float)))
    w = np.take_along_axis(s, run.ids[:, [1, 2]], -1)
    run.weights[:, [1, 2]] = 2.5*w/w.sum(-1, keepdims=True)
    p = s/s.sum(-1, keepdims=True)
    t = table('router_entropy', run)
    assert np.allclose(t['bits'][t['what'] == 'scores'], -(p*np.log2(p)).sum(-1).mean(0), atol=1e-6)


def test_counters_add_up():
    t, b = table('hit_rates', RUN), table('loads_and_bytes', RUN)
    for name in ('hits', 'loads', 'covered'): assert t[name].sum() == b[name].sum() == RUN.total(name)
    assert b['bytes'].sum() == RUN.total('bytes_read') and b['cold'].sum() == RUN.total('cold_bytes')
    assert table('hit_rates', RUN, cells=6)['hits'].sum() == RUN.total('hits')


def test_slot_states_against_a_replay():
    "Every used cell says what its slot really held before."
    t = table('slot_table', RUN, layer=1, rows=99)
    before = {}
    for step in range(RUN.T):
        now = dict(zip(RUN.slots[step, 1].tolist(), RUN.ids[step, 1].tolist()))
        for s, e, state in zip(*(t[n][t['step'] == step] for n in ('slot', 'expert', 'state'))):
            if s in now: assert (e, state) == (now[s], 'used again' if before.get(s) == now[s] else 'changed')
            else: assert state in (('resting',) if s in before else ('empty', "another layer's"))
        before.update(now)


def test_slot_taken_by_another_layer():
    rec = TraceRecorder(2, 1, 4, (0, 1))
    for t, (a, b) in enumerate([(0, 0), (0, 1), (1, 0)]):
        rec.begin_step(t)
        rec.call(0, 'exact', [a], [2], loads=1); rec.call(1, 'exact', [b], [3], loads=1)
        rec.close_step(0, (0, 1), ids=np.array([[2], [3]]))
    t = table('slot_table', rec.finish(), layer=0)
    seen = {(int(s), int(n)): state for s, n, state in zip(t['slot'], t['step'], t['state'])}
    assert seen == {(0, 0): 'changed', (0, 1): 'changed', (0, 2): 'resting', (1, 0): 'empty', (1, 1): 'empty', (1, 2): 'changed'}


def test_timeline_of_a_step():
    t = table('step_timeline', RUN, step=3)
    assert set(t['lane']) == {'read', 'wait'} and np.allclose(t['step_ms'], 500) and set(t['step']) == {3}
    reads = t['lane'] == 'read'
    assert sorted(t['row'][reads]) == [0, 1], 'two reads at once take two rows'
    assert '40 % of it waiting' in PROBES['step_timeline'](RUN, step=3).layout.title.text


def test_refusals_are_one_sentence():
    "What cannot be shown names what would be needed."
    forced = TraceRecorder(2, 2, 8, (0, 1))
    forced.positions([1, 2, 3], (0, 1), dict(ids=np.arange(12).reshape(2, 3, 2) % 8))
    why = available(forced.finish(mode='teacher forced'))
    assert {n for n, reason in why.items() if not reason} == {'expert_map', 'expert_heat', 'adjacent_overlap'}
    assert all('allowed:' in reason and '\n' not in reason for reason in why.values() if reason)
    assert 'teacher forced' in provenance(forced.finish(mode='teacher forced'))
    plain = available(made(predicted=False, logits=False))
    assert {n for n, reason in plain.items() if reason} == {'gate_and_prediction', 'drift_curve'}
    for name, controls in dict(expert_map=dict(at=(5, 5)), slot_table=dict(first=12), adjacent_overlap=dict(source='x'), drift_curve=dict(window=0), step_timeline=dict(step=-1)).items():
        with pytest.raises(ValueError, match='allowed'): table(name, RUN, **controls)


def test_text_on_hover_is_visible_and_safe():
    class Words:
        def decode(self, ids): return '<b>\n &' if ids[0] % 2 else ' the'
    named = with_text(RUN, Words())
    assert set(token_text(named)) == {'&lt;b&gt;⏎␣&amp;', '␣the'} and 'text' not in RUN.meta
    assert '\\u2423the' in PROBES['loads_and_bytes'](named).to_json() and '<b>' not in PROBES['slot_table'](named).to_json()
    with pytest.raises(ValueError, match='text: 1 tokens'): token_text(replace(RUN, meta={**RUN.meta, 'text': ['a']}))


@pytest.mark.parametrize('along', ['x', 'y'])
@pytest.mark.parametrize('name', PROBES)
def test_beside_keeps_data_and_scales(name, along):
    "Both runs' numbers, panels apart, one scale, no axis lost."
    one, two = PROBES[name](RUN), PROBES[name](made(seed=1))
    both = beside(one, two, ('a', 'b'), along=along)
    assert len(both.data) == len(one.data) + len(two.data)
    axes = {k: v for k, v in both.to_plotly_json()['layout'].items() if k[1:5] == 'axis'}
    n = sum(k.startswith('yaxis') for k in one.to_plotly_json()['layout'])
    for d in both.data[len(one.data):]: assert int((d.yaxis or 'y')[1:] or 1) > n and 'yaxis' + d.yaxis[1:] in axes
    lo, hi = axes[along + 'axis'], axes[f'{along}axis{n + 1}']
    a, b = (lo, hi) if along == 'x' else (hi, lo)
    assert a['domain'][1] <= b['domain'][0]
    assert axes['yaxis'].get('range') == axes[f'yaxis{n + 1}'].get('range')
    if not axes['yaxis'].get('range'): assert axes[f'yaxis{n + 1}'].get('matches') == (None if name == 'slot_table' else 'y')     # slots are each run's own


def test_beside_refuses_another_kind():
    with pytest.raises(ValueError, match='another kind'): beside(PROBES['hit_rates'](RUN), PROBES['memory_split'](RUN), ('a', 'b'))


def test_same_color_for_the_same_thing():
    bars = {b.name: b.marker.color for b in PROBES['step_timeline'](RUN).data}
    assert bars == dict(read=COLORS['read'], wait=COLORS['wait'])
    assert PROBES['gate_and_prediction'](RUN).data[0].marker.color == PROBES['drift_curve'](RUN).data[2].line.color == COLORS['head']


@pytest.mark.parametrize('file', SHIPPED, ids=lambda p: p.name)
def test_shipped_traces_can_be_drawn(file):
    trace = Trace.load(file)
    why = available(trace)
    predicted = (trace.predicted_ids >= 0).any()
    assert {n for n, reason in why.items() if reason} == (set() if predicted else {'gate_and_prediction', 'drift_curve'})
    assert trace.meta['disk'] == 'simulated' and trace.total('drops') == 0 and len(trace.meta['text']) == trace.T
    assert file.stat().st_size < 250_000


def test_there_are_shipped_traces(): assert {p.stem for p in SHIPPED} >= {'tiny-softmax-exact', 'tiny-softmax-staged', 'tiny-softmax-next-gate'}


def test_small_parts():
    assert percent(0.254) == '25 %' and columns([]) == {}
    assert as_text(dict(a=np.arange(3)), 2).endswith('... 1 more rows')


def test_png(tmp_path):
    path = save_png(PROBES['memory_split'](RUN), tmp_path/'m.png')
    head = path.read_bytes()[:24]
    assert head[:8] == b'\x89PNG\r\n\x1a\n' and int.from_bytes(head[16:20], 'big') == 1080
