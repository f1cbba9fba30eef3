"The ladder of predictors: targets, figures, resumption; and the batched served pass it stands on."
import json
from dataclasses import replace

import edge0_lab
import mlx.core as mx
import numpy as np
import pytest

from edge0_lab.bench import ladder as room
from edge0_lab.bench.ladder import LEARNED, ahead, bench_ladder, guess_costs, ladder_rows, least_squares, rung
from edge0_lab.decode import Lab, RunConfig
from edge0_lab.distill import Corpus, collect, guess, hooked, predicted, text_loss
from edge0_lab.models import load_model
from edge0_lab.prerouter import find_heads, read_heads, router_weights, warm_heads
from edge0_lab.settings import tier
from edge0_lab.synth import synth_family
from test_distill import drawn, heads_for


@pytest.fixture(scope='module', params=(('qwen3_5_moe', dict(num_hidden_layers=4)), ('bailing_moe_v3', dict(num_hidden_layers=5))), ids=lambda p: p[0])
def loaded(request, tmp_path_factory):
    "Three owners or more, so that a choice is passed on."
    folder = tmp_path_factory.mktemp(request.param[0])
    synth_family(request.param[0], folder, **request.param[1])
    with load_model(folder, dtype=mx.float32) as m: yield m


def restless(loaded, seed=0):
    "Heads whose one-hots count, so that a wrong feature shows."
    gates = router_weights(loaded.checkpoint)
    owners = [N for N in loaded.blocks if N + 1 in loaded.blocks and N >= min(loaded.blocks) + max(1, len(loaded.blocks)//5) - 1]
    heads, rng = warm_heads(gates, owners, next(iter(loaded.blocks.values())).k, 8), np.random.default_rng(seed)
    for p in heads.parts.values():
        p['linear_init'] = p['linear_init'] + rng.standard_normal(p['linear_init'].shape).astype(np.float32)*0.3
        p['fc2'] = rng.standard_normal(p['fc2'].shape).astype(np.float32)*0.3
    return heads


# ---- the batched served pass

@pytest.mark.parametrize('teacher', [False, True])
def test_windows_at_once_are_routed_as_one_text_after_the_other(loaded, teacher):
    "Executed sets of `collect(by=heads)` against the predictors of room 06, one window at a time."
    heads, lab = restless(loaded), Lab(loaded)
    tokens = np.random.default_rng(1).integers(0, lab.vocab, (3, 11))
    seen = collect(loaded, tokens, heads.owners, by=guess('heads', loaded, heads, teacher))
    for b, text in enumerate(tokens):
        trace = lab.score(text, RunConfig(prerouter=True, heads=heads, features='teacher' if teacher else 'executed')).trace
        same = [set(x) == set(y) for j, N in enumerate(heads.owners) for x, y in zip(seen.ids[j, b].tolist(), trace.ids[:, N].tolist())]
        assert np.mean(same) > 0.95
    native = collect(loaded, tokens, heads.owners)
    assert len(heads.owners) > 1
    assert (native.ids[-1] != seen.ids[-1]).any() and (native.ids[0] == seen.ids[0]).all()


def test_the_loss_is_that_of_lab_logits(loaded):
    lab, heads = Lab(loaded), restless(loaded)
    tokens = np.random.default_rng(2).integers(0, lab.vocab, (2, 9))
    consumers = [N + 1 for N in heads.owners]
    for what, run in (('native', dict()), ('heads', dict(prerouter=True, heads=heads)), ('previous', dict(prerouter='previous')), ('next-gate', dict(prerouter='next-gate'))):
        got = text_loss(loaded, tokens, by=None if what == 'native' else guess(what, loaded, heads), consumers=consumers)
        for b, text in enumerate(tokens):
            l = np.array(lab.logits(text, RunConfig(trace=False, **run))[:-1].astype(mx.float32), np.float64)
            want = np.log(np.exp(l - l.max(-1, keepdims=True)).sum(-1)) + l.max(-1) - l[np.arange(8), text[1:]]
            assert np.abs(got[b] - want).mean() < 0.02, what


def test_native_positions(loaded):
    heads = restless(loaded)
    tokens, by = np.random.default_rng(3).integers(0, 100, (2, 8)), guess('heads', loaded, heads)
    plain = collect(loaded, tokens, heads.owners)
    all_native = collect(loaded, tokens, heads.owners, by=by, native=np.ones(8, bool))
    assert (all_native.h == plain.h).all() and (all_native.ids == plain.ids).all()
    late = collect(loaded, tokens, heads.owners, by=by, native=np.arange(8) < 5)
    assert (late.ids[:, :, :5] == plain.ids[:, :, :5]).all() and (late.ids[-1][:, 5:] != plain.ids[-1][:, 5:]).any()
    with pytest.raises(ValueError, match='native'): collect(loaded, tokens, heads.owners, by=by, native=np.arange(8) > 3)
    with pytest.raises(ValueError, match='native'): collect(loaded, tokens, heads.owners, by=by, native=np.ones(7, bool))
    with pytest.raises(ValueError, match="what: 'nobody'"): guess('nobody', loaded)
    with pytest.raises(ValueError, match='heads: None'): guess('heads', loaded)


def test_hooks_come_off_after_an_error(loaded):
    before = {N: (b.k, b.path, b.route, b.tap) for N, b in loaded.blocks.items()}
    with pytest.raises(ZeroDivisionError):
        with hooked(loaded, 1, path=lambda *a: 1/0, route=lambda *a: None): 1/0
    assert {N: (b.k, b.path, b.route, b.tap) for N, b in loaded.blocks.items()} == before


# ---- targets and figures

@pytest.mark.parametrize('layers, tokens', [(1, 0), (1, 1), (1, 2), (1, 3), (2, 1)])
def test_a_target_further_away(layers, tokens):
    seen = drawn(n=2, B=2, T=9)
    moved = ahead(seen, layers, tokens)
    h, ids, before, target = moved.batch(np.arange(moved.pairs))
    at = 0
    for b in range(2):
        for t in range(moved.h.shape[2] - 1):
            assert (h[0, at] == seen.h[0, b, t]).all() and (ids[0, at] == seen.ids[0, b, t]).all()
            assert (target[0, at] == seen.logits[layers - 1, b, t + tokens]).all()
            at += 1
    assert at == moved.pairs and moved.bias[2] is seen.bias[1 + layers]


@pytest.mark.parametrize('kind', ['softmax', 'sigmoid_group'])
def test_a_rung_by_hand(kind):
    seen = drawn(kind, B=3, T=7)
    logits = np.random.default_rng(5).standard_normal((2, 3, 6, 8)).astype(np.float32)
    got = rung(seen, logits)
    k = seen.k
    for j, N in enumerate(seen.owners):
        over, exact, found = [], [], []
        wide = replace(seen.router, k=6 if kind == 'softmax' else len(got['recall'][0]))
        for b in range(3):
            for t in range(6):
                true = seen.router(seen.logits[j, b, t + 1][None].astype(np.float32), seen.bias[N + 1], check=False)[0][0]
                named = wide(logits[j, b, t][None], seen.bias[N + 1], check=False)[0][0]
                over.append(len(set(true) & set(named[:k])))
                exact.append(set(true) == set(named[:k]))
                found.append([len(set(true) & set(named[:m]))/k for m in range(1, len(named) + 1)])
        assert abs(got['overlap'][j] - np.mean(over)) < 1e-4 and abs(got['exact'][j] - np.mean(exact)) < 1e-4
        assert np.abs(np.array(got['recall'][j]) - np.mean(found, 0)).max() < 1e-4
    assert got['mean']['overlap'][1] <= got['mean']['overlap'][0] <= got['mean']['overlap'][2]


def test_controls_know_frequencies_and_no_more():
    rng = np.random.default_rng(0)
    seen = drawn(B=30, T=20)
    logits = seen.logits.copy()
    logits[..., 3] += 4                                                     # one expert nearly always
    seen = replace(seen, logits=logits)
    heads = heads_for(seen)
    class t: head_hidden = 8
    all_of = room.rungs(seen, seen, t, {N: rng.standard_normal((8, 16)).astype(np.float32) for N in (2, 3)}, heads, None)
    most = all_of['most used']()
    true = seen.choice(seen.logits[:, :, 1:])
    for j in range(2):
        top = set(np.argsort(-np.bincount(true[j].reshape(-1), minlength=8), kind='stable')[:2])
        assert abs(most['overlap'][j] - np.mean([len(top & set(r)) for r in true[j].reshape(-1, 2)])) < 1e-4
    assert most['mean']['overlap'][0] > 1                                    # expert 3 is there
    perfect = rung(seen, seen.logits[:, :, 1:].astype(np.float32))['mean']['overlap'][0]
    assert perfect == 2 and all_of['shuffle']()['mean']['overlap'][0] < perfect
    assert set(LEARNED) <= set(all_of) and [n for n, _ in ladder_rows(dict(rungs=all_of))] and len(ladder_rows(dict(rungs=all_of))) == len(all_of)


def test_least_squares_beats_nothing_it_should_not():
    seen = drawn(B=60, T=20)
    f = least_squares(seen)
    fit = np.mean((f(seen) - seen.logits[:, :, 1:].astype(np.float32))**2)
    assert fit < np.mean((seen.logits[:, :, 1:].astype(np.float32) - seen.logits[:, :, 1:].mean((1, 2), keepdims=True))**2)
    rng = np.random.default_rng(0)                                           # no small change of the map does better
    for _ in range(5):
        d = 1e-2*rng.standard_normal((2, 16, 8)).astype(np.float32)
        other = f(seen) + np.einsum('nbtd,nde->nbte', seen.h[:, :, :-1].astype(np.float32), d)
        assert np.mean((other - seen.logits[:, :, 1:].astype(np.float32))**2) > fit


def test_parameters_are_counted():
    heads = read_heads(find_heads(tier('tiny-sigmoid').checkpoint, 8))
    cost = guess_costs(heads, np.zeros((heads.E, heads.D), np.float32), repeats=3)
    assert cost['head']['parameters'] == sum(a.size for a in heads.parts[heads.owners[0]].values())
    assert cost['next gate']['parameters'] == heads.E*heads.D and cost['previous token'] == dict(parameters=0, microseconds=0.0)


def test_the_command_resumes(tmp_path, monkeypatch):
    monkeypatch.setenv('EDGE0_LAB_CACHE', str(tmp_path/'cache'))
    rng = np.random.default_rng(0)
    corpus = Corpus({'train/a': rng.integers(0, 4096, 400), 'heldout/a': rng.integers(0, 4096, 300)})
    monkeypatch.setattr(Corpus, 'open', classmethod(lambda cls, path=None: corpus))
    go = lambda name, k: bench_ladder('tiny-sigmoid', k, windows=3, T=16, heldout=2, steps=2, batch=16, out=str(tmp_path/name))
    real, done = room.rungs, []
    def cut(*a):
        for n, f in real(*a).items():
            if len(done) == 4: raise KeyboardInterrupt
            yield n, lambda n=n, f=f: (done.append(n), f())[1]
    class Cut(dict):
        def __init__(self, *a): self.a = a
        def items(self): return cut(*self.a)
        def __len__(self): return 18
    monkeypatch.setattr(room, 'rungs', lambda *a: Cut(*a))
    with pytest.raises(KeyboardInterrupt): go('a.json', 8)
    assert len(done) == 4 and not (tmp_path/'a.json').exists()
    again = []
    monkeypatch.setattr(room, 'rungs', lambda *a: {n: (lambda n=n, f=f: (again.append(n), f())[1]) for n, f in real(*a).items()})
    go('a.json', 8)
    assert not set(done) & set(again) and len(done) + len(again) == len(real(*[drawn()]*2, None, {}, heads_for(drawn()), None))
    got = json.loads((tmp_path/'a.json').read_text())
    assert set(got) == {'8'} and len(got['8']['rungs']) == len(done) + len(again)
    go('a.json', 4)
    both = json.loads((tmp_path/'a.json').read_text())
    assert set(both) == {'8', '4'}
    monkeypatch.setattr(room, 'rungs', None)                                   # costs alone need no rung
    fresh = bench_ladder('tiny-sigmoid', 8, costs=True, out=str(tmp_path/'a.json'))
    again = json.loads((tmp_path/'a.json').read_text())
    assert again['8']['costs'] == fresh and again['8']['rungs'] == both['8']['rungs'] and again['4'] == both['4']
    with pytest.raises(ValueError, match='no rungs of k = 8'): bench_ladder('tiny-sigmoid', 8, costs=True, out=str(tmp_path/'none.json'))


# ---- what is shipped

@pytest.mark.parametrize('name', ['tiny-softmax', 'tiny-sigmoid'])
def test_the_shipped_ladder(name):
    file = tier(name).checkpoint/'ladder.json'
    if not file.exists(): pytest.skip(f'not measured yet: edge0-lab bench ladder --tier {name} --k 8')
    ladder = json.loads(file.read_text())
    assert '8' in ladder
    for k, l in ladder.items():
        value = {n: g['mean']['overlap'] for n, g in ladder_rows(l)}
        assert all(lo <= v <= hi for v, lo, hi in value.values())
        for n in ('shuffle', 'most used', 'previous token', 'next gate, next token'): assert value['shipped head'][1] > value[n][2], (k, n)
        for g in l['rungs'].values(): assert len(g['recall'][0]) == 3*int(k) and (np.diff(np.array(g['recall']).mean(0)) >= 0).all()


# ---- all head files, end to end

def test_every_head_file_in_processes_of_their_own(tmp_path, monkeypatch, capfd):
    "The real command with next to no text: options reach every process, nothing is written beside the checkpoints."
    from edge0_lab import headtrain
    from edge0_lab.cli import main
    rng, cache = np.random.default_rng(0), tmp_path/'cache'
    cache.mkdir()
    np.savez(cache/'tokens.npz', **{'train/a': rng.integers(0, 4096, 400), 'heldout/a': rng.integers(0, 4096, 300)})
    monkeypatch.setenv('EDGE0_LAB_CACHE', str(cache))
    real, cells, before = headtrain.train_all, [('tiny-softmax', 2), ('tiny-sigmoid', 4)], {p: p.stat().st_mtime_ns for p in tier('tiny-softmax').checkpoint.parent.glob('tiny-*/prerouter_*')}
    monkeypatch.setattr('edge0_lab.distill.train_all', lambda **kw: real(cells, **kw))
    assert main('train heads --all --windows 2 --tokens 16 --heldout 2 --steps 2 --batch 8 --served 1 --lr 0.001'.split() + ['--out', str(tmp_path/'heads')]) == 0
    assert sorted(p.relative_to(tmp_path/'heads').as_posix() for p in (tmp_path/'heads').rglob('*.safetensors')) == ['tiny-sigmoid/prerouter_k4.safetensors', 'tiny-softmax/prerouter_k2.safetensors']
    for name, k in cells:
        log, heads = json.loads((tmp_path/'heads'/name/f'prerouter_k{k}.json').read_text()), read_heads(find_heads(tmp_path/'heads'/name, k))
        assert heads.k == k and heads.owners == read_heads(find_heads(tier(name).checkpoint, k)).owners
        assert (log['windows'], log['T'], log['heldout'], log['served'], log['run']['steps'], log['run']['batch'], log['run']['lr']) == (2, 16, 2, 1, 2, 8, 0.001)
    assert {p: p.stat().st_mtime_ns for p in before} == before
    assert capfd.readouterr().out.count('nats on held-out text') == 2
    assert main(['train', 'heads', '--all', '--k', '4']) == 2 and 'k: 4' in capfd.readouterr().err
