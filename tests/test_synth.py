"""synth: the two releases in form, small in content."""
import json
from pathlib import Path

import edge0_lab
import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.utils import load_model as stock_load, load_tokenizer

from edge0_lab.models import load_model
from edge0_lab.settings import tier
from edge0_lab.store import Checkpoint, ExpertStore
from edge0_lab.synth import lora_targets, plan, plan_bytes, release_config, synth

NARROW = {'edge0-35b': dict(hidden_size=128, num_experts=16, moe_intermediate_size=64, shared_expert_intermediate_size=64, vocab_size=512, head_dim=64,
                            linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=32, linear_value_head_dim=32, num_attention_heads=4),
          'edge0-8b': dict(hidden_size=128, num_experts=16, moe_intermediate_size=64, moe_shared_expert_intermediate_size=64, vocab_size=512, intermediate_size=128,
                           num_attention_heads=4, head_dim=32, q_lora_rank=64, kv_lora_rank=64, qk_nope_head_dim=32, qk_rope_head_dim=32, v_head_dim=32)}


@pytest.fixture(scope='module', autouse=True)
def eager():
    mx.disable_compile()
    yield
    mx.enable_compile()


@pytest.mark.parametrize('name, size, targets, heads', [('edge0-35b', 19.5e9, 310, 33), ('edge0-8b', 4.5e9, 153, 16)])
def test_published_figures(name, size, targets, heads):
    config = release_config(name)
    tensors, quantization = plan(config)
    assert abs(plan_bytes(tensors)/size - 1) < 0.01
    assert len(lora_targets(tensors)) == targets
    assert len(tier(name).owners) == heads
    if name == 'edge0-35b': assert {v['bits'] for k, v in quantization.items() if isinstance(v, dict)} == {8}


@pytest.mark.parametrize('name, keys', [('edge0-35b', 'release'), ('edge0-8b', 'release'), ('edge0-8b', 'mlx-lm')])
def test_opens_here_and_where_it_should_in_stock(tmp_path, name, keys):
    report = synth(name, tmp_path, layers=4, keys=keys, shard_bytes=300_000, **NARROW[name])
    assert report['written'] == report['bytes'] == sum(p.stat().st_size for p in tmp_path.glob('*.safetensors'))
    index = json.loads((tmp_path/'model.safetensors.index.json').read_text())
    shards = sorted(p.name for p in tmp_path.glob('model*.safetensors'))
    assert sorted(set(index['weight_map'].values())) == shards and len(shards) > 1
    again = synth(name, tmp_path, layers=4, keys=keys, shard_bytes=300_000, **NARROW[name])
    assert again['written'] == 0
    with load_model(tmp_path) as m:
        assert m.notes == [] and m.controlled
        spelled = '.experts.' if (name, keys) == ('edge0-8b', 'release') else '.switch_mlp.'
        assert any(spelled in n for n in m.checkpoint.names())
        a, b = (m.store.arrays(m.moe_layers[0], e)['gate.weight'] for e in (0, 1))
        assert not np.array_equal(a, b)
        assert m.tokenizer.decode([300, 511]) == ' w300 w511' and m.tokenizer.decode(m.tokenizer.encode('Héllo')) == 'Héllo'
    if (name, keys) == ('edge0-8b', 'release'):
        with pytest.raises(ValueError): stock_load(tmp_path)
    else:
        model, _ = stock_load(tmp_path)
        model.set_dtype(mx.float32)
        assert mx.isfinite(model(mx.array([[5, 6, 7]]))).all().item()


def test_heads_and_adapter_in_the_released_form(tmp_path):
    synth('edge0-35b', tmp_path, layers=4, **NARROW['edge0-35b'])
    with Checkpoint.open(tmp_path/'prerouter_k4.safetensors') as ck:
        assert ck.metadata['K'] == '4' and json.loads(ck.metadata['owners']) == [0, 1, 2] and ck.metadata['format_version'] == '1'
        assert ck.entry('layers.1.fc1.weight').shape == (512, 128 + 32) and ck.entry('layers.1.fc2.weight').dtype == 'F16'
    with Checkpoint.open(tmp_path/'lora_k4.safetensors') as ck:
        assert (ck.metadata['r'], ck.metadata['alpha']) == ('16', '32')
        modules = {n.rpartition('.')[0] for n in ck.names()}
        assert len(modules) == 3*5 + 4 + 4*3 and all(n.startswith('language_model.') for n in modules)
        assert not any('switch_mlp' in n for n in modules)
    with load_model(tmp_path) as m:
        have = {n for n, _ in m.model.named_modules()}
        assert modules <= have


@pytest.mark.case(20)
def test_a_cut_shard_is_not_taken_for_a_finished_one(tmp_path):
    synth('edge0-35b', tmp_path, layers=1, heads=False, lora=False, **NARROW['edge0-35b'])
    f = tmp_path/'model.safetensors'
    f.write_bytes(f.read_bytes()[:-4096])
    with pytest.raises(ValueError, match='exists with another content'): synth('edge0-35b', tmp_path, layers=1, heads=False, lora=False, **NARROW['edge0-35b'])


def test_refuses_what_makes_no_sense(tmp_path):
    with pytest.raises(ValueError, match='keys'): synth('edge0-8b', tmp_path, keys='hf')
    with pytest.raises(ValueError, match='tier'): synth('edge0-70b', tmp_path)
    with pytest.raises(ValueError, match='layers'): synth('edge0-8b', tmp_path, layers=0)
