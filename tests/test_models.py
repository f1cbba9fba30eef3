"""models: eight families against stock mlx-lm, forced routing against a dense oracle, files that contradict themselves."""
import json, shutil
from pathlib import Path

import edge0_lab
import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import load_model as stock_load

from edge0_lab.models import load_model
from edge0_lab.store import Checkpoint, ExpertStore
from edge0_lab.synth import SMALL_FAMILIES, synth_family

TOKENS = [5, 17, 3, 88, 41, 9, 77, 12]
FAMILIES = sorted(SMALL_FAMILIES)


@pytest.fixture(scope='module', autouse=True)
def eager():
    "mx.compile on a Linux CPU starts a C++ compiler for every small function; nothing here depends on it."
    mx.disable_compile()
    yield
    mx.enable_compile()


@pytest.fixture(scope='module')
def made(tmp_path_factory):
    root, have = tmp_path_factory.mktemp('families'), {}
    def make(family, **kw):
        key = family, json.dumps(kw, sort_keys=True)
        if key not in have:
            have[key] = root/str(len(have))
            synth_family(family, have[key], **kw)
        return have[key]
    return make


def weights(store, layer, e):
    "Dequantised float64 gate, up, down of one expert."
    a, s = store.arrays(layer, e), store.spec(layer)
    out = []
    for i, p in enumerate(('gate', 'up', 'down')):
        w = mx.array(a[f'{p}.weight'])
        sc, b = (mx.array(a[f'{p}.{n}']).view(mx.bfloat16).astype(mx.float32) for n in ('scales', 'biases'))
        out.append(np.array(mx.dequantize(w, sc, b, s.group_size[i], s.bits[i])).astype(np.float64))
    return out


def dense(store):
    "A path in NumPy float64: the oracle, sharing no code with any kernel."
    held = {}
    def path(layer, x, ids):
        h, ids = np.array(x.astype(mx.float32)).astype(np.float64), np.array(ids)
        y = np.empty((*ids.shape, h.shape[1]))
        for t, j in np.ndindex(ids.shape):
            key = layer, int(ids[t, j])
            if key not in held: held[key] = weights(store, *key)
            g, u, d = held[key]
            a = g @ h[t]
            y[t, j] = d @ (a/(1 + np.exp(-a))*(u @ h[t]))
        return mx.array(y.astype(np.float32)).astype(x.dtype)
    return path


def both(folder, **kw):
    stock, _ = stock_load(Path(folder)); stock.set_dtype(mx.float32)
    ours = load_model(folder, **kw)
    ours.set_path(dense(ours.store))
    return ours, stock


def gap(a, b): return float(mx.abs(a - b).max()/mx.abs(b).max())


@pytest.mark.parametrize('kernel, tol', [('ops', 1e-5), ('auto', 1e-3)])
@pytest.mark.parametrize('family', FAMILIES)
def test_logits_equal_stock_at_native_k(made, family, kernel, tol):
    ours, stock = both(made(family), kernel=kernel)
    with ours:
        assert ours.controlled and ours.family == family
        assert gap(ours.step(TOKENS), stock(mx.array([TOKENS]))[0]) < tol
        mine, theirs = ours.make_cache(), make_prompt_cache(stock)
        assert ours.step(TOKENS[:5], mine, logits=None).shape == (5, 64)
        stock(mx.array([TOKENS[:5]]), theirs)
        for t in TOKENS[5:]:
            assert gap(ours.step([t], mine), stock(mx.array([[t]]), theirs)[0]) < tol


def moe(model):
    return [l.block_sparse_moe if 'block_sparse_moe' in l else l.mlp for l in model.layers]


class Forced(nn.Module):
    "Stands for a gate that returns ids and weights, or for a switch called with other ids."
    def __init__(self, f): super().__init__(); self.f = f
    def __call__(self, *a): return self.f(*a)


@pytest.mark.parametrize('family', FAMILIES)
def test_forced_ids_and_fewer_experts_against_a_dense_oracle(made, family):
    ours, _ = both(made(family), kernel='ops')
    with ours:
        layer = ours.moe_layers[-1]
        block = ours.blocks[layer]
        seen = {}
        def tap(n, name, value): seen[name] = value; return value
        block.tap = tap
        path = dense(ours.store)
        # forced: the same three experts with weights of our choice for every token
        ids, w = mx.array([[7, 0, 4]]*len(TOKENS)), mx.array([[0.5, -1.0, 2.0]]*len(TOKENS))
        block.route = lambda n, x, logits: (ids, w)
        ours.step(TOKENS, logits=None)
        shared = block.family.shared(block, seen['h'])
        want = (path(layer, seen['h'], ids)*w[..., None]).sum(1) + (0 if shared is None else shared)
        assert mx.array_equal(seen['ids'], ids) and gap(seen['out'], want) < 1e-5
        # k - 1: the layer's own choice, one expert fewer, is a prefix of the choice at k
        full = block.choose(seen['logits'])[0]
        block.route, block.k = None, block.k - 1
        ours.step(TOKENS, logits=None)
        assert seen['ids'].shape == (len(TOKENS), 2)
        few_ids, few_w = block.choose(seen['logits'])
        want = (path(layer, seen['h'], few_ids)*few_w[..., None]).sum(1) + (0 if shared is None else block.family.shared(block, seen['h']))
        assert gap(seen['out'], want) < 1e-5
        assert (np.array(few_ids) == np.array(full)[:, :2]).all()


@pytest.mark.case(23)
@pytest.mark.parametrize('bits', [2, 3, 5, 6, 8])
def test_one_layer_with_other_bits(made, bits):
    p = 'model.layers.1.mlp.switch_mlp.'
    mixed = {p + n: dict(bits=bits, group_size=32) for n in ('gate_proj', 'up_proj', 'down_proj')}
    mixed['model.layers.0.self_attn.q_proj'] = dict(bits=bits, group_size=64)
    mixed['model.layers.0.mlp.gate'] = dict(bits=8, group_size=64)
    for kernel, tol in (('ops', 1e-5), ('auto', 1e-3)):
        ours, stock = both(made('qwen3_moe', mixed=mixed), kernel=kernel)
        with ours:
            assert ours.store.spec(0).bits == (4, 4, 4) and ours.store.spec(1).bits == (bits,)*3
            assert ours.model.layers[0].self_attn.q_proj.bits == bits and ours.blocks[0].gate.bits == 8
            assert gap(ours.step(TOKENS), stock(mx.array([TOKENS]))[0]) < tol


@pytest.mark.case(24)
def test_config_that_contradicts_the_file(made, tmp_path):
    src = made('olmoe')
    want = load_model(src, kernel='ops')
    shutil.copytree(src, tmp_path, dirs_exist_ok=True)
    c = json.loads((src/'config.json').read_text())
    c['quantization'] = c['quantization_config'] = dict(group_size=32, bits=8)
    (tmp_path/'config.json').write_text(json.dumps(c))
    with pytest.warns(UserWarning, match='config.json says 8 bits'): got = load_model(tmp_path, kernel='ops')
    with want, got:
        assert any('self_attn.q_proj' in n and 'the file holds 4 bits' in n for n in got.notes)
        for m in (want, got): m.set_path(dense(m.store))
        assert mx.array_equal(want.step(TOKENS), got.step(TOKENS))


@pytest.mark.case(23)
def test_overrides_under_another_prefix(made, tmp_path):
    src = made('qwen3_5_moe')
    c = json.loads((src/'config.json').read_text())
    q = {k.removeprefix('language_model.'): v for k, v in c['quantization'].items()}
    shutil.copytree(src, tmp_path, dirs_exist_ok=True)
    (tmp_path/'config.json').write_text(json.dumps({**c, 'quantization': q, 'quantization_config': q}))
    with load_model(tmp_path, kernel='ops') as m, load_model(src, kernel='ops') as n:
        assert m.notes == [] and m.blocks[0].gate.bits == 8
        for x in (m, n): x.set_path(dense(x.store))
        assert mx.array_equal(m.step(TOKENS), n.step(TOKENS))


@pytest.mark.case(35)
@pytest.mark.parametrize('kernel', ['ops', 'auto'])
@pytest.mark.parametrize('family', ['qwen3_5_moe', 'qwen3_moe', 'bailing_moe_v3'])
def test_tied_embeddings(made, family, kernel):
    folder = made(family, tie_word_embeddings=True)
    with Checkpoint.open(folder) as ck: assert not any('lm_head' in n for n in ck.names())
    ours, stock = both(folder, kernel=kernel)
    with ours: assert gap(ours.step(TOKENS), stock(mx.array([TOKENS]))[0]) < 1e-3


def rewrite(src, out, change):
    shutil.copytree(src, out, ignore=shutil.ignore_patterns('*.safetensors'))
    mx.save_safetensors(str(out/'model.safetensors'), change(mx.load(str(src/'model.safetensors'))), metadata={'format': 'mlx'})
    return out


@pytest.mark.case(22)
@pytest.mark.parametrize('family', ['qwen3_5_moe', 'olmoe', 'bailing_moe_v3'])
def test_other_spellings_of_the_same_experts(made, tmp_path, family):
    src = made(family)
    def stacked(w): return {k.replace('.switch_mlp.', '.experts.'): v for k, v in w.items()}
    def single(w):
        out = {}
        for k, v in w.items():
            if '.switch_mlp.' not in k: out[k] = v; continue
            for e in range(v.shape[0]): out[k.replace('.switch_mlp.', f'.experts.{e}.')] = v[e]
        return out
    def fused(w):
        out = {k: v for k, v in w.items() if '.gate_proj' not in k and '.up_proj' not in k or '.switch_mlp.' not in k}
        for k, v in w.items():
            if '.switch_mlp.gate_proj' in k: out[k.replace('gate_proj', 'gate_up_proj')] = mx.concatenate([v, w[k.replace('gate_proj', 'up_proj')]], 1)
        return out
    with load_model(src, kernel='ops') as m:
        m.set_path(dense(m.store))
        want = m.step(TOKENS)
    for n, change in enumerate((stacked, single, fused)):
        with load_model(rewrite(src, tmp_path/str(n), change), kernel='ops') as m:
            m.set_path(dense(m.store))
            assert mx.array_equal(m.step(TOKENS), want), change.__name__


def test_a_vision_tower_and_extra_layers_are_dropped(made, tmp_path):
    extra = {'vision_tower.patch.weight': mx.zeros((4, 4)), 'language_model.mtp.fc.weight': mx.zeros((4, 4))}
    with load_model(rewrite(made('qwen3_5_moe'), tmp_path/'v', lambda w: {**w, **extra}), kernel='ops') as m:
        assert not any('vision' in n or 'mtp' in n for n, _ in tree_flatten(m.model.parameters()))


def test_a_name_too_many_or_too_few_is_an_error(made, tmp_path):
    src = made('olmoe')
    with pytest.raises(ValueError, match='model.layers.0.self_attn.extra'):
        load_model(rewrite(src, tmp_path/'a', lambda w: {**w, 'model.layers.0.self_attn.extra': mx.zeros(4)}), kernel='ops')
    with pytest.raises(ValueError, match='model.norm.weight'):
        load_model(rewrite(src, tmp_path/'b', lambda w: {k: v for k, v in w.items() if k != 'model.norm.weight'}), kernel='ops')


def test_experts_are_never_parameters_and_never_read(made):
    few, many = made('qwen3_moe', num_experts=8), made('qwen3_moe', num_experts=64, moe_intermediate_size=128)
    reads, peaks, sizes = [], [], []
    load_model(few, kernel='ops').close()
    for folder in (few, many):
        mx.clear_cache(); mx.reset_peak_memory()
        base = mx.get_active_memory()
        with open('/proc/self/io') as f: before = int(f.readline().split()[1])
        m = load_model(folder, kernel='ops')
        with open('/proc/self/io') as f: reads.append(int(f.readline().split()[1]) - before)
        peaks.append(mx.get_peak_memory() - base); sizes.append((m.resident_bytes(), m.expert_bytes()))
        with m: assert not any('switch' in n or '.experts.' in n for n, _ in tree_flatten(m.model.parameters()))
    grown, router = sizes[1][1] - sizes[0][1], sizes[1][0] - sizes[0][0]
    assert grown > 10*router
    assert reads[1] - reads[0] < router + 0.1*grown
    assert peaks[1] - peaks[0] < 2*router + 0.1*grown


@pytest.mark.parametrize('kernel', ['ops', 'auto'])
def test_families_without_a_record_stream_with_their_own_routing(tmp_path, kernel):
    from mlx_lm.models import qwen2_moe
    config = dict(model_type='qwen2_moe', hidden_size=64, num_hidden_layers=2, intermediate_size=64, num_attention_heads=2, num_experts_per_tok=2, num_experts=8,
                  moe_intermediate_size=64, shared_expert_intermediate_size=64, rms_norm_eps=1e-6, vocab_size=96, num_key_value_heads=2)
    model = qwen2_moe.Model(qwen2_moe.ModelArgs.from_dict(config))
    nn.quantize(model, 32, 4); model.set_dtype(mx.bfloat16)
    mx.save_safetensors(str(tmp_path/'model.safetensors'), dict(tree_flatten(model.parameters())))
    (tmp_path/'config.json').write_text(json.dumps({**config, 'quantization': dict(group_size=32, bits=4)}))
    ours, stock = both(tmp_path, kernel=kernel)
    with ours:
        assert not ours.controlled and ours.family is None and not ours.blocks[0].controlled
        assert gap(ours.step(TOKENS), stock(mx.array([TOKENS]))[0]) < (1e-5 if kernel == 'ops' else 1e-3)
        assert gap(ours.step(TOKENS, logits='last')[0], stock(mx.array([TOKENS]))[0, -1]) < (1e-5 if kernel == 'ops' else 1e-3)


def test_two_models_do_not_touch_each_other_or_stock(made):
    folder = made('qwen3_5_moe')
    a, stock = both(folder)
    b, _ = both(folder)
    with a, b:
        before = a.step(TOKENS)
        for block in b.blocks.values(): block.k = 1
        assert not mx.allclose(b.step(TOKENS), before, atol=1e-3)
        assert mx.array_equal(a.step(TOKENS), before)
        assert gap(before, stock(mx.array([TOKENS]))[0]) < 1e-3
        fresh, _ = stock_load(folder)
        assert all(type(m).__module__.startswith(('mlx', 'mlx_lm')) for _, m in fresh.named_modules())


@pytest.mark.case(6)
@pytest.mark.case(7)
def test_a_broken_row_names_its_layer(made):
    ours, _ = both(made('qwen3_5_moe'))
    with ours:
        block = ours.blocks[1]
        block.check = True
        block.tap = lambda layer, name, value: value*float('inf') if name == 'h' else value
        with pytest.raises(ValueError, match='layer 1'): ours.step(TOKENS[:1])


@pytest.mark.case(39)
def test_two_hundred_steps_keep_live_bytes_flat(made):
    ours, _ = both(made('qwen3_5_moe'))
    with ours:
        cache = ours.make_cache()
        live = []
        for i in range(200):
            mx.eval(ours.step([TOKENS[i % 8]], cache, logits='last'))
            if i >= 70 and i % 64 == 7: live.append(mx.get_active_memory())
        assert max(live) - min(live) < 2**19
