"Requests: alone and after others, streams, stops, seeds, and what is refused."
import gc
from dataclasses import replace

import mlx.core as mx
import pytest

from edge0_lab.decode import Lab, RunConfig
from test_decode import PROMPT, first_logits


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


@pytest.mark.case(39)
def test_requests_leave_no_memory_behind(lab):
    lab.generate(PROMPT, 4, stop=())
    live = []
    for _ in range(4):
        lab.generate(PROMPT, 4, stop=())
        gc.collect()
        live.append(mx.get_active_memory())
    assert len(set(live[1:])) == 1 or max(live) - min(live) < 4096, live


def test_counters_close_when_a_fill_outlives_the_request():
    "The prediction of the last step fills slots for a step that never comes; its reads are counted all the same."
    from edge0_lab.decode import Lab, RunConfig
    with Lab.open('tiny-softmax') as lab:
        out = lab.generate('The town of', max_tokens=6, run=RunConfig(prerouter=True))
        c = out.counters['decode']
        assert c['misses'] == c['loads'] + c['failed'] and c['drops'] == 0
