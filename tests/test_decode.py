"Decode end to end on small random models made here: paths, requests, errors, walks, memory."
import gc
from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest

from edge0_lab.decode import Lab, NotFinite, RunConfig, Trace, memory_of
from edge0_lab.synth import synth_family

PROMPT = [5, 17, 3, 29, 42]
SIZES = dict(qwen3_5_moe=dict(num_hidden_layers=4, num_experts=16, num_experts_per_tok=3), bailing_moe_v3={})


@pytest.fixture(scope='session', params=list(SIZES))
def folder(request, tmp_path_factory):
    d = tmp_path_factory.mktemp(request.param)
    synth_family(request.param, d, **SIZES[request.param])
    return d


@pytest.fixture(scope='session')
def lab(folder):
    with Lab.open(folder) as lab: yield lab


@pytest.fixture(scope='session')
def qwen(tmp_path_factory):
    d = tmp_path_factory.mktemp('qwen')
    synth_family('qwen3_5_moe', d, **SIZES['qwen3_5_moe'])
    return d


def first_logits(lab, run, prompt=PROMPT, n=1):
    with lab.prefill(prompt, run) as s:
        out = []
        for _ in range(n):
            lab.step(s)
            out.append(np.array(s.logits.astype(mx.float32)))
        return s.tokens, np.stack(out)


def test_paths_and_resident_give_the_same_64_tokens(lab):
    want = lab.generate(PROMPT, 64, RunConfig(decode='resident'), stop=())
    assert len(want.tokens) == 64 and want.trace.layers == ()
    for decode, prefill in (('staged', 'whole-layer'), ('exact', 'exact'), ('hot', 'hot'), ('whole-layer', 'whole-layer')):
        out = lab.generate(PROMPT, 64, RunConfig(decode=decode, prefill=prefill), stop=())
        assert out.tokens == want.tokens, decode
        assert out.trace.total('drops') == 0 and set(out.trace.path[:, lab.moe_layers].ravel()) == {decode}
        assert (out.trace.ids[:, lab.moe_layers] >= 0).all() and (out.trace.predicted_ids == -1).all()


@pytest.mark.case(9)
def test_paths_give_the_same_bits(lab):
    "One kernel, any path, any fill, any mix: bit-equal logits. The hot set is smaller than what the prompt uses."
    tokens, want = first_logits(lab, RunConfig(decode='exact'), n=12)
    mixed = dict(zip(lab.moe_layers, ('hot', 'whole-layer', 'exact', 'staged')))
    for run in (RunConfig(), RunConfig(decode='hot', hot_slots=2), RunConfig(decode='whole-layer'), RunConfig(paths=mixed), RunConfig(prefill='exact'), RunConfig(prefill='hot', hot_slots=1),
                RunConfig(fill='patch'), RunConfig(fill='stack'), RunConfig(fill_thread='main'), RunConfig(hold='double'), RunConfig(policy='lfu'), RunConfig(throttle=(1e-4, 1e9))):
        got = first_logits(lab, run, n=12)
        assert got[0] == tokens and (got[1] == want).all(), run
    chunked = first_logits(lab, RunConfig(prefill_chunk=2), n=12)      # other shapes in attention: close, not equal
    assert chunked[0] == tokens and np.linalg.norm(chunked[1] - want)/np.linalg.norm(want) < 1e-4


def test_resident_logits_are_close(lab):
    want = np.array(lab.logits(PROMPT, RunConfig(decode='resident')))
    got = np.array(lab.logits(PROMPT, RunConfig()))
    assert got.shape == (len(PROMPT), lab.vocab)
    assert np.linalg.norm(got - want)/np.linalg.norm(want) < 0.01


@pytest.mark.case(14)
def test_more_experts_than_slots(lab):
    tokens, want = first_logits(lab, RunConfig(decode='exact'), n=6)
    for run in (RunConfig(decode='exact', cache_slots=1, prefill='exact'), RunConfig(stage_slots=1, cache_slots=0), RunConfig(decode='hot', hot_slots=1, cache_slots=0)):
        with lab.prefill(PROMPT, run) as s:
            got = [(lab.step(s), np.array(s.logits))[1] for _ in range(6)]
            assert s.tokens == tokens and (np.stack(got) == want).all() and s.counters.drops == 0
    with pytest.raises(ValueError, match='k: 99'): lab.generate(PROMPT, 1, RunConfig(k=99))


@pytest.mark.case(8)
def test_k_is_of_the_run(lab):
    native = lab.native_k
    one, every = lab.generate(PROMPT, 4, RunConfig(k=1), stop=()), lab.generate(PROMPT, 4, RunConfig(k=native), stop=())
    assert one.trace.ids.shape[-1] == 1 and every.trace.ids.shape[-1] == native
    assert all(b.k == native for b in lab.loaded.blocks.values())
    with pytest.raises(ValueError, match="k: 1; allowed: None"): lab.generate(PROMPT, 1, RunConfig(k=1, decode='resident'))


@pytest.mark.case(12)
@pytest.mark.case(32)
@pytest.mark.parametrize('prompt', [[7], [7, 7], [7, 7, 7], [1, 2, 3, 4], PROMPT])
def test_first_steps_after_any_short_prompt(lab, prompt):
    for prerouter in (False, 'next-gate', 'previous'):
        a, b = (first_logits(lab, RunConfig(decode=d, prerouter=prerouter), prompt, 4) for d in ('exact', 'staged'))
        assert a[0] == b[0] and (a[1] == b[1]).all(), prerouter


@pytest.mark.case(11)
@pytest.mark.parametrize('prerouter', [False, 'next-gate', 'shuffle-object'])
def test_a_then_b_is_b_alone(folder, prerouter):
    run = RunConfig(prerouter=False if prerouter == 'shuffle-object' else prerouter)
    with Lab.open(folder) as fresh:
        alone = first_logits(fresh, run, [8, 9, 10], 8)
        alone_out = fresh.generate([8, 9, 10], 8, run, stop=())
    with Lab.open(folder) as used:
        used.generate(PROMPT, 8, run, stop=())
        used.generate(PROMPT, 3, RunConfig(decode='hot', k=1), stop=())
        after = first_logits(used, run, [8, 9, 10], 8)
        out = used.generate([8, 9, 10], 8, run, stop=())
    assert after[0] == alone[0] and (after[1] == alone[1]).all()
    assert out.counters == {p: {**c, 'wait_s': out.counters[p]['wait_s'], 'waits': out.counters[p]['waits']} for p, c in alone_out.counters.items()}
    assert (out.trace.slots == alone_out.trace.slots).all() and (out.trace.loads == alone_out.trace.loads).all()


@pytest.mark.case(11)
def test_an_exception_then_b_is_b_alone(lab):
    want = first_logits(lab, RunConfig(), n=6)
    class Broken:
        consumers, gates, on_prediction = frozenset(), frozenset(), None
        def __init__(self, at): self.n, self.at = 0, at
        def begin(self, before=None): pass
        def routing(self, *a, **k): return None
        def pending(self): return None
        def settle(self, host=None): pass
        def observe(self, *a, **k):
            self.n += 1
            if self.n == self.at: raise KeyError('mine')
    for at in (1, 4, 7):
        with pytest.raises(KeyError, match='mine'): lab.generate(PROMPT, 6, RunConfig(prerouter=Broken(at)))
        assert lab.loaded.serving is None and all(b.path is None and b.route is None for b in lab.loaded.blocks.values())
    got = first_logits(lab, RunConfig(), n=6)
    assert got[0] == want[0] and (got[1] == want[1]).all()


def test_a_failed_session_refuses_to_go_on(lab):
    s = lab.prefill(PROMPT)
    s.close()
    with pytest.raises(RuntimeError, match='closed'): lab.step(s)
    with pytest.raises(RuntimeError, match='closed'): s.prefill(PROMPT)


@pytest.mark.case(34)
def test_the_same_prompt_twice(lab):
    a, b = lab.generate(PROMPT, 5, stop=()), lab.generate(PROMPT, 5, stop=())
    assert a.tokens == b.tokens and len(b.tokens) == 5
    with lab.prefill(PROMPT) as s:
        with pytest.raises(ValueError, match='has its prompt already'): s.prefill(PROMPT)


def test_two_labs_and_two_streams_take_turns(folder, lab):
    want = [lab.generate(p, 6, stop=()).tokens for p in (PROMPT, [8, 9])]
    with Lab.open(folder) as other:
        a, b, c = lab.stream(PROMPT, 6, stop=()), lab.stream([8, 9], 6, RunConfig(decode='exact'), stop=()), other.stream(PROMPT, 6, RunConfig(prerouter=False, decode='hot'), stop=())
        got = [[p.token for p in t] for t in zip(a, b, c)]
    assert [list(t) for t in zip(*got)] == [want[0], want[1], want[0]]


def test_a_stream_closed_early_stops_cleanly(lab):
    s = lab.stream(PROMPT, 50, stop=())
    pieces = [next(s) for _ in range(3)]
    s.close()
    assert s.out.finish == 'closed' and s.out.tokens == [p.token for p in pieces] and s.out.trace.T == 3
    assert s.session.closed and lab.loaded.serving is None
    with pytest.raises(StopIteration): next(s)
    t = lab.stream(PROMPT, 50, stop=())
    next(t)
    session = t.session
    del t
    gc.collect()
    assert session.closed
    assert ''.join(pieces) == lab.generate(PROMPT, 3, stop=()).text or not lab.can_decode()


def test_stops(lab):
    free = lab.generate(PROMPT, 10, stop=())
    end = free.tokens[4]
    out = lab.generate(PROMPT, 10, stop=[end])
    n = free.tokens.index(end) + 1
    assert out.tokens == free.tokens[:n] and out.finish == 'stop' and out.trace.T == n and free.finish == 'length'


def test_seeds(lab):
    hot = RunConfig(temperature=1.5, seed=1)
    a, b, c = (lab.generate(PROMPT, 12, r, stop=()).tokens for r in (hot, hot, replace(hot, seed=2)))
    assert a == b != c
    x, y = lab.stream(PROMPT, 12, hot, stop=()), lab.stream(PROMPT, 12, hot, stop=())
    assert [(p.token, q.token) for p, q in zip(x, y)] == [(t, t) for t in a]          # interleaved draws do not disturb each other


@pytest.mark.parametrize('call, word', [
    (lambda l: l.generate(''), 'no tokens'), (lambda l: l.generate([]), 'no tokens'), (lambda l: l.generate([-1]), 'token -1 at 0'), (lambda l: l.generate([10**6]), 'token 1000000 at 0'),
    (lambda l: l.generate([1], -1), 'max_tokens: -1'), (lambda l: l.generate([1], 2.0), 'max_tokens: 2.0'), (lambda l: l.generate([1], run='staged'), "run: 'staged'"),
    (lambda l: l.generate([1]*(l.context + 1)), 'the context of this model'), (lambda l: l.generate([1], 1, RunConfig(paths={99: 'exact'})), 'paths: layer: 99'),
    (lambda l: l.prefill([1], RunConfig(prerouter='oracle')), "'oracle' needs the future"), (lambda l: l.walk([1], run=RunConfig(decode='resident')), 'allowed in a walk'),
])
def test_what_is_refused(lab, call, word):
    with pytest.raises(ValueError, match=word): call(lab)
    assert lab.loaded.__dict__.get('serving') is None


def test_no_tokens_wanted(lab):
    out = lab.generate(PROMPT, 0)
    assert out.tokens == [] and out.finish == 'length' and out.trace.T == 0 and out.prompt_tokens == 5
    assert len(out.trace.prefill) == len(lab.moe_layers) and out.trace.prompt_ids.shape[0] == 4 and out.counters['prefill']['loads'] > 0
    assert 'tokens/s' not in out.report()


def test_context_ends_a_stream(qwen, tmp_path):
    with Lab.open(qwen) as lab:
        lab.context = 8
        out = lab.generate(PROMPT, 50, stop=())
        assert out.finish == 'context' and len(out.tokens) == 4         # positions 4 to 7
        with lab.prefill(PROMPT) as s:
            for _ in range(4): lab.step(s)
            with pytest.raises(ValueError, match='context'): lab.step(s)


@pytest.mark.case(6)
@pytest.mark.case(7)
def test_nan_stops_with_the_layers_name(lab):
    layer = lab.moe_layers[1]
    for run in (RunConfig(), RunConfig(decode='exact', trace=False), RunConfig(prerouter='next-gate', trace=False)):
        for phase in ('prefill', 'decode'):
            with pytest.raises((NotFinite, ValueError), match=f'layer {layer}\\b') as e:
                with lab.walk(PROMPT, 6, run) as w:
                    at = w.run_to(layer, 'h')
                    while at.phase != phase or at.step == 0: at = w.run_to(layer, 'h')
                    at.value = mx.full(at.value.shape, float('nan'))
                    w.finish()
    assert isinstance(e.value, ArithmeticError) or 'NaN' in str(e.value)
    assert lab.loaded.serving is None


@pytest.mark.case(6)
def test_a_weight_that_overflows_half_precision_is_named(qwen):
    with Lab.open(qwen, dtype=mx.float16, kernel='ops') as lab:
        lab.generate(PROMPT, 2, RunConfig(kernel='ops'))
        norm = lab.loaded.text.model.layers[2].post_attention_layernorm
        norm.weight = norm.weight*0 + mx.array(6e4, mx.float16)
        with pytest.raises(NotFinite, match='layer 2: the router') as e: lab.generate(PROMPT, 4, RunConfig(kernel='ops'))
        assert e.value.layer == 2


def test_walk_changes_nothing_unless_asked(lab):
    for run in (RunConfig(), RunConfig(prerouter='next-gate')):
        want = lab.generate(PROMPT, 5, run, stop=()).tokens
        with lab.walk(PROMPT, 5, run) as w:
            seen = [(at.layer, at.name) for at in w]
        assert w.session.tokens == want or want.index(next(t for t in want if t in w._stop)) >= 0
        assert {n for l, n in seen if l == lab.moe_layers[0]} == {'x', 'h', 'logits', 'ids', 'weights', 'routed', 'out'}


@pytest.mark.parametrize('kernel', ['kernel', 'ops'])
def test_walk_replaces_the_routing(lab, kernel):
    "The forced experts are used, by every path alike, promised or not."
    layer, got = lab.moe_layers[-1], {}
    for run in (RunConfig(decode='exact'), RunConfig(), RunConfig(prerouter='next-gate'), RunConfig(decode='exact', prerouter='next-gate')):
        with lab.walk(PROMPT, 6, replace(run, kernel=kernel)) as w:
            at = w.run_to(layer, 'ids')
            while at.phase != 'decode' or at.step < 2: at = w.run_to(layer, 'ids')
            E, k = lab.store.E(layer), at.value.shape[-1]
            at.value = np.arange(E - k, E)[None]
            w.finish()
            trace = w.session.trace()
        assert trace.ids[2, layer].tolist() == list(range(E - k, E)) and trace.total('drops') == 0
        got.setdefault(run.prerouter, []).append(w.session.tokens)
    for a, b in got.values(): assert a == b


def test_walk_is_alone_and_can_be_left(lab):
    with lab.walk(PROMPT, 5) as w:
        w.run_to(lab.moe_layers[0], 'ids')
        with pytest.raises(RuntimeError, match='a walk is under way'): lab.generate(PROMPT, 1)
    assert lab.loaded.serving is None and w.session.closed
    lab.generate(PROMPT, 1)
    with lab.walk(PROMPT, 5): pass                                     # left before it began
    lab.generate(PROMPT, 1)
    with pytest.raises(ZeroDivisionError):
        with lab.walk(PROMPT, 5) as w:
            for at in w: 1/0
    lab.generate(PROMPT, 1)


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


@pytest.mark.case(39)
def test_requests_leave_no_memory_behind(lab):
    lab.generate(PROMPT, 4, stop=())
    live = []
    for _ in range(4):
        lab.generate(PROMPT, 4, stop=())
        gc.collect()
        live.append(mx.get_active_memory())
    assert len(set(live[1:])) == 1 or max(live) - min(live) < 4096, live


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
