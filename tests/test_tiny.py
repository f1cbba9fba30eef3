"What ships of the tiny tiers: loadable by stock mlx-lm, quantised from the teacher that lies beside, balanced, specialised, within the budget of bytes."
import json
from pathlib import Path

import numpy as np
import pytest

import edge0_lab
import mlx.core as mx
from edge0_lab.settings import data_path
from edge0_lab.tiny import domain_table, information, load_share, train_python
from edge0_lab.tiny_corpus import DOMAINS, EOS

TIERS = ('tiny-softmax', 'tiny-sigmoid')


def about(tier): return json.loads(data_path(tier, 'training.json').read_text())


def bar(): return {l.split(',')[0]: float(l.split(',')[2]) for l in data_path('tiny', 'ngram.csv').read_text().split()[1:]}


@pytest.mark.parametrize('tier', TIERS)
def test_stock_mlx_lm_loads_model_and_tokeniser(tier):
    from mlx_lm import load
    model, tok = load(str(data_path(tier)))
    text = 'La ville est située en France. add: 12 + 30 = 42\ndef f(x):\n    return x\n'
    assert tok.decode(tok.encode(text)) == text
    assert tok.eos_token_id == 0 and tok.convert_ids_to_tokens(0) == EOS and 0 in tok.eos_token_ids
    assert np.isfinite(np.array(model(mx.array([tok.encode(text)])).astype(mx.float32))).all()


@pytest.mark.parametrize('tier', TIERS)
def test_int4_is_the_teacher_quantised(tier):
    q, t = (mx.load(str(data_path(tier, *p, 'model.safetensors'))) for p in ((), ('teacher',)))
    names = [n.removesuffix('.scales') for n in q if n.endswith('.scales')]
    assert sum('switch_mlp' in n for n in names) == 24
    for n in names:
        w, bits = t[n + '.weight'], 32*q[n + '.weight'].shape[-1]//t[n + '.weight'].shape[-1]
        assert bits == (8 if n.endswith(('mlp.gate', 'shared_expert_gate')) else 4) and w.shape[-1] == 64*q[n + '.scales'].shape[-1]
        if 'switch_mlp' in n or bits == 8:
            for got, want in zip((q[n + '.weight'], q[n + '.scales'], q[n + '.biases']), mx.quantize(w, group_size=64, bits=bits)): assert mx.array_equal(got, want), n
    for n in set(q) & set(t) - {n + '.weight' for n in names}: assert mx.array_equal(q[n], t[n]), n


def test_architectures():
    s, g = (json.loads(data_path(t, 'config.json').read_text()) for t in TIERS)
    t = s['text_config']
    assert s['model_type'] == 'qwen3_5_moe' and t['num_experts'] >= 64 and t['num_experts_per_tok'] == 8 and t['num_hidden_layers'] >= 8
    assert set(t['layer_types']) == {'linear_attention', 'full_attention'} and t['shared_expert_intermediate_size']
    assert g['model_type'] == 'bailing_hybrid' and g['architectures'] == ['BailingMoeV3ForCausalLM'] and g['num_hidden_layers'] - g['first_k_dense_replace'] >= 8
    assert (g['first_k_dense_replace'], g['n_group'], g['topk_group'], g['routed_scaling_factor'], g['num_experts_per_tok'], g['num_experts']) == (1, 8, 4, 2.5, 8, 64)


def test_budget_of_bytes():
    total = sum(f.stat().st_size for t in TIERS for f in data_path(t).rglob('*') if f.is_file())
    assert total < 100e6


@pytest.mark.parametrize('tier', TIERS)
def test_routing_is_neither_collapsed_nor_uniform(tier):
    assert min(about(tier)['min_share']) >= 0.1
    z = np.load(data_path(tier, 'routes.npz'))
    share = load_share(z['ids'], 64)
    assert share.min() >= 0.05 and share.max() > 1.5     # a small trace is noisier than the whole held-out text above
    bits = [information(domain_table(z['ids'][:, :, l], z['domain'], 64)) for l in range(8)]
    assert sum(b >= 0.2 for b in bits) >= 4, bits


@pytest.mark.parametrize('tier', TIERS)
def test_language_model_beats_the_trigram(tier):
    a, ngram = about(tier), bar()
    assert set(a['heldout']) == {*DOMAINS, 'all'} and a['heldout_tokens'] > 400_000
    assert a['heldout']['all'] <= ngram['all'] - 0.15, (a['heldout'], ngram)


def test_python_with_torch_is_named_or_refused(monkeypatch, tmp_path):
    monkeypatch.setenv('EDGE0_TRAIN_PYTHON', 'some-python')
    assert train_python() == 'some-python'
    monkeypatch.delenv('EDGE0_TRAIN_PYTHON')
    monkeypatch.setattr('edge0_lab.tiny.find_spec', lambda n: None)
    monkeypatch.setattr('edge0_lab.tiny.__file__', str(tmp_path/'edge0_lab'/'tiny.py'))
    with pytest.raises(RuntimeError, match=r'edge0-lab\[train\]'): train_python()
    beside = tmp_path/'.venv-train'/'bin'/'python'
    beside.parent.mkdir(parents=True)
    beside.touch()
    assert train_python() == str(beside)
