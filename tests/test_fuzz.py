"What reads files of others, fed with what nobody would write. The same parsers as `make soak`, a few hundred inputs each, and every finding of the past."
import json, random, subprocess, sys
from dataclasses import fields
from pathlib import Path

import edge0_lab
import pytest
from hypothesis import HealthCheck, example, given, settings, strategies as st

SOAK = Path(__file__).parent/'soak'
sys.path.insert(0, str(SOAK))
import fuzz, parsers  # noqa: E401, E402

from edge0_lab.runconfig import RunConfig  # noqa: E402


@pytest.mark.case(21)
@pytest.mark.parametrize('name', parsers.PARSERS)
def test_seeds_and_findings_of_the_past(name):
    "Sound inputs pass, and what once broke a parser is refused by name now."
    for data in parsers.seeds(name) + [p.read_bytes() for p in parsers.kept(name)]: parsers.PARSERS[name](data)


@pytest.mark.parametrize('name', parsers.PARSERS)
def test_mutations(name):
    rng, pool = random.Random(name), parsers.seeds(name) + [p.read_bytes() for p in parsers.kept(name)]
    for _ in range(150):
        data = fuzz.mutate(rng, pool)
        try: parsers.PARSERS[name](data)
        except Exception as e: raise AssertionError(f'{name}: {type(e).__name__}: {e}; input {data[:200]!r}') from e


VALUES = st.recursive(st.none() | st.booleans() | st.integers(-3, 1 << 70) | st.floats() | st.text(max_size=12) | st.sampled_from(['F16', 'BF16', 'U32', '__metadata__', '../x', '\ud800', '1e999', 'staged', 'auto', '8 MiB', 'nan']),
                      lambda v: st.lists(v, max_size=4) | st.dictionaries(st.text(max_size=8) | st.sampled_from(['dtype', 'shape', 'data_offsets', 'bits', 'group_size', 'text_config', 'quantization']), v, max_size=4), max_leaves=12)
quick = settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))


@pytest.mark.case(21)
@quick
@given(head=st.dictionaries(st.text(max_size=10) | st.sampled_from(['__metadata__', 'a', 'layers.1.fc1.weight', 'layers.0.mlp.switch_mlp.gate_proj.weight']), VALUES | st.fixed_dictionaries(dict(dtype=st.sampled_from(['F16', 'F32', 'U32', 'U8']), shape=st.lists(st.integers(0, 5), max_size=3), data_offsets=st.lists(st.integers(0, 64), min_size=2, max_size=2))), max_size=5), data=st.integers(0, 80))
@pytest.mark.parametrize('name', ['header', 'experts', 'heads', 'adapter'])
def test_headers_of_every_form(name, head, data):
    parsers.PARSERS[name](b'\x01' + data.to_bytes(2, 'little') + json.dumps(head).encode())


@quick
@given(said=st.dictionaries(st.sampled_from(['owners', 'K', 'source', 'format_version', 'r', 'alpha', 'model', 'kind']), VALUES, max_size=8), nested=st.booleans())
@pytest.mark.parametrize('name', ['heads', 'adapter'])
def test_metadata_of_every_form(name, said, nested):
    "The tensors of a sound file under metadata that is not."
    text = next(s for s in parsers.seeds(name))
    head = json.loads(text[3:].decode().rstrip('\0 '))
    head['__metadata__'] = {'__metadata__': json.dumps(said)} if nested else {k: v if isinstance(v, str) else json.dumps(v) for k, v in said.items()}
    parsers.PARSERS[name](text[:3] + json.dumps(head).encode())


@quick
@given(value=VALUES, key=st.sampled_from(['model_type', 'num_experts', 'num_experts_per_tok', 'quantization', 'quantization_config', 'text_config', 'n_group', 'topk_group', 'norm_topk_prob', 'hidden_size', 'moe_intermediate_size']))
def test_configs_of_every_form(key, value):
    base = json.loads(parsers.seeds('config')[-1])
    parsers.config(json.dumps({**base, key: value}).encode())
    parsers.config(json.dumps(value).encode())


@quick
@given(name=st.sampled_from([f.name for f in fields(RunConfig)]), value=VALUES, other=st.sampled_from([f.name for f in fields(RunConfig)]), second=VALUES)
def test_settings_of_a_run(name, value, other, second): parsers.run(json.dumps({name: value, other: second}).encode())


@quick
@given(section=st.sampled_from(['lab', 'tier tiny-softmax', 'tier x', 'oven']), key=st.text(max_size=8) | st.sampled_from(['k', 'owners', 'consumers', 'checkpoint', 'temperature', 'seed', 'cache_slots']), value=st.text(max_size=12) | st.sampled_from(['1..99999999999', '-1', '9'*30, '1, ,2', 'nan', '\0']))
def test_settings_files_of_every_form(section, key, value):
    text = (parsers.ROOT/'settings.ini').read_text()
    parsers.settings(text.replace(f'[{section}]\n', f'[{section}]\n{key} = {value}\n', 1).encode('utf8', 'surrogatepass'))
    parsers.settings(f'[{section}]\n{key} = {value}\n'.encode('utf8', 'surrogatepass'))


def test_a_fuzzer_finds_what_is_there(tmp_path):
    "A parser with a fault: the driver saves the input, counts on, and reports."
    def weak(data):
        if b'9' in data: raise KeyError('nine')
    c = fuzz.Count(weak, tmp_path)
    c.how = 'test'
    rng = random.Random(0)
    for _ in range(300): c(fuzz.mutate(rng, [b'{"a":1}']))
    c.tell()
    got = json.loads((tmp_path/'result.json').read_text())
    assert got['executions'] == 300 and len(got['findings']) == 1 and b'9' in (tmp_path/'findings'/got['findings'][0]).read_bytes()


def test_the_driver_runs(tmp_path):
    p = subprocess.run([sys.executable, str(SOAK/'fuzz.py'), 'settings', '--seconds', '2', '--work', str(tmp_path), '--plain'], capture_output=True, text=True, timeout=120)
    assert p.returncode == 0, p.stderr[-2000:]
    got = json.loads((tmp_path/'result.json').read_text())
    assert got['executions'] > 5 and not got['findings'], got


# --- checkpoints are data ---

def test_no_code_of_a_checkpoint_runs(tmp_path):
    from edge0_lab.decode import Lab
    from edge0_lab.doctor_files import check_files
    from edge0_lab.synth import synth_family
    d, mark = tmp_path/'m', tmp_path/'ran'
    synth_family('qwen3_5_moe', d)
    (d/'modeling_mine.py').write_text(f'open({str(mark)!r}, "w").write("x")\nclass Model: pass\nclass ModelArgs: pass\n')
    said = json.loads((d/'config.json').read_text())
    tok = json.loads((d/'tokenizer_config.json').read_text())
    evil = "{{ ''.__class__.__mro__[1].__subclasses__() }}{% for x in ().__class__.__base__.__subclasses__() %}{{ x }}{% endfor %}"
    (d/'tokenizer_config.json').write_text(json.dumps({**tok, 'auto_map': {'AutoTokenizer': ['modeling_mine.Tok', None]}, 'chat_template': evil}))
    for extra in (dict(auto_map={'AutoModelForCausalLM': 'modeling_mine.Model', 'AutoConfig': 'modeling_mine.ModelArgs'}), dict(model_file='modeling_mine.py')):
        (d/'config.json').write_text(json.dumps({**said, **extra}))
        lines = check_files(d)
        assert any('code of its own' in l.text and l.level == 'warning' for l in lines)
        try:
            with Lab.open(d) as lab: lab.generate([1, 2, 3], 2)
        except ValueError as e: assert 'trust_remote_code' in str(e) or 'model_file' in extra, e
        assert not mark.exists()
    (d/'config.json').write_text(json.dumps(said))
    (d/'tokenizer_config.json').write_text(json.dumps({**tok, 'chat_template': evil}))
    from jinja2.exceptions import SecurityError
    with Lab.open(d) as lab:
        with pytest.raises((SecurityError, Exception)) as e: lab.tokenizer.apply_chat_template([dict(role='user', content='x')], tokenize=False)
        assert isinstance(e.value, SecurityError) or 'unsafe' in str(e.value).lower(), e.value


@pytest.mark.parametrize('what', ['shard', 'index', 'heads', 'absolute'])
def test_no_path_of_a_checkpoint_leads_outside(tmp_path, what):
    from edge0_lab.repack import repack, synth_experts
    from edge0_lab.store import Checkpoint, CheckpointError
    d, secret = synth_experts(tmp_path/'m', 1, 2, 64, 64), tmp_path/'secret.safetensors'
    secret.write_bytes((d/'model.safetensors').read_bytes())
    if what == 'shard': (d/'model.safetensors').unlink(); (d/'model.safetensors').symlink_to(secret)
    if what == 'heads': (d/'tokenizer.json').symlink_to(secret)
    if what in ('index', 'absolute'): (d/'model.safetensors.index.json').write_text(json.dumps(dict(weight_map={'a': '../secret.safetensors' if what == 'index' else str(secret)})))
    with pytest.raises(CheckpointError, match='leads out'):
        with Checkpoint.open(d): repack(d, tmp_path/'out')
