"Head distillation: what is collected, what is learned, resumption, two processes."
import json, os, subprocess, sys
from dataclasses import replace
from pathlib import Path

import edge0_lab
import mlx.core as mx
import numpy as np
import pytest

from edge0_lab.distill import Corpus, Dequantised, HeadRun, Seen, collect, fit_heads, gather_seen, head_logits, judge, predicted, router_kl, stacked, train_heads
from edge0_lab.executors import Exact
from edge0_lab.models import load_model
from edge0_lab.prerouter import make_predictor, router_weights, warm_heads
from edge0_lab.routing import Router
from edge0_lab.settings import tier
from edge0_lab.slots import open_caches
from edge0_lab.synth import synth_family


@pytest.fixture(scope='module', params=('qwen3_5_moe', 'bailing_moe_v3'))
def loaded(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    synth_family(request.param, folder)
    with load_model(folder, dtype=mx.float32) as m: yield m


def owners_of(loaded): return [N for N in loaded.blocks if N + 1 in loaded.blocks]


def tokens_of(loaded, B, T, seed=0): return np.random.default_rng(seed).integers(0, loaded.config.get('text_config', loaded.config)['vocab_size'], (B, T))


def drawn(kind='softmax', n=2, B=6, T=12, D=16, E=8, k=2, seed=0):
    "A `Seen` whose next logits are a fixed linear map of today's state and choice, so that there is something to learn."
    rng = np.random.default_rng(seed)
    router = Router('softmax', E, k) if kind == 'softmax' else Router('sigmoid_group', E, k, n_group=4, topk_group=2, scale=2.5)
    h = rng.standard_normal((n, B, T, D)).astype(np.float16)
    ids = np.argsort(rng.standard_normal((n, B, T, E)), -1)[..., :k].astype(np.uint16)
    A, C = rng.standard_normal((n, D, E)), 2*rng.standard_normal((n, E, E))
    hot = np.zeros((n, B, T, E)); np.put_along_axis(hot, ids.astype(int), 1, -1)
    logits = np.zeros((n, B, T, E), np.float16)
    logits[:, :, 1:] = (np.einsum('nbtd,nde->nbte', h[:, :, :-1].astype(float), A) + np.einsum('nbtd,nde->nbte', hot[:, :, :-1], C))/3
    bias = {N + 1: None if kind == 'softmax' else (0.1*rng.standard_normal(E)).astype(np.float32) for N in range(1, n + 1)}
    return Seen(tuple(range(1, n + 1)), h, ids, logits, router, bias)


def heads_for(seen, H=8, seed=0):
    rng = np.random.default_rng(seed)
    return warm_heads({N + 1: rng.standard_normal((seen.router.E, seen.h.shape[-1])).astype(np.float32)/4 for N in seen.owners}, seen.owners, seen.k, H)


# ---- collecting

def test_collected_states_are_the_models(loaded):
    owners, tokens = owners_of(loaded), tokens_of(loaded, 3, 7)
    seen = collect(loaded, tokens, owners, batch=2)
    gates = router_weights(loaded.checkpoint)
    D, E, k = gates[owners[0]].shape[1], gates[owners[0]].shape[0], loaded.blocks[owners[0]].k
    assert seen.h.shape == (len(owners), 3, 7, D) and seen.ids.shape[-1] == k and seen.logits.shape[-1] == E
    alone = collect(loaded, tokens[1:2], owners)                       # windows do not see each other
    assert np.abs(alone.h[:, 0].astype(np.float32) - seen.h[:, 1].astype(np.float32)).max() < 0.02
    for j, N in enumerate(owners):
        if N + 1 in owners:                                            # the logits of N+1 give the choice of N+1
            nxt = owners.index(N + 1)
            again = loaded.blocks[N + 1].router(seen.logits[j].astype(np.float32), seen.bias[N + 1], check=False)[0]
            assert np.mean([set(a) == set(b) for a, b in zip(again.reshape(-1, k), seen.ids[nxt].reshape(-1, k))]) > 0.9
    fewer = collect(loaded, tokens, owners, k=k - 1)
    assert fewer.ids.shape[-1] == k - 1 == fewer.k and all(b.k == k for b in loaded.blocks.values())
    with pytest.raises(ValueError, match='k'): collect(loaded, tokens, owners, k=E + 1)


def test_collect_leaves_the_model_as_it_was(loaded):
    mark = lambda *a: None
    for b in loaded.blocks.values(): b.path, b.tap = mark, None
    def broken(layer, x, ids): raise KeyboardInterrupt
    with pytest.raises(KeyboardInterrupt): collect(loaded, tokens_of(loaded, 1, 4), owners_of(loaded), path=broken)
    assert all(b.path is mark and b.tap is None and b.k == b.router.k for b in loaded.blocks.values())


def test_the_reconstruction_is_what_the_paths_compute(loaded):
    layer = owners_of(loaded)[0]
    spec, E = loaded.store.spec(layer), loaded.store.E(layer)
    rng = np.random.default_rng(0)
    x, ids = mx.array(rng.standard_normal((4, spec.D)), mx.float32), mx.array(rng.integers(0, E, (4, 2)))
    caches = open_caches(loaded.store, 8)
    a, b = np.array(Dequantised(loaded.store)(layer, x, ids)), np.array(Exact(caches, kernel='ops')(layer, x, ids))
    assert np.linalg.norm(a - b) < 1e-3*np.linalg.norm(b)
    small = Dequantised(loaded.store, hold=0)                           # keeps nothing, same result
    assert (np.array(small(layer, x, ids)) == a).all() and not small.held
    for c in caches.each(): c.close()


def test_windows_stay_in_their_split_and_take_turns():
    c = Corpus({'train/a': np.arange(100), 'train/b': np.arange(1000, 1050), 'heldout/a': np.arange(5000, 5040), 'train/short': np.arange(3)})
    w = c.windows('train', 6, 10)
    assert [int(r[0] >= 1000) for r in w] == [0, 1]*3 and (np.diff(w, axis=1) == 1).all()
    assert (c.windows('heldout', 2, 40) >= 5000).all()
    with pytest.raises(ValueError, match='heldout'): c.windows('heldout', 1, 41)
    with pytest.raises(FileNotFoundError, match='train tiny'): Corpus.open('/nowhere/tokens.npz')


# ---- learning

@pytest.mark.parametrize('kind', ['softmax', 'sigmoid_group'])
def test_heads_learn_in_both_families(kind):
    seen = drawn(kind, B=40, T=20)
    heads, run = heads_for(seen), HeadRun(steps=150, batch=256, lr=1e-2)
    trained, curve = fit_heads(seen, heads, run)
    assert np.mean(curve[-5:]) < 0.5*np.mean(curve[:2])
    overlap = lambda h: np.mean([r['overlap@2'] for r in judge(seen, predicted(seen, h))])
    assert overlap(trained) > overlap(heads) + 0.3
    assert judge(seen, seen.logits[:, :, 1:].astype(np.float32))[0]['exact'] == 1 and abs(judge(seen, seen.logits[:, :, 1:].astype(np.float32))[0]['kl']) < 1e-5


def test_the_counterpart_of_kl_sees_what_softmax_does_not():
    a = mx.random.normal((5, 8), key=mx.random.key(0))
    assert float(mx.abs(router_kl(a, a + 3, 'softmax')).max()) < 1e-5
    assert float(router_kl(a, a + 3, 'sigmoid_group').min()) > 1
    for kind in ('softmax', 'sigmoid_group'):                            # both are 0 only at the truth, and never negative
        b = a + mx.random.normal(a.shape, key=mx.random.key(1))
        assert float(router_kl(a, b, kind).min()) > 0
    with pytest.raises(ValueError, match='kind'): router_kl(a, a, 'softmin')


def test_hidden_features_and_the_linear_map():
    seen = drawn(B=40, T=20)
    heads, run = heads_for(seen), HeadRun(steps=60, batch=256, lr=1e-2)
    full, _ = fit_heads(seen, heads, run)
    blind, _ = fit_heads(seen, heads, run, without=('this', 'previous'))
    line, _ = fit_heads(seen, heads, run, linear=True)
    D = heads.D
    for N in seen.owners:
        assert not blind.part(N, 'linear_init')[:, D:].any() and not blind.part(N, 'fc1')[:, D:].any()
        assert not line.part(N, 'fc2').any()
    kl = {n: np.mean([r['kl'] for r in judge(seen, predicted(seen, h))]) for n, h in dict(full=full, blind=blind, line=line).items()}
    assert kl['full'] < kl['blind'] and kl['line'] < kl['blind']         # this token's choice matters in this world
    with pytest.raises(ValueError, match="without: 'next'"): fit_heads(seen, heads, run, without=('next',))
    with pytest.raises(ValueError, match='batch'): fit_heads(seen, heads, replace(run, batch=10**6))


def test_killed_and_resumed_is_uninterrupted(tmp_path):
    seen, run = drawn(), HeadRun(steps=12, batch=16)
    heads = heads_for(seen)
    want, curve = fit_heads(seen, heads, run)
    state = tmp_path/'s.safetensors'
    for stop in (1, 5, 6, 11): fit_heads(seen, heads, run, state, save_every=2, stop=stop)
    got, whole = fit_heads(seen, heads, run, state)
    assert whole == curve
    for N in seen.owners:
        for n in ('fc1', 'fc2', 'linear_init'): assert (got.parts[N][n] == want.parts[N][n]).all()
    with pytest.raises(ValueError, match='another run'): fit_heads(seen, heads, replace(run, seed=1), state)


def test_what_judge_calls_predicted_is_what_a_predictor_routes(loaded):
    "Teacher-forced logits of this room against the predictor of room 06 on the same states."
    owners, tokens = owners_of(loaded), tokens_of(loaded, 1, 9)
    seen = collect(loaded, tokens, owners)
    warm = warm_heads(router_weights(loaded.checkpoint), owners, seen.k, 8)
    heads, _ = fit_heads(seen, warm, HeadRun(steps=5, batch=8))
    p = make_predictor('on', loaded.blocks, [N + 1 for N in owners], heads=heads, kernel='ops')
    h = {N: mx.array(seen.h[j, 0].astype(np.float32)) for j, N in enumerate(owners)}
    for j, N in enumerate(owners): p.observe(N, 0, h[N], mx.array(seen.ids[j, 0].astype(np.uint32)), mx.ones((9, seen.k)))
    want = seen.choice(predicted(seen, heads))[:, 0]                      # (n, T-1, k)
    for j, N in enumerate(owners):
        native = mx.zeros((9, seen.k), mx.uint32), mx.ones((9, seen.k))
        ids = np.array(p.routing(N + 1, 0, 9, native=native)[0])
        assert np.mean([set(a) == set(b) for a, b in zip(ids[1:], want[j])]) == 1


# ---- two processes

SCRIPT = '''
import json, sys
sys.path.insert(0, {tests!r})
import edge0_lab, mlx.core as mx, numpy as np
from pathlib import Path
from test_distill import drawn, heads_for
from edge0_lab.distill import HeadRun, fit_heads, exchange
from dataclasses import replace
group = mx.distributed.init(strict=True, backend='ring')
seen = drawn()
share = replace(seen, h=seen.h[:, group.rank()::2], ids=seen.ids[:, group.rank()::2], logits=seen.logits[:, group.rank()::2])
whole = exchange(share, group)
same = all((getattr(whole, n) == getattr(seen, n)).all() for n in ('h', 'ids', 'logits'))
heads, curve = fit_heads(whole, heads_for(seen), HeadRun(steps=8, batch=16), group=group)
if group.rank() == 0: Path({out!r}).write_text(json.dumps(dict(size=group.size(), same=bool(same), curve=curve, fc2=heads.part(1, 'fc2').tolist())))
'''


def test_two_processes_have_the_losses_of_one(tmp_path):
    out, script = tmp_path/'out.json', tmp_path/'run.py'
    script.write_text(SCRIPT.format(tests=str(Path(__file__).parent), out=str(out)))
    launch = Path(sys.executable).with_name('mlx.launch')
    p = subprocess.run([str(launch), '-n', '2', '--backend', 'ring', '--starting-port', str(20000 + os.getpid() % 20000), '--', sys.executable, str(script)],
                       capture_output=True, text=True, timeout=240)
    assert out.exists(), p.stdout[-2000:] + p.stderr[-2000:]
    got = json.loads(out.read_text())
    assert got['size'] == 2 and got['same']
    heads, curve = fit_heads(drawn(), heads_for(drawn()), HeadRun(steps=8, batch=16))
    assert np.abs(np.array(got['curve']) - curve).max() < 2e-5
    assert np.abs(np.array(got['fc2']) - heads.part(1, 'fc2')).max() < 1e-4 and np.abs(heads.part(1, 'fc2')).max() > 1e-3


def test_a_tier_from_text_to_file(tmp_path, monkeypatch):
    "Collect, fit, judge, write; the second time from the cache."
    monkeypatch.setenv('EDGE0_LAB_CACHE', str(tmp_path/'cache'))
    t = tier('tiny-sigmoid')
    rng = np.random.default_rng(0)
    corpus = Corpus({'train/a': rng.integers(0, 4096, 400), 'heldout/a': rng.integers(0, 4096, 200)})
    go = lambda name: train_heads('tiny-sigmoid', 4, windows=2, T=16, heldout=1, run=HeadRun(steps=3, batch=8), corpus=corpus, out=tmp_path/name, progress=False)
    log = go('prerouter_k4.safetensors')
    import edge0_lab.states as room
    monkeypatch.setattr(room, 'collect', lambda *a, **k: pytest.fail('collected again'))
    again = go('again.safetensors')
    assert log == again and (tmp_path/'prerouter_k4.safetensors').read_bytes() == (tmp_path/'again.safetensors').read_bytes()
    assert set(log['heldout_text']) == {'previous', 'next-gate', 'first half', 'trained'} and len(log['heldout_text']['trained']) == len(t.owners)
