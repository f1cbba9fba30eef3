"Carving on a miniature llama with random weights: the oracle, clusters, router, whole line, and a tuning that is interrupted."
import json, os, signal, subprocess, time
from pathlib import Path

import edge0_lab
import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models.bailing_moe import Model, ModelArgs
from mlx_lm.utils import load_model

from edge0_lab.carve import activations, balanced_clusters, best_experts, carve_layer, carved_output, expert_norms, fit_router, relative_error, split_neurons
from edge0_lab.carve_fit import calibration, carve_model, carved_config, carved_tensors, fit_layer, layer_inputs, masked_hidden, refit_down
from edge0_lab.corpus import Corpus
from edge0_lab.smol import small_gguf, write_dense
from edge0_lab.tiny import train_python

ROOT = Path(__file__).resolve().parents[1]
try: PYTHON, WHY = train_python(), ''
except RuntimeError as e: PYTHON, WHY = None, str(e)
torch_part = pytest.mark.skipif(PYTHON is None, reason=WHY)
ENV = os.environ | dict(EDGE0_BLAS='off', PYTHONPATH=str(ROOT), OMP_NUM_THREADS='1')
pytest.importorskip('scipy', reason='scipy comes with the extra "dev"')


def draw(rng, *shape): return rng.normal(size=shape).astype(np.float32)


@pytest.fixture(scope='module')
def dense(tmp_path_factory):
    here = tmp_path_factory.mktemp('dense')
    return write_dense(small_gguf(here/'small.gguf'), here/'dense')


@pytest.fixture(scope='module')
def windows(): return np.random.default_rng(1).integers(3, 250, (8, 64)).astype(np.int32)


def f32(folder):
    model, cfg = load_model(folder)
    model.set_dtype(mx.float32)
    return model, cfg


def logits(model, windows): return np.array(model(mx.array(windows)))


@pytest.mark.parametrize('shared, experts', [(128, 4), (64, 6), (192, 2), (224, 8)])
def test_all_experts_and_a_router_of_zeros_are_the_dense_model(shared, experts, dense, windows):
    llama, cfg = f32(dense)
    layers = []
    for _, layer, x in layer_inputs(llama, windows):
        gate, up, down = (np.array(layer.mlp[f'{n}_proj'].weight) for n in ('gate', 'up', 'down'))
        o = split_neurons(activations(x, gate, up), down, shared, experts)
        assert sorted(o) == list(range(256))
        layers.append({n: mx.array(a) for n, a in dict(gate=gate[o], up=up[o], down=down[:, o], router=np.zeros((experts, 64), np.float32)).items()})
    stock = Model(ModelArgs.from_dict(carved_config(cfg, shared, experts, experts)))
    stock.load_weights(list(carved_tensors(dict(tree_flatten(llama.parameters())), layers, shared).items()), strict=True)
    want, got = logits(llama, windows[:2]), logits(stock, windows[:2])
    assert np.abs(got - want).max() < 1e-4*np.abs(want).max()


def test_one_expert_less_is_not_the_dense_model(dense, windows, tmp_path):
    llama, _ = f32(dense)
    want = logits(llama, windows[:2])
    got = logits(f32(carve_model(dense, tmp_path/'c', windows, 128, 4, 3, fit=False, progress=None))[0], windows[:2])
    assert np.abs(got - want).max() > 0.01*np.abs(want).max()


@pytest.mark.parametrize('n, E', [(96, 8), (60, 1), (12, 12), (64, 2)])
def test_clusters_are_balanced(n, E):
    label = balanced_clusters(draw(np.random.default_rng(n), n, 40), E)
    assert np.bincount(label, minlength=E).tolist() == [n//E]*E


def test_clusters_that_cannot_be_balanced_are_refused():
    with pytest.raises(ValueError, match='allowed: a divisor of 10'): balanced_clusters(np.ones((10, 4)), 3)


def test_planted_groups_are_found():
    rng = np.random.default_rng(0)
    group = rng.permutation(np.repeat(np.arange(6), 20))
    label = balanced_clusters(draw(rng, 6, 200)[group] + 0.3*draw(rng, 120, 200), 6)
    assert all(len(set(label[group == g])) == 1 for g in range(6))


@pytest.fixture(scope='module')
def layer():
    rng = np.random.default_rng(3)
    x = draw(rng, 16, 32)[rng.integers(0, 16, 2000)] + 0.5*draw(rng, 2000, 32)
    return x, draw(rng, 192, 32)*np.exp(0.7*draw(rng, 192, 1))/32**0.5, draw(rng, 192, 32)/32**0.5, draw(rng, 32, 192)/192**0.5


def test_router_beats_a_random_choice_on_unseen_tokens(layer):
    x, gate, up, down = layer
    p, _ = carve_layer(x[:1500], gate, up, down, 64, 8, 2)
    a, x = activations(x[1500:], p['gate'], p['up']), x[1500:]
    best = best_experts(expert_norms(a[:, 64:], p['down'][:, 64:], 8), 2)
    pick = best_experts(x @ p['router'].T, 2)
    overlap = (pick & best).sum(1).mean()/2
    y = activations(x, gate, up) @ down.T
    chance = [relative_error(y, carved_output(p | dict(router=draw(np.random.default_rng(s), 8, 32)*0.01), x, 64, 2)) for s in range(5)]
    assert overlap > 0.5 and relative_error(y, carved_output(p, x, 64, 2)) < min(chance)             # by chance .25


def test_router_learns_what_is_linear():
    x = draw(np.random.default_rng(0), 3000, 16)
    truth = best_experts(x @ draw(np.random.default_rng(1), 6, 16).T, 2)
    pick = best_experts(x[2000:] @ fit_router(x[:2000], truth[:2000]).T, 2)
    assert (pick & truth[2000:]).sum()/truth[2000:].sum() > 0.9


def test_masked_form_equals_numpy_and_repairs_reduce_the_error(layer):
    x, gate, up, down = layer
    y = activations(x, gate, up) @ down.T
    p, want = carve_layer(x[:1500], gate, up, down, 64, 8, 2)
    q = {n: mx.array(a) for n, a in p.items()}
    np.testing.assert_allclose(np.array(masked_hidden(q, mx.array(x), 64, 2)[0] @ q['down'].T), carved_output(p, x, 64, 2), rtol=0, atol=1e-4)
    error = lambda q: relative_error(y[1500:], carved_output({n: np.array(a) for n, a in q.items()}, x[1500:], 64, 2))
    refit = q | dict(down=mx.array(refit_down(q, x[:1500], y[:1500], 64, 2)))
    fit, seen = fit_layer(refit, x[:1500], y[:1500], want, 64, 2, epochs=10, batch=150, rate=2e-3)
    assert error(fit) < error(refit) < error(q) and len(seen) == 100


def test_carving_goes_on_after_an_interruption(dense, windows, tmp_path):
    whole = carve_model(dense, tmp_path/'whole', windows, 128, 4, 2, progress=None, batch=64)
    def stop(line): raise KeyboardInterrupt
    with pytest.raises(KeyboardInterrupt): carve_model(dense, tmp_path/'cut', windows, 128, 4, 2, progress=stop, batch=64)
    assert not (tmp_path/'cut'/'config.json').exists()
    lines = []
    cut = carve_model(dense, tmp_path/'cut', windows, 128, 4, 2, progress=lines.append, batch=64)
    assert len(lines) == 1 and lines[0].startswith('layer 2 of 2')
    assert (whole/'model.safetensors').read_bytes() == (cut/'model.safetensors').read_bytes()
    assert sorted(f.name for f in cut.glob('token*')) == sorted(f.name for f in dense.glob('token*'))


@pytest.mark.parametrize('bad, said', [(dict(shared=256), 'allowed: experts of one width'), (dict(experts=5), 'do not divide'), (dict(k=5), 'allowed: 1 to 4')])
def test_bad_shapes_are_refused_by_name(bad, said, dense, windows, tmp_path):
    with pytest.raises(ValueError, match=said): carve_model(dense, tmp_path/'c', windows, **dict(shared=128, experts=4, k=2) | bad)


def test_calibration_takes_every_domain_but_the_exercises():
    c = Corpus({'train/english': np.arange(5000), 'train/code': np.arange(5000, 10000), 'train/task': np.arange(10000, 15000), 'heldout/english': np.arange(20000, 25000)})
    w = calibration(c, 3, 100)
    assert w.shape == (6, 100) and w.max() < 10000 and (w[:3] >= 5000).all() and len({r[0] for r in w.tolist()}) == 6
    with pytest.raises(ValueError, match='no training stream'): calibration(c, 60, 100)


@pytest.fixture(scope='module')
def tokens(tmp_path_factory):
    r, out = np.random.default_rng(0), {}
    for i, d in enumerate(('english', 'code')):
        for s, n in (('train', 6000), ('heldout', 800)): out[f'{s}/{d}'] = ((np.cumsum(r.integers(0, 3, n)) + 80*i) % 250).astype(np.uint16)
    path = tmp_path_factory.mktemp('tokens')/'tokens.npz'
    np.savez(path, **out)
    return path


def command(model, folder, tokens, *more):
    return [PYTHON, '-m', 'edge0_lab.carve_tune', '--model', str(model), '--tokens', str(tokens), '--run', str(folder/'run'), '--out', str(folder/'out'), '--steps', '40', '--T', '48', '--warmup', '5',
            '--lr', '2e-3', '--threads', '1', '--eval-T', '64', '--eval-rows', '4', '--save-every', '10', *more]


def log(folder): return [json.loads(l) for l in (folder/'run'/'log.jsonl').read_text().splitlines()]


def losses(folder): return {l['step']: (l['ce'], l['kl']) for l in log(folder) if 'ce' in l}


@torch_part
@pytest.mark.parametrize('how', ['kill', 'term', 'seconds'])
def test_tuning_interrupted_equals_uninterrupted(how, dense, windows, tokens, tmp_path):
    carved = carve_model(dense, tmp_path/'carved', windows, 128, 4, 2, fit=False, progress=None)
    for n in ('whole', 'cut'): (tmp_path/n).mkdir()
    teacher = ('--teacher', str(dense))
    subprocess.run(command(carved, tmp_path/'whole', tokens, *teacher), env=ENV, check=True, capture_output=True)
    whole = losses(tmp_path/'whole')
    held = [l['heldout']['all'] for l in log(tmp_path/'whole') if 'heldout' in l]
    assert sorted(whole) == list(range(1, 41)) and len(held) == 2 and held[1] < 0.5*held[0]
    if how == 'seconds': subprocess.run(command(carved, tmp_path/'cut', tokens, *teacher, '--seconds', '0.15'), env=ENV, check=True, capture_output=True)
    else:
        p = subprocess.Popen(command(carved, tmp_path/'cut', tokens, *teacher), env=ENV, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        while not (tmp_path/'cut'/'run'/'state.pt').exists():
            assert p.poll() is None, 'ended before it could be stopped'
            time.sleep(0.005)
        p.send_signal(signal.SIGKILL if how == 'kill' else signal.SIGTERM); p.wait()
    assert max(losses(tmp_path/'cut')) < 40 and not (tmp_path/'cut'/'out').exists(), 'nothing was left to resume'
    subprocess.run(command(carved, tmp_path/'cut', tokens, *teacher), env=ENV, check=True, capture_output=True)
    assert losses(tmp_path/'cut') == whole
    assert (tmp_path/'cut'/'out'/'model.safetensors').read_bytes() == (tmp_path/'whole'/'out'/'model.safetensors').read_bytes()


@torch_part
@pytest.mark.parametrize('what', ['dense', 'carved'])
def test_torch_reads_and_writes_what_mlx_lm_serves(what, dense, windows, tokens, tmp_path):
    "One step at rate 0 must give the same model back, and torch's perplexity must be mlx-lm's."
    folder = dense if what == 'dense' else carve_model(dense, tmp_path/'carved', windows, 128, 4, 2, fit=False, progress=None)
    subprocess.run(command(folder, tmp_path, tokens, '--steps', '1', '--lr', '0'), env=ENV, check=True, capture_output=True)
    said = [l['heldout'] for l in log(tmp_path) if 'heldout' in l]
    assert said[0] == said[1]
    before, after = mx.load(str(folder/'model.safetensors')), mx.load(str(tmp_path/'out'/'model.safetensors'))
    assert sorted(before) == sorted(after) and all((before[n] == after[n]).all().item() for n in before)
    with np.load(tokens) as z: held = {n.split('/')[1]: z[n] for n in z.files if n.startswith('heldout/')}
    model, _ = f32(tmp_path/'out')
    for d, s in held.items():
        at = np.linspace(0, (len(s) - 1)//64 - 1, 4).astype(int)*64
        rows = np.stack([s[a:a + 65] for a in at]).astype(np.int64)
        z = logits(model, rows[:, :-1]).astype(np.float64)
        z -= z.max(-1, keepdims=True)
        nll = np.log(np.exp(z).sum(-1)) - np.take_along_axis(z, rows[:, 1:, None], -1)[..., 0]
        assert abs(np.exp(nll.mean()) - said[0][d]) < 1e-3*said[0][d] + 5e-3
