"The doctor: what must be found, what must be said, and the exit code. And case 40: what is bounded says its limit and its use."
import json, os, shutil, subprocess, sys
from pathlib import Path

import edge0_lab
import mlx.core as mx
import numpy as np
import pytest

from edge0_lab import cli, doctor_kernels, int4
from edge0_lab.decode import Lab, RunConfig
from edge0_lab.doctor import POST_SCHEMA, post, visit
from edge0_lab.doctor_files import check_files, check_hashes, known_hashes, sha256_of
from edge0_lab.doctor_kernels import check_routing, check_twins, known_rows, known_stack, twin_errors
from edge0_lab.doctor_machine import check_memory, line, worst
from edge0_lab.limits import limit_policy, mlx_limits
from edge0_lab.store import Checkpoint, synth_experts
from edge0_lab.synth import synth, synth_family


@pytest.fixture(scope='module')
def small(tmp_path_factory):
    d = tmp_path_factory.mktemp('doctor')/'m'
    synth_family('qwen3_5_moe', d, num_hidden_layers=4, num_experts=16, num_experts_per_tok=3)
    return d


@pytest.fixture
def copy(small, tmp_path):
    shutil.copytree(small, tmp_path/'m')
    return tmp_path/'m'


def found(lines, topic, level): return [l for l in lines if l.topic == topic and l.level == level]


# --- the command ---

def test_the_command_in_a_process_of_its_own(small):
    "As a user calls it: lines, exit code, JSON; in well under twenty seconds of processor time."
    p = subprocess.run([sys.executable, '-c', 'import sys; from edge0_lab.cli import main; sys.exit(main())', 'doctor', str(small), '--json'], capture_output=True, text=True, timeout=300)
    got = json.loads(p.stdout)
    assert got['schema'] == POST_SCHEMA and p.returncode == int(got['counts']['error'] > 0)
    topics = {l['topic'] for l in got['lines']}
    assert {'versions', 'device', 'blas', 'memory', 'limits', 'kernels', 'routing', 'arena', 'disk', 'fits', 'files', 'shapes', 'experts'} <= topics
    assert all(l['advice'] for l in got['lines'] if l['level'] != 'ok')
    assert not [l for l in got['lines'] if l['level'] == 'error'], got['lines']


def test_exit_codes_and_words(copy, capsys):
    assert cli.main(['doctor', str(copy.parent/'nowhere')]) == 2 and "is not there" in capsys.readouterr().err
    f = next(copy.glob('model*.safetensors'))
    os.truncate(f, f.stat().st_size - 9)
    assert cli.main(['doctor', str(copy)]) == 1
    said = capsys.readouterr().out
    assert 'files     error' in said and f.name in said and '9 bytes are missing' in said and '->' in said and '1 errors' in said


def test_a_broken_check_does_not_hide_the_others(monkeypatch):
    monkeypatch.setattr('edge0_lab.doctor.check_blas', lambda: 1/0)
    monkeypatch.setattr('edge0_lab.doctor.file_speed', lambda: dict(cold=1., warm=2., left=0., bytes=1 << 20))
    lines = visit()
    assert [l for l in lines if l.topic == 'blas' and 'ZeroDivisionError' in l.text] and found(lines, 'kernels', 'ok') and found(lines, 'disk', 'ok')


# --- wrong chips ---

@pytest.mark.case(29)
def test_a_wrong_chip_is_found(monkeypatch):
    "A multiply that is off by two parts in a hundred, in one twin only; a routing that errs."
    right = twin_errors()
    assert worst(check_twins(right)) == 'ok'
    real = int4.expert_glu_ops
    monkeypatch.setattr(doctor_kernels, 'expert_glu_ops', lambda x, s, i: real(x*mx.array(1.02, x.dtype), s, i))
    bad = [l for l in check_twins() if l.level == 'error']
    assert {l.text.split(':')[0] for l in bad} >= {'ops float32'} and not any('kernel f32' in l.text for l in bad) and all('--post' in l.advice for l in bad)
    assert [l.level for l in check_routing(dict(softmax=float('nan'), sigmoid_group=1e-3))] == ['error', 'error']
    assert [l.level for l in check_routing()] == ['ok', 'ok']


KNOWN = dict(codes=6546985266674, rows=6.58591736247763, norm=0.32075514949301925)


@pytest.mark.case(29)
def test_the_known_expert_is_known():
    "The same numbers on every machine: integers by a hash, one exact sum kept here."
    s, x = known_stack(), known_rows(5)
    assert int(s.gate.weight.astype(np.uint64).sum()) == KNOWN['codes'] and x.dtype == np.float32
    assert abs(float(x.astype(np.float64).sum()) - KNOWN['rows']) < 1e-6
    y = int4.expert_glu_ref(x, s, np.array([[0, 1]]*5, np.int32))
    assert abs(float(np.linalg.norm(y)) - KNOWN['norm']) < 1e-9


# --- files ---

def test_hashes_of_three_kinds(copy, tmp_path):
    f = next(copy.glob('model*.safetensors'))
    with Checkpoint.open(copy) as ck: assert [l.level for l in check_hashes(ck)] == ['ok']
    (copy/'SHA256SUMS').write_text(f'{sha256_of(f)}  {f.name}\n{"0"*64}  ../other\n')
    assert known_hashes(copy) == {f.name: sha256_of(f)}
    with Checkpoint.open(copy) as ck: assert 'as it should be' in check_hashes(ck)[0].text
    hub = tmp_path/'hub'                                                # a snapshot of the hub: blobs carry their sum as name
    (hub/'blobs').mkdir(parents=True); (hub/'snapshots'/'a').mkdir(parents=True)
    blob = hub/'blobs'/sha256_of(f)
    shutil.copy(f, blob)
    (hub/'snapshots'/'a'/f.name).symlink_to(blob)
    with Checkpoint.open(hub/'snapshots'/'a') as ck: assert 'as it should be' in check_hashes(ck)[0].text
    with open(blob, 'r+b') as h: h.seek(-1, 2); h.write(b'\x00' if blob.read_bytes()[-1:] != b'\x00' else b'\x01')
    with Checkpoint.open(hub/'snapshots'/'a') as ck: assert check_hashes(ck)[0].level == 'error'


def test_heads_and_adapter_of_a_release(tmp_path):
    "A release made here passes; its adapter and heads beside another model do not."
    d = tmp_path/'r'
    synth('tiny-softmax', d, layers=8)
    lines = check_files(d)
    assert found(lines, 'heads', 'ok') and found(lines, 'adapter', 'ok') and worst(lines) != 'error', [l for l in lines if l.level != 'ok']
    other = tmp_path/'o'
    synth_family('bailing_moe_v3', other)
    for p in (*d.glob('prerouter_*'), *d.glob('lora_*')): shutil.copy(p, other/p.name)
    lines = check_files(other)
    assert found(lines, 'heads', 'error') and found(lines, 'adapter', 'error')


def test_scales_that_are_not_finite(tmp_path):
    d = synth_experts(tmp_path/'m', 1, 4, 64, 64)
    with Checkpoint.open(d) as ck: e = ck.entry('model.layers.0.mlp.switch_mlp.up_proj.scales')
    with open(d/e.file, 'r+b') as f: f.seek(e.offset); f.write(b'\x80\x7f'*8)       # infinity in bf16
    bad = found(check_files(d), 'experts', 'error')
    assert bad and 'expert 0: up.scales not finite' in bad[0].text


@pytest.mark.parametrize('text, level', [('{{ x }}', None), ('{% for %}', 'warning'), (None, None)])
def test_templates_are_parsed_and_not_run(copy, text, level):
    path = copy/'tokenizer_config.json'
    path.write_text(json.dumps({**json.loads(path.read_text()), 'chat_template': text}))
    assert ([l.level for l in check_files(copy) if l.topic == 'template'] or [None])[0] == level


# --- the file to send back ---

def test_post(small, tmp_path, monkeypatch):
    with Lab.open(small, kernel='ops') as lab: got = post([line('disk', 'ok', 'x')], lab)
    assert json.loads(json.dumps(got))['schema'] == POST_SCHEMA
    assert got['reads']['staged'] <= 4 and got['reads']['exact'] >= 4 and got['reads']['layers'] == 4
    assert got['pair']['rounds'] == len(got['pair']['exact']) == 4 and got['pair']['quotient']['least'] <= got['pair']['quotient']['median'] <= got['pair']['quotient']['most']
    assert set(got['versions']) >= {'mlx', 'mlx-lm'} and got['power'] and all(not isinstance(t['error'], str) for t in got['twins'].values())
    assert str(Path.home()) not in json.dumps(got) and str(tmp_path) not in json.dumps(got)


# --- memory ---

def test_limits_of_mlx_follow_the_policy():
    lim = mlx_limits()
    was = mx.set_cache_limit(lim['cache'])
    assert was == lim['cache'] and 64 << 20 <= was <= 1 << 30
    assert [limit_policy(g << 30)['cache'] for g in (1, 8, 64)] == [64 << 20, 256 << 20, 1 << 30]
    p = subprocess.run([sys.executable, '-c', 'from edge0_lab.limits import mlx_limits; print(mlx_limits())'], env=os.environ | dict(EDGE0_MLX_LIMITS='off'), capture_output=True, text=True)
    assert "'policy': 'off'" in p.stdout, p.stderr


@pytest.mark.case(40)
def test_what_is_bounded_says_its_limit_and_its_use(small):
    "Slots: so many and so many bytes in every report, and never more in use; MLX's cache of freed memory: limit and use in the doctor's lines."
    with Lab.open(small) as lab:
        for n in (2, 6, 64):
            run = RunConfig(decode='exact', cache_slots=n, trace=False)
            out = lab.generate([5, 17, 3, 29, 42], 12, run, stop=())
            slots = out.about['slots'][0]
            assert slots['total'] == n and slots['bytes'] == n*lab.store.spec(0).total and f"slots {n} (" in out.report()
            with lab.prefill([5, 17, 3, 29, 42], run) as s:
                for _ in range(12): lab.step(s)
                cache = s.caches[0]
                assert 0 < sum(o is not None for o in cache.owner) <= n and cache.arena.nbytes == slots['bytes']
    assert mx.get_cache_memory() <= mlx_limits()['cache']
    said = next(l.text for l in check_memory() if l.topic == 'limits')
    assert 'of freed memory kept at most' in said and ' now' in said
