"The prerouter: warm start against real routers, released files, the kernel, and what a prediction may and may not do."
import json, struct, threading
from types import SimpleNamespace

import edge0_lab
import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from edge0_lab.models import load_model
from edge0_lab.prerouter import (Ahead, HeadKernel, Heads, Learned, NextGate, Predictor, Previous, PrerouterHead, SameToken, StackedHeads, earlier, feature_vector, find_heads,
                                 head_logits_ref, make_predictor, read_heads, router_weights, shuffled, warm_heads, warm_start, write_heads)
from edge0_lab.routing import Router
from edge0_lab.settings import tier
from edge0_lab.slots import Stage, open_caches
from edge0_lab.executors import Exact, Staged
from edge0_lab.store import Checkpoint, CheckpointError, ExpertStore, synth_experts
from edge0_lab.synth import synth, synth_family

FAMILIES = ('qwen3_5_moe', 'bailing_moe_v3')


@pytest.fixture(scope='module', params=FAMILIES)
def loaded(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    synth_family(request.param, folder)
    with load_model(folder, dtype=mx.float32, kernel='ops') as m: yield m


def consumers_of(loaded): return [c for c in loaded.blocks if c - 1 in loaded.blocks]


def some_heads(owners=(0, 1), D=24, E=8, H=6, k=2, seed=0, dtype=np.float16):
    rng = np.random.default_rng(seed)
    shapes = dict(fc1=(H, D + 2*E), fc2=(E, H), linear_init=(E, D + 2*E))
    return Heads({N: {n: (rng.standard_normal(s)/s[1]**.5).astype(dtype) for n, s in shapes.items()} for N in owners}, k, 'random')


class Block:
    "The surface of a MoEBlock, nothing behind it."
    def __init__(self, gate, router, bias=None): self.gate, self.router, self.k, self.family = mx.array(gate), router, router.k, SimpleNamespace(bias=lambda b: bias)
    def logits(self, x): return x @ self.gate.T
    def choose(self, logits, k=None): return self.router(logits, self.family.bias(self), k=k or self.k, check=False)


def toy(L=5, D=24, E=8, k=2, kind='softmax', seed=0):
    rng = np.random.default_rng(seed)
    router = Router('softmax', E, k) if kind == 'softmax' else Router('sigmoid_group', E, k, n_group=4, topk_group=2, scale=2.5)
    bias = None if kind == 'softmax' else mx.array(0.3*rng.standard_normal(E), mx.float32)
    return {l: Block(rng.standard_normal((E, D)).astype(np.float32), router, bias) for l in range(L)}


def drive(p, blocks, x, steps, told=None):
    "x (T, L, D) states; ids (T, L, k)."
    p.begin()
    if told is not None: p.on_prediction = lambda c, pred: told.append((c, pred.host.tolist()))
    out, t = [], 0
    for n in steps:
        rows = []
        for l, b in blocks.items():
            h = mx.array(x[t:t + n, l])
            logits = b.logits(h)
            own = b.choose(logits)
            ids, w = p.routing(l, t, n, native=own) or own
            p.observe(l, t, h, ids, w, logits)
            rows.append(np.array(ids))
        p.settle()
        out.append(np.stack(rows, 1))
        t += n
    return np.concatenate(out)


# ---- warm start

def test_warm_start_is_the_next_router_to_1e6(loaded):
    "Must reach: an untrained head's logits equal the next router's on the same state, f32, both families (8-bit and float routers)."
    gates = router_weights(loaded.checkpoint)
    assert set(gates) == set(loaded.blocks)
    owners = [c - 1 for c in consumers_of(loaded)]
    heads = warm_heads(gates, owners, loaded.blocks[owners[0]].k, 16)
    h = mx.random.normal((7, heads.D), key=mx.random.key(0))
    for N in owners:
        b = loaded.blocks[N + 1]
        want = b.logits(h)
        ids = loaded.blocks[N].choose(loaded.blocks[N].logits(h))[0]
        got = heads.head(N)(h, ids, earlier(ids, heads.E))
        size = max(1, float(mx.abs(want).max()))
        assert float(mx.abs(got - want).max()) <= 1e-6*size
        assert b.choose(got)[0].tolist() == b.choose(want)[0].tolist()
        stack = StackedHeads(heads, [N])(h[None], ids[None], earlier(ids, heads.E)[None])[0]
        assert float(mx.abs(stack - want).max()) <= 2e-6*size


@pytest.mark.parametrize('name', ['tiny-softmax', 'tiny-sigmoid'])
def test_warm_start_on_the_tiny_tiers(name):
    t = tier(name)
    if not (t.checkpoint/'model.safetensors').exists(): pytest.fail(f'{name}: the shipped checkpoint is missing')
    with load_model(t.checkpoint, dtype=mx.float32, kernel='ops') as m:
        heads = warm_heads(router_weights(m.checkpoint), t.owners, t.k, t.head_hidden)
        h = mx.random.normal((5, heads.D), key=mx.random.key(1))
        none = mx.full((5, t.k), heads.E, mx.uint32)
        for N in t.owners:
            want = m.blocks[N + 1].logits(h)
            assert float(mx.abs(heads.head(N)(h, none, none) - want).max()) <= 1e-6*max(1, float(mx.abs(want).max()))


@pytest.mark.parametrize('name', ['tiny-softmax', 'tiny-sigmoid'])
def test_shipped_heads_fit_their_tier(name):
    t = tier(name)
    config = json.loads((t.checkpoint/'config.json').read_text())
    for k in t.served_k:
        heads = read_heads(find_heads(t.checkpoint, k), t.owners, config, k, t.head_hidden)
        assert heads.owners == t.owners and heads.nbytes < 2_000_000
        assert any(heads.part(N, 'fc2').any() for N in heads.owners), 'untrained heads are shipped'


def test_expert_bias_belongs_to_the_router():
    "Equal logits, but the choice of the consumer goes through ITS bias, in prediction as in the gate."
    blocks = toy(kind='sigmoid')
    for l, b in blocks.items():
        own = mx.array(np.eye(8)[l]*50, mx.float32)                 # layer l always wants expert l
        b.family = SimpleNamespace(bias=lambda _, v=own: v)
    x = np.random.default_rng(0).standard_normal((4, 5, 24)).astype(np.float32)
    for groups in (None, 2, 4):
        ids = drive(NextGate(blocks, [2, 3, 4], groups), blocks, x, [1]*4)
        for l in range(5): assert (ids[:, l, :] == l).any(-1).all()


def test_groups_with_different_k_choose_layer_by_layer():
    blocks = toy(E=8, k=2)
    blocks[3].k = 3
    p = NextGate(blocks, [2, 3, 4], groups=1)
    told = []
    p.on_prediction = lambda c, pred: told.append((c, len(pred.host)))
    p.begin()
    x = mx.array(np.random.default_rng(0).standard_normal((1, 24)), mx.float32)
    for l, b in blocks.items(): p.observe(l, 0, x, *b.choose(b.logits(x)))
    p.settle(np.array(p.pending()))
    assert dict(told) == {2: 2, 3: 3, 4: 2}


# ---- first tokens, requests, missing predictions

@pytest.mark.case(32)
@pytest.mark.parametrize('kernel', ['kernel', 'ops'])
def test_a_one_token_prompt_has_no_previous_token(kernel):
    blocks, heads = toy(), some_heads(owners=range(4), D=24)
    x = np.random.default_rng(0).standard_normal((3, 5, 24)).astype(np.float32)
    p = Learned(blocks, heads, [1, 2, 3, 4], kernel=kernel)
    ids = drive(p, blocks, x, [1, 1, 1])
    own = [np.array(blocks[l].choose(blocks[l].logits(mx.array(x[:1, l])))[0])[0] for l in range(5)]
    assert (ids[0] == own).all()                                  # position 0: everybody's own gate
    choose = lambda l, logits: blocks[l].router(logits, k=2)[0]
    for l in range(1, 5):
        assert sorted(choose(l, head_logits_ref(heads, l - 1, x[0, l - 1], ids[0, l - 1]))) == sorted(ids[1, l])                       # nothing before
        assert sorted(choose(l, head_logits_ref(heads, l - 1, x[1, l - 1], ids[1, l - 1], ids[0, l - 1]))) == sorted(ids[2, l])       # now there is
    two = Learned(blocks, heads, [1, 2, 3, 4], kernel=kernel)
    two.begin(before={l: own[l] for l in range(5)})                # a longer prompt: its last token is the previous one
    for l in range(5): two.observe(l, 0, mx.array(x[:1, l]), mx.array(ids[:1, l]), mx.ones((1, 2)))
    for l in range(1, 5): assert sorted(np.array(two.routing(l, 1)[0])[0]) == sorted(choose(l, head_logits_ref(heads, l - 1, x[0, l - 1], ids[0, l - 1], own[l - 1])))


@pytest.mark.case(32)
def test_all_tokens_the_same():
    blocks, heads = toy(), some_heads(owners=range(4), D=24)
    x = np.repeat(np.random.default_rng(0).standard_normal((1, 5, 24)).astype(np.float32), 6, 0)
    for steps in ([1]*6, [6]):
        ids = drive(NextGate(blocks, [1, 2, 3, 4]), blocks, x, steps)
        assert (ids[1:] == ids[1]).all()
    a, b = (drive(Learned(blocks, heads, [1, 2, 3, 4], kernel='ops'), blocks, x, s) for s in ([1]*6, [6]))
    assert (a == b).all()


@pytest.mark.case(11)
@pytest.mark.parametrize('what', ['on', 'next-gate', 'previous', 'same-token', 'shuffle'])
def test_request_a_leaves_nothing_for_request_b(what):
    blocks, heads = toy(), some_heads(owners=range(4), D=24)
    rng = np.random.default_rng(0)
    A, B = (rng.standard_normal((5, 5, 24)).astype(np.float32) for _ in range(2))
    alone = drive(make_predictor(what, blocks, [2, 3, 4], heads=heads), blocks, B, [1]*5)
    for groups in (None, 3):
        p = make_predictor(what, blocks, [2, 3, 4], heads=heads, groups=groups)
        drive(p, blocks, A, [1]*5)
        assert (drive(p, blocks, B, [1]*5) == alone).all()
        with pytest.raises(ZeroDivisionError):                    # A ends in the middle of a step
            p.begin()
            for l, b in blocks.items():
                if l == 3: 1/0
                p.observe(l, 0, mx.array(A[:1, l]), *b.choose(b.logits(mx.array(A[:1, l]))), b.logits(mx.array(A[:1, l])))
        assert (drive(p, blocks, B, [1]*5) == alone).all()


def test_a_consumer_without_its_prediction_is_an_error():
    blocks = toy()
    p = NextGate(blocks, [2, 4])
    x = mx.zeros((1, 24))
    p.begin()
    for l in (1, 2): p.observe(l, 0, x, *blocks[l].choose(blocks[l].logits(x)))      # layer 3 is never shown, so layer 4 has nothing
    assert p.routing(2, 1) is not None and p.routing(3, 1) is None
    with pytest.raises(RuntimeError, match='layer 4: no prediction for position 1'): p.routing(4, 1)
    with pytest.raises(RuntimeError, match='layer 2: no prediction for position 1'): p.routing(2, 1)      # taken once


def test_heads_must_cover_the_consumers_and_their_k():
    blocks = toy()
    with pytest.raises(ValueError, match='none for layer 2, so layer 3'): Learned(blocks, some_heads(owners=(0, 1)), [1, 2, 3])
    with pytest.raises(ValueError, match='k = 1.*layer'): Learned(blocks, some_heads(owners=(0, 1), k=1), [1, 2])
    with pytest.raises(ValueError, match='E = 4'): Learned(blocks, some_heads(owners=(0, 1), E=4), [1, 2])
    with pytest.raises(ValueError, match='features'): Learned(blocks, some_heads(), [1], features='both')
    with pytest.raises(ValueError, match='layer 0 to be an MoE'): NextGate({1: blocks[1], 2: blocks[2]}, [1, 2])
    with pytest.raises(ValueError, match="prerouter: 'magic'"): make_predictor('magic', blocks, [1])
    with pytest.raises(ValueError, match='replay'): make_predictor('oracle', blocks, [1])


def test_off_and_free_guesses_run_no_head(monkeypatch):
    "Counted from outside: every way to evaluate a head."
    count = []
    for cls, name in ((HeadKernel, 'logits'), (StackedHeads, '__call__'), (PrerouterHead, '__call__')):
        old = getattr(cls, name)
        monkeypatch.setattr(cls, name, lambda self, *a, _old=old, **kw: (count.append(1), _old(self, *a, **kw))[1])
    blocks, heads = toy(), some_heads(owners=range(4), D=24)
    x = np.random.default_rng(0).standard_normal((4, 5, 24)).astype(np.float32)
    for p in (Predictor(blocks), NextGate(blocks, [2, 3]), Previous(blocks, [2, 3]), SameToken(blocks, [2, 3])): drive(p, blocks, x, [1]*4)
    assert count == []
    p = Learned(blocks, heads, [2, 3])
    drive(p, blocks, x, [1]*4)
    assert len(count) == p.calls == 8                             # two heads, four tokens; heads of layers 0 and 3 predict nobody and never run


def test_features_of_the_teacher_are_the_gates_own():
    blocks, heads = toy(), some_heads(owners=range(4), D=24)
    x = np.random.default_rng(0).standard_normal((6, 5, 24)).astype(np.float32)
    p = Learned(blocks, heads, [1, 2, 3, 4], features='teacher')
    assert p.gates == {1, 2, 3}
    ids = drive(p, blocks, x, [1]*6)
    native = np.stack([np.array(b.choose(b.logits(mx.array(x[:, l])))[0]) for l, b in blocks.items()], 1)
    for l in range(1, 5):
        want = blocks[l].router(head_logits_ref(heads, l - 1, x[3, l - 1], native[3, l - 1], native[2, l - 1]))[0]
        assert sorted(want) == sorted(ids[4, l])
    with pytest.raises(ValueError, match="features: 'teacher' needs the gate of layer 1"): p.observe(1, 6, mx.array(x[:1, 1]), mx.array(ids[:1, 1]), mx.ones((1, 2)))


def test_previous_needs_the_gate_and_does_not_freeze():
    blocks = toy()
    x = np.random.default_rng(0).standard_normal((8, 5, 24)).astype(np.float32)
    p = Previous(blocks, [1, 2, 3])
    assert p.gates == p.consumers
    ids = drive(p, blocks, x, [1]*8)
    native = np.stack([np.array(b.choose(b.logits(mx.array(x[:, l])))[0]) for l, b in blocks.items()], 1)
    assert (ids[1:, 1:4] == native[:-1, 1:4]).all() and (ids[:, 4] == native[:, 4]).all()
    with pytest.raises(ValueError, match='gate of layer 2'): p.observe(2, 8, mx.array(x[:1, 2]), mx.array(ids[:1, 2]), mx.ones((1, 2)))


def test_shuffle_keeps_the_choices_and_loses_the_moment():
    blocks = toy()
    x = np.random.default_rng(0).standard_normal((60, 5, 24)).astype(np.float32)
    true, mixed = drive(NextGate(blocks, [2]), blocks, x, [1]*60)[1:, 2], drive(shuffled(NextGate(blocks, [2])), blocks, x, [1]*60)[1:, 2]
    seen = {tuple(r) for r in true}
    assert all(tuple(r) in seen for r in mixed)                    # only real predictions
    assert (true != mixed).any(-1).mean() > 0.7                    # at another moment
    other = drive(shuffled(NextGate(blocks, [2]), seed=5), blocks, x, [1]*60)[1:, 2]
    assert (other != mixed).any()


def test_oracle_ends_with_its_recording():
    blocks = toy()
    x = np.random.default_rng(0).standard_normal((4, 5, 24)).astype(np.float32)
    native = np.stack([np.array(b.choose(b.logits(mx.array(x[:, l])))[0]) for l, b in blocks.items()], 1)
    record = {c: (native[:, c], np.full((4, 2), .5, np.float32)) for c in (2, 3)}
    told = []
    assert (drive(make_predictor('oracle', blocks, [2, 3], replay=record), blocks, x, [1]*4, told) == native).all()
    assert told == [(c, native[t + 1, c].tolist()) for t in range(3) for c in (2, 3)]
    with pytest.raises(ValueError, match='nothing for layer 3'): make_predictor('oracle', blocks, [2, 3], replay={2: record[2]})
    short = make_predictor('oracle', blocks, [2], replay={2: tuple(a[:2] for a in record[2])})
    with pytest.raises(RuntimeError, match='layer 2: no prediction for position 2'): drive(short, blocks, x, [1]*4)


@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(1, 4), min_size=1, max_size=5), st.sampled_from(['on', 'next-gate', 'previous', 'same-token', 'shuffle', 'oracle']),
       st.sampled_from(['softmax', 'sigmoid']), st.sampled_from([None, 1, 3]))
def test_any_cut_into_steps_is_the_same_routing(steps, what, kind, groups):
    blocks, heads, T = toy(kind=kind), some_heads(owners=range(4), D=24), sum(steps)
    x = np.random.default_rng(T).standard_normal((T, 5, 24)).astype(np.float32)
    native = [b.choose(b.logits(mx.array(x[:, l]))) for l, b in blocks.items()]
    record = {l: tuple(np.array(a) for a in native[l]) for l in (2, 3, 4)}
    make = lambda: make_predictor(what, blocks, [2, 3, 4], heads=heads, replay=record, kernel='ops', groups=groups)
    assert (drive(make(), blocks, x, steps) == drive(make(), blocks, x, [1]*T)).all()


def test_at_most_four_reads_and_three_quarters_early():
    blocks, heads = toy(L=14), some_heads(owners=range(13), D=24)
    p = Learned(blocks, heads, range(1, 14), kernel='ops', groups=4)
    x, told, at = mx.zeros((1, 24)), [], []
    p.on_prediction = lambda c, pred: told.append(c)
    p.begin()
    for l, b in blocks.items():
        p.observe(l, 0, x, *b.choose(b.logits(x)))
        at.append(len(told))
    assert len({n for n in at if n}) <= 3                           # groups told within the step
    late = p.pending()
    assert late.dtype == mx.uint32 and late.size == 3*(13 - len(told))    # k ids and a flag
    assert len(told) >= 9
    p.settle(np.array(late))
    assert sorted(told) == list(range(1, 14)) and p.pending() is None


# ---- slots: a layer that has no prediction

@pytest.mark.case(10)
def test_a_layer_without_prediction_is_served_exactly(tmp_path):
    "Three layers, a prediction for layer 2 only: drops 0, everything equal to exact."
    synth_experts(tmp_path, L=3, E=8, D=64, F=64)
    blocks = toy(L=3, D=64)
    x = np.random.default_rng(0).standard_normal((12, 3, 64)).astype(np.float32)
    with Checkpoint.open(tmp_path) as ck:
        store = ExpertStore(ck, threads=2)
        caches, plain = open_caches(store, 16), open_caches(store, 16)
        stage = Stage(caches)
        staged, exact = Staged(stage), Exact(plain)
        p = NextGate(blocks, [2])
        p.on_prediction = lambda c, pred: stage.fill(c, pred.host, device=pred.ids)
        p.begin(); stage.reset()
        for t in range(12):
            staged.predicted = {2} if t else set()
            for l, b in blocks.items():
                h = mx.array(x[t:t + 1, l])
                ids, w = p.routing(l, t) or b.choose(b.logits(h))
                p.observe(l, t, h, ids, w)
                a, e = staged(l, h, ids), exact(l, h, ids)
                assert mx.array_equal(a, e), (t, l)
            mx.eval(a)
            staged.evaluated(); exact.evaluated(); p.settle()
        counters = next(iter(caches.each())).counters
        assert counters.drops == 0
        for c in (*caches.each(), *plain.each()): c.close()
        store.close()


# ---- in a lab

@pytest.fixture(scope='module')
def lab(loaded):
    from edge0_lab.decode import Lab
    with Lab.open(loaded.path) as lab: yield lab


def lab_heads(loaded, k, seed=0):
    "Heads that say something of their own: warm started, with a correction."
    rng, gates = np.random.default_rng(seed), router_weights(loaded.checkpoint)
    warm = warm_heads(gates, [c - 1 for c in consumers_of(loaded)], k, 12)
    for p in warm.parts.values(): p['fc2'] += rng.standard_normal(p['fc2'].shape).astype(np.float32)
    return warm


@pytest.mark.parametrize('features', ['executed', 'teacher'])
def test_learned_heads_serve_staged_as_exact(loaded, lab, features, monkeypatch):
    "Same routing, same bits; nothing dropped, nothing fallen back; heads counted from outside; decode equals teacher forcing."
    from edge0_lab.decode import RunConfig
    calls, old = [], HeadKernel.logits
    monkeypatch.setattr(HeadKernel, 'logits', lambda self, *a: (calls.append(a[0]), old(self, *a))[1])
    k = loaded.blocks[max(loaded.blocks)].k
    run = RunConfig(prerouter=True, heads=lab_heads(loaded, k), features=features)
    out = lab.generate([7], 12, run, stop=())
    exact = lab.generate([7], 12, RunConfig(decode='exact', prerouter=True, heads=run.heads, features=features), stop=())
    assert out.tokens == exact.tokens and (out.trace.ids == exact.trace.ids).all() and (out.trace.weights == exact.trace.weights).all()
    assert out.trace.total('drops') == 0 and out.trace.total('fallbacks') == 0
    consumers = [l for l in out.trace.layers if (out.trace.predicted_ids[1:, l] >= 0).all()]
    assert consumers and (out.trace.predicted_ids[0] == -1).all()
    assert len(calls) == 2*12*len(consumers) and set(calls) == {c - 1 for c in consumers}
    assert (out.trace.ids[1:, consumers] == out.trace.predicted_ids[1:, consumers]).all()
    native = lab.generate([7], 12, RunConfig(), stop=())
    assert len(calls) == 2*12*len(consumers)                       # off: none
    assert (native.trace.predicted_ids == -1).all()
    tokens = [7, *out.tokens[:-1]]
    rows = np.array(lab.logits(tokens, run).astype(mx.float32))     # teacher forced, many rows at once
    assert rows.argmax(-1).tolist() == out.tokens


def test_a_lab_refuses_heads_that_do_not_fit(loaded, lab, tmp_path):
    from edge0_lab.decode import RunConfig
    k = loaded.blocks[max(loaded.blocks)].k
    heads = lab_heads(loaded, k)
    with pytest.raises(ValueError, match='heads: made for k'): lab.generate([7], 2, RunConfig(prerouter=True, heads=heads, k=k - 1))
    few = Heads({max(heads.parts): heads.parts[max(heads.parts)]}, k)
    if len(heads.parts) > 1:
        with pytest.raises(ValueError, match='heads: none for layer'): lab.generate([7], 2, RunConfig(prerouter=True, heads=few))
    wrong = write_heads(tmp_path/'wrong.safetensors', some_heads(heads.owners, D=heads.D + 1, E=heads.E, k=k))
    with pytest.raises(ValueError, match='D = '): lab.generate([7], 2, RunConfig(prerouter=True, heads=wrong))
    right = write_heads(tmp_path/'right.safetensors', heads)
    assert lab.generate([7], 4, RunConfig(prerouter=True, heads=right), stop=()).tokens == lab.generate([7], 4, RunConfig(prerouter=True, heads=heads), stop=()).tokens


# ---- kernel

def test_kernel_from_several_threads():
    heads = some_heads(owners=(0, 1, 2), D=70, E=33, H=40, k=3)
    kernel, rng = HeadKernel(heads), np.random.default_rng(0)
    jobs = [(N, rng.standard_normal(70).astype(np.float32), rng.permutation(33)[:3], rng.permutation(33)[:3]) for N in (0, 1, 2) for _ in range(10)]
    want, got = [kernel.logits(*j) for j in jobs], {}
    def work(n):
        for i in range(n, len(jobs), 3): got[i] = kernel.logits(*jobs[i])
    threads = [threading.Thread(target=work, args=(n,)) for n in range(3)]
    for t in threads: t.start()
    for t in threads: t.join()
    for i, w in enumerate(want): assert (got[i] == w).all()


def test_kernel_of_the_35b_shape():
    t = tier('edge0-35b')
    heads = some_heads(owners=(6, 38), D=2048, E=256, H=t.head_hidden, k=t.k)
    assert round(heads.nbytes/2*33/1e6) == 138
    kernel, rng = HeadKernel(heads), np.random.default_rng(0)
    h, ids, before = rng.standard_normal(2048).astype(np.float32), rng.permutation(256)[:4], rng.permutation(256)[:4]
    want = head_logits_ref(heads, 38, h, ids, before)
    got = kernel.logits(38, h, ids, before)
    assert np.abs(got - want).max() < 1e-5*np.abs(want).max()
    stack = StackedHeads(heads, [38], mx.float16)(mx.array(h)[None, None], mx.array(ids)[None, None], mx.array(before)[None, None])[0, 0]
    assert np.abs(np.array(stack) - want).max() < 0.01*np.abs(want).max()


# ---- released files

@settings(max_examples=30, deadline=None)
@given(st.sets(st.integers(0, 60), min_size=1, max_size=6), st.integers(1, 9), st.integers(2, 7), st.integers(1, 5), st.sampled_from(['layers', 'mlp']),
       st.sampled_from(['nested', 'flat']), st.booleans(), st.sampled_from([np.float16, np.float32]))
def test_write_then_read_gives_equal_bytes(tmp_path_factory, owners, D, E, H, spelling, metadata, lean, dtype):
    heads = some_heads(owners, D, E, H, k=1, dtype=dtype)
    if lean: heads = Heads({N: {n: p[n] for n in ('fc1', 'fc2')} for N, p in heads.parts.items()}, 1, 'lean')
    folder = tmp_path_factory.mktemp('heads')
    a = write_heads(folder/'a.safetensors', heads, spelling, metadata)
    back = read_heads(a, owners)
    assert (back.owners, back.k, back.source) == (heads.owners, 1, heads.source)
    for N in owners:
        assert set(back.parts[N]) == set(heads.parts[N])
        for n, v in heads.parts[N].items(): assert back.parts[N][n].tobytes() == v.tobytes() and back.parts[N][n].dtype == dtype
    assert write_heads(folder/'b.safetensors', back, spelling, metadata).read_bytes() == a.read_bytes()


def test_metadata_as_numbers_and_lists(tmp_path):
    "Nested JSON may hold a list and a number where flat metadata can only hold strings."
    a = write_heads(tmp_path/'a.safetensors', some_heads((3, 4)))
    raw = a.read_bytes()
    n = struct.unpack('<Q', raw[:8])[0]
    header = json.loads(raw[8:8 + n])
    for said in (dict(owners=[3, 4], K=2, format_version=1), dict(owners='[3, 4]', K='2', format_version='1', source='x', extra='y')):
        header['__metadata__'] = {'__metadata__': json.dumps(said)}
        text = json.dumps(header).encode()
        (tmp_path/'b.safetensors').write_bytes(struct.pack('<Q', len(text)) + text + raw[8 + n:])
        assert read_heads(tmp_path/'b.safetensors', (3, 4)).k == 2
    for said in (dict(owners=[3, 4], K=True, format_version=1), dict(owners=[3, '4'], K=2, format_version=1), dict(owners=[3, 3, 4], K='two', format_version=1)):
        header['__metadata__'] = {'__metadata__': json.dumps(said)}
        text = json.dumps(header).encode()
        (tmp_path/'b.safetensors').write_bytes(struct.pack('<Q', len(text)) + text + raw[8 + n:])
        with pytest.raises(CheckpointError, match='metadata'): read_heads(tmp_path/'b.safetensors')


@pytest.mark.case(20)
@pytest.mark.case(21)
def test_cut_and_mutilated_files_are_refused(tmp_path):
    raw = write_heads(tmp_path/'a.safetensors', some_heads((3, 4))).read_bytes()
    for cut in (0, 4, 8, 40, len(raw) - 4096 if len(raw) > 8192 else len(raw)//2, len(raw) - 1):
        (tmp_path/'b.safetensors').write_bytes(raw[:cut])
        with pytest.raises(CheckpointError): read_heads(tmp_path/'b.safetensors')
    (tmp_path/'b.safetensors').write_bytes(raw + b'0')
    with pytest.raises(CheckpointError): read_heads(tmp_path/'b.safetensors')
    with pytest.raises(CheckpointError, match='no such file'): read_heads(tmp_path/'c.safetensors')


def test_an_interrupted_write_leaves_the_old_file(tmp_path, monkeypatch):
    a = write_heads(tmp_path/'a.safetensors', some_heads((3, 4)))
    raw = a.read_bytes()
    import edge0_lab.writer as module
    monkeypatch.setattr(module.os, 'replace', lambda *_: (_ for _ in ()).throw(OSError('disk full')))
    with pytest.raises(OSError): write_heads(a, some_heads((3, 4), seed=1))
    monkeypatch.undo()
    assert a.read_bytes() == raw
    with pytest.raises(ValueError, match='layers.3.fc1.weight: int8'): write_heads(tmp_path/'c.safetensors', some_heads((3,), dtype=np.int8))
    assert not (tmp_path/'c.safetensors').exists()


@pytest.mark.parametrize('name, layers', [('edge0-35b', 10), ('edge0-8b', 10)])
def test_synthetic_releases_have_heads_that_read(tmp_path, name, layers):
    narrow = dict(hidden_size=128, num_experts=16, moe_intermediate_size=64, vocab_size=128)
    if name == 'edge0-8b': narrow |= dict(intermediate_size=128, moe_shared_expert_intermediate_size=64)
    else: narrow |= dict(shared_expert_intermediate_size=64)
    synth(name, tmp_path, layers=layers, lora=False, **narrow)
    t, config = tier(name), json.loads((tmp_path/'config.json').read_text())
    heads = read_heads(find_heads(tmp_path, t.k), [N for N in t.owners if N < layers - 1], config, t.k, t.head_hidden)
    assert (heads.D, heads.E, heads.owners[0]) == (128, 16, t.owners[0])
    assert write_heads(tmp_path/'again.safetensors', heads).stat().st_size > heads.nbytes
