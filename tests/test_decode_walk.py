"Stopping inside a pass, replacing values and routing, and layers that are not finite."
from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest

from edge0_lab.decode import Lab, NotFinite, RunConfig
from test_decode import PROMPT


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
