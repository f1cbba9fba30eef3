"An adapter beside a model: nothing lost, nothing left behind, nothing unnoticed."
import json
from dataclasses import replace
from pathlib import Path

import edge0_lab
import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten

from edge0_lab.decode import Lab, RunConfig
from edge0_lab.int4 import relative_l2
from edge0_lab.lora import Adapter, attach_lora, dense_base, detach_lora, lora_paths, merge_lora, new_adapter, read_lora, survival, worn, write_lora
from edge0_lab.models import load_model
from edge0_lab.settings import data_path
from edge0_lab.store import CheckpointError
from edge0_lab.targets import KINDS, RELEASED, kind_of, linears_of

PROMPT = [5, 17, 40, 3, 77, 21]
PLAIN = RunConfig(trace=False)


def adapter_for(model, size=0.05, seed=0, kinds=RELEASED, dtype=np.float16):
    rng = np.random.default_rng(seed)
    zero = new_adapter(model, 4, 8, kinds=kinds)
    return replace(zero, parts={p: (A.astype(dtype), (size*rng.standard_normal(B.shape)).astype(dtype)) for p, (A, B) in zero.parts.items()})


def still(adapter): return replace(adapter, parts={p: (A, np.zeros_like(B)) for p, (A, B) in adapter.parts.items()})


def answers(lab, run, steps=3, tokens=(9, 30, 31)):
    "Logits of a prompt's steps, the same tokens whatever is chosen."
    with lab.prefill(PROMPT, run) as s:
        out = []
        for t in (None, *tokens[:steps - 1]):
            s.step(t)
            out.append(np.array(s.logits))
        return np.stack(out)


def arrays(model): return dict(tree_flatten(model.parameters()))


@pytest.mark.parametrize('name, layers, count', [('edge0-35b', 40, 310), ('edge0-8b', 24, 153)])
def test_the_releases_have_so_many_targets(name, layers, count):
    from edge0_lab.synth import lora_targets, plan, release_config
    config = release_config(name)
    got = lora_targets(plan(config)[0])
    assert len(got) == count
    assert not any('switch_mlp' in p or 'experts.' in p.replace('shared_experts.', '') for p in got)
    assert {p.split('.')[0] for p in got} == {'language_model' if name == 'edge0-35b' else 'model'}


def test_both_rules_choose_the_same_layers(lab):
    "What synth writes for a model and what `lora_paths` finds in it."
    from edge0_lab.synth import lora_targets, plan
    config = json.loads((lab.loaded.path/'config.json').read_text())
    tensors = plan({k: v for k, v in config.items() if not k.startswith('quantization')}, keys='mlx-lm', group_size=32)[0]
    assert lora_targets(tensors) == lora_paths(lab.loaded.model)


@pytest.mark.case(33)
@pytest.mark.parametrize('kinds', [RELEASED, *[(k,) for k in RELEASED]], ids=lambda k: k[0] if len(k) == 1 else 'all')
def test_zero_is_the_base_and_more_is_not(lab, kinds):
    "CASE 33: B = 0 gives the base's bits, in prompt and steps; B != 0 does not."
    model, bare = lab.loaded.model, answers(lab, PLAIN)
    a = adapter_for(model, kinds=kinds)
    assert np.array_equal(answers(lab, replace(PLAIN, lora='unmerged', adapter=still(a))), bare)
    lifted = answers(lab, replace(PLAIN, lora='unmerged', adapter=a))
    assert relative_l2(lifted, bare) > 1e-3
    assert np.array_equal(answers(lab, PLAIN), bare) and worn(model) is None


@pytest.mark.parametrize('kind', RELEASED)
def test_unmerged_is_the_float32_sum_on_every_kind_of_layer(lab, folder, kind):
    "Served beside int4 against dequantised base plus delta, and as near as the bare model is to its own."
    a = adapter_for(lab.loaded.model, kinds=(kind,))
    U = np.array(lab.logits(PROMPT, replace(PLAIN, lora='unmerged', adapter=a)))
    B = np.array(lab.logits(PROMPT, PLAIN))
    with Lab.open(folder, kernel='ops') as dense:
        dense_base(dense.loaded.model)
        B_ref = np.array(dense.logits(PROMPT, PLAIN))
        merge_lora(dense.loaded.model, a, 'dequantised').label = 'test'
        at = worn(dense.loaded.model)
        with dense._session(PLAIN) as s:
            s.adapter = at
            R = np.array(s.score(PROMPT).logits)
    assert relative_l2(B, B_ref) < 2e-3
    assert relative_l2(U, R) < 2e-3 < relative_l2(U, B)


def test_steps_and_prompt_agree(lab):
    "One token at a time (fused, joined, in rows) and all at once (MLX) are the same function."
    a = adapter_for(lab.loaded.model)
    run = replace(PLAIN, lora='unmerged', adapter=a)
    text = [*PROMPT, 9, 30]
    whole = np.array(lab.logits(text, run))[len(PROMPT) - 1:]
    assert relative_l2(answers(lab, run, 3, (9, 30)), whole) < 2e-3


def test_our_kernels_and_mlx_agree(lab, folder):
    a = adapter_for(lab.loaded.model)
    run = replace(PLAIN, lora='unmerged', adapter=a)
    with Lab.open(folder, kernel='ops') as ops: theirs = answers(ops, run)
    assert relative_l2(answers(lab, run), theirs) < 2e-3
    assert relative_l2(answers(lab, replace(PLAIN, decode='resident', prefill='resident', lora='unmerged', adapter=a)), theirs) < 2e-3


def test_off_again_every_array_is_the_same_object(folder):
    with Lab.open(folder) as lab:
        model = lab.loaded.model
        before, classes, bare = arrays(model), {p: type(m) for p, m in model.named_modules()}, answers(lab, PLAIN)
        a = adapter_for(model)
        for put in (lambda: attach_lora(model, a), lambda: merge_lora(model, a), lambda: merge_lora(model, a, 'dequantised'), lambda: merge_lora(model, a, bits=8), lambda: merge_lora(model, a, bits=3), lambda: merge_lora(model, a, grid='base')):
            put()
            assert detach_lora(model) == len(a.parts)
            after = arrays(model)
            assert after.keys() == before.keys() and all(after[n] is v for n, v in before.items())
            assert {p: type(m) for p, m in model.named_modules()} == classes
        assert np.array_equal(answers(lab, PLAIN), bare)


def test_base_bytes_are_never_written(lab):
    "A hash of every weight before, while and after an adapter is worn."
    model = lab.loaded.model
    digest = lambda: {n: hash(np.array(v.view(mx.uint8)).tobytes()) for n, v in arrays(model).items() if not n.rpartition('.')[2].startswith('lora_')}
    before = digest()
    at = attach_lora(model, adapter_for(model))
    assert digest() == before and len(arrays(model)) == len(before) + 2*len(at.applied)
    detach_lora(model)
    assert digest() == before


def test_two_labs_and_two_adapters(folder, monkeypatch):
    "Requests take turns with their own adapters; nothing is opened again, and the other lab sees nothing."
    with Lab.open(folder) as lab, Lab.open(folder) as other:
        model = lab.loaded.model
        runs = [PLAIN, *[replace(PLAIN, lora='unmerged', adapter=adapter_for(model, seed=s)) for s in (1, 2)], replace(PLAIN, lora='merged', adapter=adapter_for(model, seed=1))]
        alone = [answers(lab, r) for r in runs]
        assert all(not np.array_equal(a, b) for i, a in enumerate(alone) for b in alone[:i])
        def never(*_, **__): raise AssertionError('opened again')
        monkeypatch.setattr('edge0_lab.decode.load_model', never)
        sessions, got = [lab.prefill(PROMPT, r) for r in runs], [[] for _ in runs]
        for t in (None, 9, 30):
            for s, out in zip(sessions, got):
                s.step(t)
                out.append(np.array(s.logits))
            assert np.array_equal(answers(other, PLAIN), alone[0])
        for out, want in zip(got, alone): assert np.array_equal(np.stack(out), want)
        for s in sessions: s.close()
        assert worn(model) is None and np.array_equal(answers(lab, PLAIN), alone[0])


@pytest.mark.case(11)
def test_an_error_leaves_a_bare_model(folder):
    "CASE 11 with an adapter: A ended in an exception, B is as if alone."
    with Lab.open(folder) as lab:
        bare = answers(lab, PLAIN)
        run = replace(PLAIN, lora='unmerged', adapter=adapter_for(lab.loaded.model, size=1e4, dtype=np.float32))
        a = run.adapter
        broken = replace(a, parts={p: (A*np.float32(1e30), B*np.float32(1e30)) for p, (A, B) in a.parts.items()})
        with pytest.raises(FloatingPointError): answers(lab, replace(run, adapter=broken))
        assert worn(lab.loaded.model) is None and np.array_equal(answers(lab, PLAIN), bare)


def test_an_adapter_by_hand_is_not_hidden(lab):
    "A run that did not ask for it does not run with it, and does not take it off."
    model, a = lab.loaded.model, adapter_for(lab.loaded.model)
    at = attach_lora(model, a)
    try:
        for run in (PLAIN, replace(PLAIN, lora='unmerged', adapter=a)):
            with pytest.raises(RuntimeError, match='by hand'): lab.generate(PROMPT, 1, run)
            assert worn(model) is at
        with pytest.raises(ValueError, match='already'): attach_lora(model, a)
    finally: detach_lora(model)


@pytest.mark.case(33)
def test_files_through_the_lab(folder, tmp_path):
    "CASE 33: a file is found by name, read again when it changes, and refused when it fits nothing."
    with Lab.open(folder) as lab:
        a = adapter_for(lab.loaded.model)
        path = write_lora(tmp_path/'lora_k3.safetensors', a)
        run = replace(PLAIN, lora='unmerged', adapter=path)
        first = answers(lab, run)
        assert np.array_equal(first, answers(lab, replace(run, adapter=a))) and np.array_equal(first, answers(lab, replace(run, adapter=str(path))))
        write_lora(path, adapter_for(lab.loaded.model, seed=5), metadata='flat')
        assert not np.array_equal(answers(lab, run), first)
        out = lab.generate(PROMPT, 2, run)
        assert f'lora unmerged: {len(a.parts)} layers, r 4' in out.report()
        with pytest.raises(CheckpointError, match='lora_'): lab.generate(PROMPT, 1, replace(run, adapter=None))
        with pytest.raises(CheckpointError, match='no such file'): lab.generate(PROMPT, 1, replace(run, adapter=tmp_path/'none.safetensors'))
        strange = Adapter({f'elsewhere.{p}': v for p, v in a.parts.items()}, 4, 8)
        with pytest.raises(ValueError, match='elsewhere'): lab.generate(PROMPT, 1, replace(run, adapter=strange))
        assert worn(lab.loaded.model) is None


def test_the_release_s_own_file_is_found_and_worn(tmp_path):
    from edge0_lab.synth import synth
    synth('tiny-softmax', tmp_path, layers=4)
    with Lab.open(tmp_path) as lab:
        k = lab.native_k
        path = next(Path(tmp_path).glob('lora_*.safetensors'))
        adapter = read_lora(path)
        assert set(adapter.parts) == set(lora_paths(lab.loaded.model)) and adapter.r == 16 and adapter.alpha == 32
        bare, lifted = (np.array(lab.logits(PROMPT, RunConfig(k=k, trace=False, lora=l))) for l in ('off', 'unmerged'))
        assert not np.array_equal(bare, lifted)


@pytest.mark.case(35)
def test_tied_embeddings(tmp_path):
    "CASE 35: a checkpoint without lm_head takes an adapter, and none on the matrix it does not have."
    from edge0_lab.synth import synth_family
    synth_family('qwen3_moe', tmp_path, tie_word_embeddings=True)
    with Lab.open(tmp_path) as lab:
        assert not any('lm_head' in n for n in arrays(lab.loaded.model))
        a, bare = adapter_for(lab.loaded.model), answers(lab, PLAIN)
        assert np.array_equal(answers(lab, replace(PLAIN, lora='unmerged', adapter=still(a))), bare)
        assert not np.array_equal(answers(lab, replace(PLAIN, lora='unmerged', adapter=a)), bare)
        with pytest.raises(ValueError, match='lm_head'): attach_lora(lab.loaded.model, Adapter({'lm_head': (np.ones((4, 64), np.float16), np.ones((96, 4), np.float16))}, 4, 8))


def test_what_may_not_be_adapted(lab):
    model = lab.loaded.model
    for path, (m, kind) in linears_of(model).items():
        if kind in KINDS: continue
        rows, cols = m['weight'].shape
        cols = cols*32//m.bits if hasattr(m, 'bits') else cols
        with pytest.raises(ValueError, match=kind): attach_lora(model, Adapter({path: (np.ones((2, cols), np.float16), np.ones((rows, 2), np.float16))}, 2, 4))
    for bad in ('model.layers.1.mlp.switch_mlp.up_proj', 'model.layers.1.mlp.experts.3.up_proj'):
        with pytest.raises(ValueError, match='routed expert'): Adapter({bad: (np.ones((2, 64), np.float16), np.ones((64, 2), np.float16))}, 2, 4)
    assert worn(model) is None


def test_both_prefixes_mean_the_same_layer(lab):
    "`language_model.model...`, `model...` and the original's `model.language_model...`."
    model, a = lab.loaded.model, adapter_for(lab.loaded.model)
    bare = lambda p: p.removeprefix('language_model.')
    want = np.array(lab.logits(PROMPT, replace(PLAIN, lora='unmerged', adapter=a)))
    for spell in (bare, lambda p: f'language_model.{bare(p)}', lambda p: bare(p).replace('model.', 'model.language_model.', 1)):
        other = replace(a, parts={spell(p): v for p, v in a.parts.items()})
        assert np.array_equal(np.array(lab.logits(PROMPT, replace(PLAIN, lora='unmerged', adapter=other))), want)
    p = next(iter(a.parts))
    twice = replace(a, parts={p: a.parts[p], (bare(p) if p != bare(p) else f'language_model.{p}'): a.parts[p]})
    with pytest.raises(ValueError, match='twice'): attach_lora(model, twice)


def test_training_touches_a_and_b_alone(folder):
    "Gradients on A and B only; what was frozen before is frozen after; our kernels are refused by name."
    loaded = load_model(folder, kernel='ops')
    dense_base(loaded.model)
    flags = {p: set(m._no_grad) for p, m in loaded.model.named_modules()}
    a = adapter_for(loaded.model, dtype=np.float32)
    at = attach_lora(loaded.model, a, trainable=True)
    names = {n for n, _ in tree_flatten(loaded.model.trainable_parameters())}
    assert names == {f'{p}.lora_{x}' for p in at.applied for x in 'AB'}
    detach_lora(loaded.model)
    assert {p: set(m._no_grad) for p, m in loaded.model.named_modules()} == flags
    loaded.close()
    with load_model(folder, kernel='kernel') as ours:
        with pytest.raises(ValueError, match='no gradient'): attach_lora(ours.model, a, trainable=True)
        assert worn(ours.model) is None


@pytest.mark.parametrize('odd', [dict(r=0), dict(r=True), dict(alpha=float('inf')), dict(parts={})])
def test_odd_adapters(odd):
    good = dict(parts={'self_attn.q_proj': (np.ones((2, 4), np.float16), np.ones((4, 2), np.float16))}, r=2, alpha=4)
    Adapter(**good)
    with pytest.raises(ValueError, match='allowed'): Adapter(**{**good, **odd})


def test_alpha_scales_and_negative_alpha_subtracts(lab):
    a = adapter_for(lab.loaded.model, size=1e-3)
    B = np.array(lab.logits(PROMPT, PLAIN))
    at = lambda alpha: np.array(lab.logits(PROMPT, replace(PLAIN, lora='unmerged', adapter=replace(a, alpha=alpha)))) - B
    up, down = at(8.0), at(-8.0)
    assert relative_l2(up, -down) < 0.2 and np.array_equal(at(0), np.zeros_like(B))


def test_rank_one_odd_widths_and_biases():
    "A layer of 40 columns, 7 outputs and a bias; rank 1; rows from one to many."
    class M(nn.Module):
        def __init__(self): super().__init__(); self.self_attn = nn.Module(); self.self_attn.q_proj = nn.Linear(40, 7)
    m = M()
    rng = np.random.default_rng(0)
    a = Adapter({'self_attn.q_proj': (rng.standard_normal((1, 40)).astype(np.float32), rng.standard_normal((7, 1)).astype(np.float32))}, 1, 3)
    for T in (1, 5, 700):
        x = mx.random.normal((T, 40))
        want = np.array(m.self_attn.q_proj(x)) + np.array(x) @ a.delta('self_attn.q_proj').T
        attach_lora(m, a)
        got = np.array(m.self_attn.q_proj(x))
        detach_lora(m)
        assert np.allclose(got, want, atol=1e-4)


def test_bfloat16_stays_bfloat16():
    "A layer of a GPU's dtype answers in it."
    class M(nn.Module):
        def __init__(self): super().__init__(); self.self_attn = nn.Module(); self.self_attn.q_proj = nn.Linear(64, 32, bias=False)
    m = M(); m.set_dtype(mx.bfloat16)
    x = mx.random.normal((3, 64)).astype(mx.bfloat16)
    plain = m.self_attn.q_proj(x)
    attach_lora(m, still(adapter_for(m)))
    assert m.self_attn.q_proj(x).dtype == mx.bfloat16 and mx.array_equal(m.self_attn.q_proj(x), plain)
    detach_lora(m)


def test_survival_of_what_is_shipped():
    "Shipped campaign: on every kind of layer of both tiers the unmerged logits are nearer to float32 than every merge at four bits or fewer."
    path = data_path('tiny', 'merge.json')
    if not path.exists(): pytest.skip('no data/tiny/merge.json; edge0-lab bench merge --out data/tiny/merge.json makes it')
    r = json.loads(path.read_text())
    assert set(r['tiers']) == {'tiny-softmax', 'tiny-sigmoid'}
    for name, t in r['tiers'].items():
        kinds = {l['kind'] for l in t['logits']}
        assert kinds == {'all', *t['weights']} and {'attention', 'linear attention', 'shared expert'} == set(t['weights']), name
        for l in t['logits']:
            near = l['variants']['unmerged']['distance']
            merged = {n: v['distance'] for n, v in l['variants'].items() if n[0] in '234'}
            assert len(merged) >= 6 and near < min(merged.values()), (name, l['adapter'], l['kind'], near, merged)
        for w in t['weights'].values():
            c = w['curve']
            assert c['control']['moved'] > 0.01 and min(c['refit']) < 0 and abs(c['base'][0]) < 0.05   # below 0, and the grid of the base that keeps still


def test_the_adapter_costs_less_than_a_tenth_of_a_step():
    r = json.loads(data_path('bench', 'lora.json').read_text())
    assert r['checkpoint'] == 'edge0-35b' and r['adapter']['targets'] == 310 and r['added'] < 0.10 and r['thin_ms'] < 0.10*1e3*np.median(r['seconds']['no adapter'])
    base, adapted, again = (np.array(r['seconds'][n]) for n in r['table']['arm'])
    assert len(base) == len(adapted) == len(again) and abs(np.median(adapted/base) - 1 - r['added']) < 1e-3
