"What a step asks of the device, slots that change under lazy kernels, and the tiny tiers over every path."
import mlx.core as mx
import numpy as np
import pytest

from edge0_lab.decode import Lab, RunConfig
from edge0_lab.settings import tier
from edge0_lab.synth import synth_family
from test_decode import PROMPT


class Asked:
    "Every evaluation and every export of an array, counted between Python and MLX."
    def __init__(self, monkeypatch): self.monkeypatch, self.n = monkeypatch, 0
    def __enter__(self):
        self.m = self.monkeypatch.context()
        m = self.m.__enter__()
        def put(owner, name, applies):
            old = getattr(owner, name)
            def new(*a, **kw):
                self.n += bool(applies(*a))
                return old(*a, **kw)
            m.setattr(owner, name, new)
        put(mx, 'eval', lambda *a: True)
        for name in ('tolist', 'item', '__array__'): put(mx.array, name, lambda *a: True)
        for name in ('array', 'asarray', 'ascontiguousarray'): put(np, name, lambda a=None, *_: isinstance(a, mx.array))
        return self
    def __exit__(self, *a): self.m.__exit__(*a)


@pytest.fixture(scope='module', params=[6, 10])
def lazy(request, tmp_path_factory):
    d = tmp_path_factory.mktemp('deep')
    synth_family('qwen3_5_moe', d, num_hidden_layers=request.param, num_experts=16, num_experts_per_tok=4)
    with Lab.open(d, kernel='ops') as lab: yield lab


@pytest.mark.parametrize('trace', [True, False])
def test_a_predicted_step_asks_four_times_whatever_the_depth(lazy, monkeypatch, trace):
    "One layer has no prediction in the shallow model, two in the deep one; they are part of the four."
    with lazy.prefill(PROMPT, RunConfig(kernel='ops', prerouter='next-gate', trace=trace)) as s:
        for _ in range(3): lazy.step(s)
        for _ in range(5):
            with Asked(monkeypatch) as a: lazy.step(s)
            assert a.n <= 4
        assert s.counters.fallbacks == 0 and s.counters.drops == 0
    with lazy.prefill(PROMPT, RunConfig(kernel='ops', decode='exact', trace=trace)) as s:
        lazy.step(s)
        with Asked(monkeypatch) as a: lazy.step(s)
        assert a.n >= len(lazy.moe_layers)                            # the counter does count


@pytest.mark.case(15)
@pytest.mark.parametrize('fill', ['inplace', 'patch', 'stack'])
def test_every_slot_changes_under_lazy_kernels(lazy, fill):
    "No cache beside the stage, one set of slots a layer: each step overwrites what the last one read."
    k = lazy.k
    want, got = [], []
    for out, run in ((want, RunConfig(kernel='ops', decode='exact', prerouter='next-gate')), (got, RunConfig(kernel='ops', prerouter='next-gate', fill=fill, cache_slots=0, stage_slots=k*len(lazy.moe_layers)))):
        with lazy.prefill(PROMPT, run) as s:
            for _ in range(20):
                lazy.step(s)
                out.append(np.array(s.logits))
    assert (np.stack(want) == np.stack(got)).all() and s.counters.evictions > 20 and s.counters.drops == 0


TEXTS = ['The river flows through the city and', 'La ville se trouve dans le nord de', 'def forward(self, x):\n    return']


@pytest.mark.slow
@pytest.mark.parametrize('name', ['tiny-softmax', 'tiny-sigmoid'])
def test_tiny_tiers_over_every_path(name):
    "64 greedy tokens, three prompts, four paths and mlx-lm's own model."
    if not (tier(name).checkpoint/'config.json').exists(): pytest.skip(f'{name} is not in data/')
    with Lab.open(name) as lab:
        for text in TEXTS:
            want = lab.generate(text, 64, RunConfig(decode='resident', k=None, trace=False), stop=()).tokens
            assert len(want) == 64
            for kw in (dict(), dict(decode='exact', prefill='exact'), dict(decode='hot', prefill='hot'), dict(decode='whole-layer')):
                out = lab.generate(text, 64, RunConfig(k=lab.native_k, prerouter=False, trace=False, **kw), stop=())
                assert out.tokens == want, (text, kw)
                assert all(c['drops'] == c['fallbacks'] == 0 for c in out.counters.values())
            l = [np.array(lab.logits(text, RunConfig(decode=d, k=lab.native_k, prerouter=False))) for d in ('resident', 'staged')]
            assert np.linalg.norm(l[1] - l[0])/np.linalg.norm(l[0]) < 0.01
