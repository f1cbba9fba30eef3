"Bytes of a described model against the files that mlx-lm writes; forecasts that move the right way."
import json
from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten

from edge0_lab.cli import main
from edge0_lab.forecast import Host, Shape, _spread, forecast, forecast_text, hit_band, shape_of, shape_of_config, speed
from edge0_lab.settings import data_path
from edge0_lab.synth import SMALL_FAMILIES, release_config, synth_family

HOST = Host('test', ram=16, ssd=3, bandwidth=100, reserve=2)


@pytest.fixture(scope='module')
def big(): return shape_of_config(release_config('edge0-35b'), '35b')


@pytest.mark.parametrize('family', SMALL_FAMILIES)
def test_a_described_model_has_the_bytes_of_its_files(family, tmp_path):
    "Headers against the lazy class, for every family: the experts to the byte."
    synth_family(family, tmp_path)
    described, stored = shape_of(tmp_path/'config.json'), shape_of(tmp_path)
    for n in ('L', 'E', 'k', 'expert', 'experts', 'kv_token'): assert getattr(described, n) == getattr(stored, n), n
    assert abs(described.resident - stored.resident) <= 0.05*stored.resident
    files = sum(t['data_offsets'][1] - t['data_offsets'][0] for p in tmp_path.glob('*.safetensors') for n, t in header(p).items() if n != '__metadata__')
    assert stored.experts + stored.resident == files


def header(path):
    raw = path.read_bytes()
    return json.loads(raw[8:8 + int.from_bytes(raw[:8], 'little')])


@pytest.mark.parametrize('family', ['qwen3_moe', 'bailing_moe_v3', 'qwen3_5_moe'])
def test_the_cache_grows_as_a_computed_one(family, tmp_path):
    "Really decode six tokens, and look at what the cache holds."
    from mlx_lm.models.cache import make_prompt_cache
    from mlx_lm.utils import load_model
    synth_family(family, tmp_path)
    model, _ = load_model(tmp_path)
    cache = make_prompt_cache(model)
    for t in range(6): mx.eval(model(mx.array([[t]]), cache=cache))
    seen = sum(c.keys[..., :c.offset, :].nbytes + c.values[..., :c.offset, :].nbytes for c in cache if hasattr(c, 'offset') and getattr(c, 'keys', None) is not None)
    assert shape_of(tmp_path).kv_token*6 == seen


def test_nothing_is_allocated():
    "The 35b shape in a process that could not hold it."
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    s = shape_of_config(release_config('edge0-35b'))
    assert s.experts > 17e9 and mx.get_peak_memory() - before < 2**28


DBRX = dict(model_type='dbrx', d_model=6144, n_heads=48, n_layers=40, vocab_size=100352, max_seq_len=32768, ffn_config=dict(ffn_hidden_size=10752, moe_num_experts=16, moe_top_k=4),
            attn_config=dict(clip_qkv=8, kv_n_heads=8, rope_theta=500000))


def test_experts_in_a_list_and_a_forward_that_evaluates():
    "dbrx keeps experts as plain modules and reads its router's answer in the middle: counted, and nothing is computed for it."
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    s = shape_of_config(DBRX)
    assert mx.get_peak_memory() - before < 2**28
    assert (s.L, s.E, s.k, s.context) == (40, 16, 4, 32768) and s.expert == 3*6144*10752*9//16 and s.experts == 40*16*s.expert
    assert s.kv_token == 40*2*8*128*2 and 131e9 < (s.experts + s.resident)*16/9 < 133e9     # 132 B parameters


def test_a_window_ends_the_growth():
    "Half of gpt-oss's layers keep 128 tokens; llama4's keep a chunk."
    layers = ['sliding_attention', 'full_attention']*2
    s = shape_of_config(dict(model_type='gpt_oss', hidden_size=128, intermediate_size=128, num_hidden_layers=4, num_local_experts=8, num_experts_per_tok=2, head_dim=64, num_attention_heads=4, num_key_value_heads=2, sliding_window=128,
                             vocab_size=512, max_position_embeddings=4096, layer_types=layers))
    per = 2*2*64*2                                                                        # K and V, two heads, bf16
    assert (s.kv_token, s.kv_layers, s.windows) == (2*per, 2, ((128, 2*per),))
    assert [s.kv(n) for n in (1, 128, 129, 1000)] == [4*per, 512*per, 514*per, (2000 + 256)*per]
    assert 'for each of the last 128' in forecast_text(forecast(s, host=HOST))
    told = [forecast(s, host=HOST, context=c)['shape']['notes'] for c in (4096, 4097)]
    assert not any('ends at' in n for n in told[0]) and any('ends at 4096' in n for n in told[1]) and s.notes == [n for n in s.notes if 'ends' not in n]


def test_two_caches_in_a_layer_are_two():
    "deepseek_v32 has a latent and an index beside it; only the first is what a latent would replace."
    s = shape_of_config(dict(model_type='deepseek_v32', hidden_size=128, intermediate_size=128, moe_intermediate_size=64, num_hidden_layers=3, first_k_dense_replace=1, n_routed_experts=8, n_shared_experts=1, num_experts_per_tok=2, n_group=2, topk_group=1,
                             num_attention_heads=4, num_key_value_heads=4, kv_lora_rank=32, q_lora_rank=32, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=16, index_head_dim=16, index_n_heads=2, index_topk=8, vocab_size=256, max_position_embeddings=512))
    assert s.kv_layers == 3 and s.heads[0] == 1 and s.kv_token > 3*(32 + 8)*2 and 'could not' not in ' '.join(s.notes)


@pytest.mark.parametrize('content, word', [('{}', 'model_type'), ('[1]', 'model_type'), ('{"model_type": "no_such"}', 'knows'), ('not json', 'not JSON'), ('{"model_type": "llama"}', 'incomplete')])
def test_a_bad_config_is_refused(tmp_path, content, word):
    (tmp_path/'config.json').write_text(content)
    with pytest.raises(ValueError, match=word): shape_of(tmp_path/'config.json')


SMALL = dict(model_type='qwen3_moe', hidden_size=64, num_hidden_layers=2, intermediate_size=128, num_attention_heads=4, num_experts=8, num_experts_per_tok=2, decoder_sparse_step=1, mlp_only_layers=[], moe_intermediate_size=64,
             rms_norm_eps=1e-6, vocab_size=128, num_key_value_heads=2, head_dim=16, rope_theta=1e4, tie_word_embeddings=False, max_position_embeddings=2048, norm_topk_prob=True)


@pytest.mark.parametrize('change, word', [(dict(hidden_size=0), 'impossible'), (dict(hidden_size=10**12), 'impossible'), (dict(vocab_size=0), 'impossible'), (dict(num_experts_per_tok=9), '9 experts per token; allowed: 1 to 8'),
                                          *((dict(quantization=q), 'quantization') for q in (dict(bits=4), dict(bits=4, group_size=0), dict(bits='4', group_size=64), dict(bits=7, group_size=64), dict(bits=4, group_size=32, mode='odd')))])
def test_impossible_numbers_are_refused(change, word):
    with pytest.raises(ValueError, match=f'config.json: .*{word}'): shape_of_config({**SMALL, **change})


def test_a_config_is_read_as_it_is_found(tmp_path):
    (tmp_path/'config.json').write_text('\ufeff' + json.dumps(dict(SMALL, text_config='none', max_position_embeddings='2048')), encoding='utf8')
    s = shape_of(tmp_path/'config.json')
    assert (s.L, s.E, s.k, s.context) == (2, 8, 2, None) and forecast(s)['fits']


def test_the_mode_of_quantisation_counts():
    "mxfp4: a byte of scale for 32 weights; affine: four bytes."
    size = lambda mode: shape_of_config(dict(SMALL, quantization=dict(bits=4, group_size=32, mode=mode))).expert
    assert size('mxfp4') == 3*64*64*(16 + 1)//32 and size('affine') == 3*64*64*(16 + 4)//32


def test_a_dense_model_is_refused():
    with pytest.raises(ValueError, match='no routed experts'):
        shape_of_config(dict(model_type='llama', hidden_size=64, num_hidden_layers=2, intermediate_size=128, num_attention_heads=4, num_key_value_heads=2, rms_norm_eps=1e-5, vocab_size=100, rope_theta=1e4, head_dim=16))


@pytest.mark.parametrize('kw, name', [(dict(ram=-1), 'ram'), (dict(ssd=0), 'ssd'), (dict(bandwidth=float('inf')), 'bandwidth'), (dict(context=-1), 'context'), (dict(context=1.5), 'context'), (dict(k=0), 'k'), (dict(k=257), 'k')])
def test_impossible_arguments_are_named(big, kw, name):
    with pytest.raises(ValueError, match=f'{name}: '): forecast(big, host=HOST, **kw)


def test_a_missing_source_is_named(tmp_path):
    with pytest.raises(ValueError, match='source'): shape_of(tmp_path)


def test_more_of_a_good_thing_is_not_slower(big):
    def at(**kw): return forecast(big, host=replace(HOST, **kw), k=4)['on_demand'][1]
    for name, values in (('ram', (8, 12, 16, 24)), ('ssd', (0.5, 1, 3, 6)), ('bandwidth', (50, 100, 400))):
        got = [at(**{name: v}) for v in values]
        assert all(b >= a*0.999 for a, b in zip(got, got[1:])), (name, got)
    lengths = [forecast(big, host=HOST, k=4, context=c) for c in (0, 10_000, 100_000)]
    assert lengths[0]['slots'] > lengths[1]['slots'] > lengths[2]['slots'] and lengths[0]['kv'] < lengths[2]['kv']


def test_a_forecast_adds_up(big):
    f = forecast(big, host=HOST, k=4, context=1000)
    assert f['fits'] and f['kv'] == big.kv_token*1000 + big.kv_fixed
    assert f['slots'] == int((14*2**30 - big.resident - f['kv'])//big.expert)
    low, mid, high = f['hit']
    assert f['read'][1] == (1 - mid)*40*4*big.expert and low <= mid <= high
    assert f['on_demand'][0] <= f['on_demand'][1] <= f['on_demand'][2] <= f['resident_speed']*1.001
    assert all(v > 1.02*f['on_demand'][1] for _, v in f['change'])


def test_what_does_not_fit_says_so(big):
    f = forecast(big, host=replace(HOST, ram=3), k=4)
    assert not f['fits'] and f['missing'] > 0 and 'short' in forecast_text(f)
    tiny = forecast(shape_of(data_path('tiny-softmax')), host=HOST)
    assert tiny['share'] == 1 and tiny['hit'] == (1, 1, 1) and tiny['limit'].startswith('memory')


def test_speed_is_arithmetic_where_nothing_is_read():
    s = Shape('', '', 10, 64, 4, 10**6, 64*10**7, 10**9, 10**9, 0, 0, 0, None, None, (0, 0))
    h = replace(HOST, bandwidth=10, layer=1e-4)
    assert abs(1/speed(s, h, 1., 0) - (1e9/1e10 + 10*1e-4 + 40*1e6/1e10)) < 1e-9
    slow = 1/speed(s, replace(h, ssd=0.1, latency=0.), 0.5, 0)                    # 20 MB at 100 MB/s
    assert abs(slow - (1/speed(s, h, 1., 0) + 20e6/1e8)) < 0.02*slow
    assert (_spread(0.3, 10, 10).sum(), _spread(2.0, 3, 4).tolist()) == (30, [[2]*4]*3)


CURVES = pytest.mark.skipif(not data_path('curves', 'tiny-sigmoid-k8.csv').exists(), reason='data/curves lacks tiny-sigmoid-k8.csv: edge0-lab replay curves')


@CURVES
def test_the_band_uses_the_nearest_ratio():
    assert hit_band(0.3, 8, 256) == hit_band(0.3, 2, 64) and hit_band(0.3, 8, 64) == hit_band(0.3, 32, 256)
    assert hit_band(0., 8, 256)[0] == 0


def test_mla_gives_back(big):
    f = forecast(big, host=HOST, context=10_000)
    assert f['mla']['other'] == big.kv_layers*576*2 and f['mla']['slots'] == (big.kv_token - f['mla']['other'])*10_000//big.expert
    small = shape_of_config(release_config('edge0-8b'))
    assert small.mla['kv_lora_rank'] == 512 and forecast(small, host=HOST)['mla']['other'] > small.kv_token


@CURVES
def test_the_command(capsys):
    assert main(['forecast', str(data_path('tiny-softmax')), '--ram', '4', '--ssd', '2']) == 0
    said = capsys.readouterr().out
    assert all(w in said for w in ('model', 'fits', 'hit rate', 'limit', 'simulated'))
    assert main(['forecast', str(data_path('tiny-sigmoid', 'config.json'))]) == 0 and 'this machine' in capsys.readouterr().out   # with nothing but what is measured here
    assert main(['forecast', 'nowhere']) == 2 and 'source' in capsys.readouterr().err


def test_a_config_of_countless_layers_is_refused_at_once():
    config = dict(model_type='qwen3_moe', num_hidden_layers=10**12)
    with pytest.raises(ValueError, match='num_hidden_layers 1000000000000; allowed: at most 1000'): shape_of_config(config)
