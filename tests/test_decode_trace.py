"What a run reports: trace, counters, teacher-forced rows, memory."
from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest

from edge0_lab.decode import RunConfig, Trace, memory_of
from test_decode import PROMPT


def test_teacher_forced_is_what_decode_does(lab):
    for prerouter in (False, 'next-gate', 'previous'):
        run = RunConfig(prerouter=prerouter)
        with lab.prefill(PROMPT[:1], run) as s: tokens = [lab.step(s) for _ in range(10)]
        trace = s.trace()
        scored = lab.score([PROMPT[0], *tokens[:-1]], run)
        assert mx.argmax(scored.logits, axis=-1).tolist() == tokens
        for name in ('ids', 'native_ids', 'predicted_ids'): assert (getattr(scored.trace, name) == getattr(trace, name)).all(), (prerouter, name)
        small = lab.score([PROMPT[0], *tokens[:-1]], replace(run, prefill_chunk=3))
        assert (small.trace.ids == scored.trace.ids).all()


def test_the_trace_says_what_was_predicted(lab):
    out = lab.generate(PROMPT, 10, RunConfig(prerouter='next-gate', trace='logits'), stop=())
    t, moe = out.trace, list(lab.moe_layers)
    consumer = t.predicted_ids[1:].max((0, 2)) >= 0
    assert consumer.any() and not consumer[moe[0]] and (t.predicted_ids[0] == -1).all()      # the first step is native
    assert (t.predicted_ids[1:, consumer] == t.ids[1:, consumer]).all() and (t.native_ids[:, moe] >= 0).all()
    best = np.argsort(-t.router_logits[:, moe[0]], axis=-1, kind='stable')[:, :t.ids.shape[-1]]
    if lab.loaded.blocks[moe[0]].router.kind == 'softmax': assert (best == t.native_ids[:, moe[0]]).all()
    assert out.counters['decode']['fallbacks'] == 0 and out.counters['decode']['covered'] > 0
    assert {p for p in t.path[1:, moe].ravel()} == {'staged'}


def test_prerouter_off_runs_no_gate_twice_and_fetches_nothing_ahead(lab):
    out = lab.generate(PROMPT, 6, stop=())
    assert out.counters['decode']['covered'] == 0 and 'head' not in set(out.trace.events['lane'])


def test_the_oracle_is_native(lab):
    run = RunConfig()
    a, b = lab.generate(PROMPT, 8, run, stop=()), lab.generate(PROMPT, 8, replace(run, prerouter='oracle'), stop=())
    assert a.tokens == b.tokens and (a.trace.ids == b.trace.ids).all() and (b.trace.predicted_ids[1:] >= 0).any()
    assert (np.array(lab.logits(PROMPT, replace(run, prerouter='oracle'))) == np.array(lab.logits(PROMPT, run))).all()


@pytest.mark.case(17)
def test_the_report_says_how_before_how_fast(lab):
    out = lab.generate(PROMPT, 4, RunConfig(throttle=(1e-4, 1e9)), stop=())
    lines = [l.split()[0] for l in out.report().splitlines()]
    assert lines.index('speed') > max(map(lines.index, ('path', 'residency', 'cache', 'drops', 'bytes', 'memory')))
    assert 'disk: simulated' in out.report() and '(disk simulated)' in out.report() and 'prerouter off' in out.report()


def test_memory_three_ways(lab):
    m = lab.memory()
    assert m['checkpoint'] == sum(f.stat().st_size for f in lab.loaded.path.glob('*.safetensors'))
    assert 0 < m['allocator_active'] <= m['allocator_peak'] and m['rss'] > 0 and -1 <= m['page_cache'] <= m['checkpoint'] + 4096*len(lab.checkpoint.shards)
    assert memory_of(None)['checkpoint'] == 0


def test_the_trace_goes_to_a_file_and_back(lab, tmp_path):
    out = lab.generate(PROMPT, 5, RunConfig(prerouter='next-gate', paths={lab.moe_layers[0]: 'exact'}), stop=())
    again = Trace.load(out.trace.save(tmp_path/'t.npz'))
    assert (again.ids == out.trace.ids).all() and again.meta['run']['paths'] == {str(lab.moe_layers[0]): 'exact'} and again.meta['memory']['checkpoint'] > 0
    assert len(again.meta['text']) == 5


def test_trace_off_leaves_no_recorder(lab):
    out = lab.generate(PROMPT, 3, RunConfig(trace=False), stop=())
    assert out.trace is None and out.counters['decode']['calls'] > 0


@pytest.mark.case(13)
def test_whole_layer_off_means_no_whole_layer(lab):
    out = lab.generate(PROMPT, 3, RunConfig(decode='exact', prefill='exact'), stop=())
    assert 'whole-layer' not in {*out.trace.path.ravel(), *out.trace.prefill['path']}
    used = len({(l, e) for l in lab.moe_layers for e in [*out.trace.ids[:, l].ravel(), *out.trace.prompt_ids[:, l].ravel()]})
    assert sum(c['loads'] for c in out.counters.values()) == used        # 64 slots: every expert is read once


@pytest.mark.case(19)
def test_bytes_read_are_loads_times_the_expert(lab):
    out = lab.generate(PROMPT, 6, stop=())
    size = lab.store.spec(lab.moe_layers[0]).total
    for c in out.counters.values(): assert c['bytes_read'] == c['loads']*size
    assert out.trace.total('bytes_read') == out.counters['decode']['bytes_read']
