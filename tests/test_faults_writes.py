"A full disk and a kill -9 at any write leave the old file or the new one, and the command that wrote goes on or starts again."
import json, os, resource, shutil, signal, subprocess, sys
from pathlib import Path

import edge0_lab
import numpy as np
import pytest

import shim
from edge0_lab.adapters import Adapter, read_lora, write_lora
from edge0_lab.headfiles import read_heads, write_heads
from edge0_lab.heads import Heads
from edge0_lab.repack import repack, synth_experts
from edge0_lab.store import Checkpoint, ExpertStore
from edge0_lab.synth import write_plan
from edge0_lab.trace import Trace
from edge0_lab.writer import write_json

needs_shim = pytest.mark.skipif(not shim.available(), reason='needs Linux and a C compiler to end the process at a write')


def heads(v): return Heads({2: dict(fc1=np.full((3, 12), v, np.float16), fc2=np.full((4, 3), v, np.float16), linear_init=np.full((4, 12), v, np.float16))}, 2, f'v{v}')
def adapter(v): return Adapter({'model.layers.0.self_attn.q_proj': (np.full((2, 40), v, np.float16), np.full((30, 2), v, np.float16))}, 2, 4.)
def trace(v):
    from test_trace import run
    return run(T=3 + v)


def save_heads(d, v): write_heads(d/'prerouter_k2.safetensors', heads(v))
def save_adapter(d, v): write_lora(d/'lora_k2.safetensors', adapter(v))
def save_trace(d, v): trace(v).save(d/'t.npz')
def save_post(d, v): write_json(d/'post.json', dict(v=v, lines=['x'*50]*20))
def save_plan(d, v):
    import mlx.core as mx
    (d/f'synth{v}.safetensors').exists() or write_plan(d/f'synth{v}.safetensors', {'a': dict(dtype=mx.float32, shape=(40, 10)), 'b': dict(dtype=mx.float32, shape=(7,))}, lambda name, t: iter([np.full(t['shape'], v, np.float32)]))
def save_repack(d, v): repack(d.parent/f'source{v}', d/f'out{v}')
def save_state(d, v):
    import mlx.core as mx, mlx.optimizers as optim
    from edge0_lab.headfit import save_state as put
    opt = optim.Adam(1e-3)
    params = {'w': mx.full((5, 5), v)}
    opt.init(params)
    put(d/'state.safetensors', params, opt, v, [v], 'run')

def is_heads(d): return read_heads(d/'prerouter_k2.safetensors').source[1:] if (d/'prerouter_k2.safetensors').exists() else None
def is_adapter(d): return str(int(read_lora(d/'lora_k2.safetensors').parts['model.layers.0.self_attn.q_proj'][0][0, 0])) if (d/'lora_k2.safetensors').exists() else None
def is_trace(d): return str(Trace.load(d/'t.npz').T - 3) if (d/'t.npz').exists() else None
def is_post(d): return str(json.loads((d/'post.json').read_text())['v']) if (d/'post.json').exists() else None
def is_plan(d):
    found = sorted(d.glob('synth*.safetensors'))
    for f in found:
        with Checkpoint.open(f) as ck: assert (ck.array('a') == int(f.stem[-1])).all()
    return found[-1].stem[-1] if found else None
def is_repack(d):
    done = [o for o in sorted(d.glob('out*')) if (o/'model.safetensors.index.json').exists()]
    for o in d.glob('out*'):
        for f in o.glob('model*.safetensors'): Checkpoint.open(f).close()                # whatever has its final name is whole
    for o in done:
        with Checkpoint.open(o) as ck, ExpertStore(ck, threads=1) as st, Checkpoint.open(d.parent/f'source{o.name[-1]}') as src, ExpertStore(src, threads=1) as was:
            assert all((x == y).all() for x, y in zip(st.arrays(0, 1).values(), was.arrays(0, 1).values()))
    return done[-1].name[-1] if done else None
def is_state(d):
    from edge0_lab.headfit import load_state
    return str(load_state(d/'state.safetensors', 'run')[2]) if (d/'state.safetensors').exists() else None

WRITERS = dict(heads=(save_heads, is_heads), adapter=(save_adapter, is_adapter), trace=(save_trace, is_trace), post=(save_post, is_post), synth=(save_plan, is_plan), repack=(save_repack, is_repack), state=(save_state, is_state))


@pytest.fixture
def place(tmp_path):
    for v in (1, 2): synth_experts(tmp_path/f'source{v}', 2, 2, 64, 64, seed=v)
    (tmp_path/'d').mkdir()
    return tmp_path/'d'


@pytest.mark.parametrize('name', WRITERS)
def test_a_full_disk_leaves_the_old_file(place, name):
    "The limit on a file's size stands for the disk: the write fails in the middle, as it does on a full one."
    save, what = WRITERS[name]
    save(place, 1)
    assert what(place) == '1'
    was, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        failed = 0
        for limit in (0, 10, 300):
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, was[1]))
            try: save(place, 2)
            except (OSError, RuntimeError) as e: failed += 1                # RuntimeError: MLX's own writer
            resource.setrlimit(resource.RLIMIT_FSIZE, was)
            assert what(place) == '1', limit
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, was)
        signal.signal(signal.SIGXFSZ, handler)
    assert failed == 3
    save(place, 2)
    assert what(place) == '2'


def tmpfs(folder, size):
    folder.mkdir()
    return os.geteuid() == 0 and sys.platform.startswith('linux') and subprocess.run(['mount', '-t', 'tmpfs', '-o', f'size={size}', 'tmpfs', folder], capture_output=True).returncode == 0


def test_a_full_file_system(tmp_path):
    "A real one of 64 KiB, where we may mount it."
    d = tmp_path/'full'
    if not tmpfs(d, '64k'): pytest.skip('needs the right to mount a tmpfs')
    try:
        save_heads(d, 1); save_trace(d, 1); save_post(d, 1)
        (d/'filler').write_bytes(bytes(max(0, (shutil.disk_usage(d).free - 4096)//4096*4096)))
        big = Heads({2: dict(fc1=np.ones((300, 12), np.float16), fc2=np.ones((4, 300), np.float16))}, 2, 'v2')
        with pytest.raises(OSError): write_heads(d/'prerouter_k2.safetensors', big)
        with pytest.raises(OSError): write_json(d/'post.json', dict(v=2, text='x'*9000))
        assert is_heads(d) == is_trace(d) == is_post(d) == '1'
        for p in (*d.glob('*.part'), d/'filler'): p.unlink()
        write_heads(d/'prerouter_k2.safetensors', big); save_trace(d, 2); save_post(d, 2)
        assert is_heads(d) == is_trace(d) == is_post(d) == '2'
    finally: subprocess.run(['umount', d], check=True)


KILLER = '''
import os, sys, json
import shim, edge0_lab
from pathlib import Path
from test_faults_writes import WRITERS
lib, d, out = shim.loaded(), Path(sys.argv[1]), {}
mine = {n: v for n, v in WRITERS.items() if n != 'state'}   # MLX's own writer wants threads that a fork does not have
for name, (save, what) in mine.items():
    save(d, 1)                                     # everything is imported and warm before the first fork
for name, (save, what) in mine.items():
    seen = []
    for at in range(400):
        pid = os.fork()
        if pid == 0:
            lib.edge0_die(at, str(d).encode())
            try: save(d, 2)
            finally: os._exit(7)
        code = os.waitpid(pid, 0)[1]
        seen.append(what(d))
        if os.WIFEXITED(code): break
    out[name] = seen
    save(d, 2)
    seen.append(what(d))
print(json.dumps(out))
'''


@needs_shim
def test_a_kill_at_any_write_leaves_the_old_file_or_the_new(place, tmp_path):
    "A process is ended with SIGKILL at its first, second, ... write, flush, rename or removal, half of the write done, until it gets through."
    so = shim.build(tmp_path)
    p = shim.python(so, KILLER.replace('sys.argv[1]', repr(str(place))))
    assert p.returncode == 0, p.stderr[-3000:]
    got = json.loads(p.stdout.splitlines()[-1])
    assert set(got) == set(WRITERS) - {'state'}
    for name, seen in got.items():
        assert set(seen) <= {'1', '2'} and seen[-1] == '2', (name, seen)
        assert seen[0] == '1' and len(seen) >= 4 and seen == sorted(seen), (name, seen)   # many ends, and never back


@needs_shim
@pytest.mark.parametrize('at', [0, 1, 2, 9])
def test_a_kill_while_a_training_saves_its_state(place, tmp_path, at):
    "MLX writes this one; each end is a process of its own."
    so = shim.build(tmp_path)
    save_state(place, 1)
    p = shim.python(so, f"import shim, edge0_lab\nfrom pathlib import Path\nfrom test_faults_writes import save_state\nshim.loaded().edge0_die({at}, {str(place)!r}.encode())\nsave_state(Path({str(place)!r}), 2)")
    assert p.returncode in (0, -signal.SIGKILL), p.stderr[-2000:]
    assert is_state(place) == ('2' if p.returncode == 0 else '1')
    assert at < 9 or p.returncode == 0
    save_state(place, 2)
    assert is_state(place) == '2'


@needs_shim
def test_an_interrupted_synth_goes_on_where_it_was(tmp_path):
    so = shim.build(tmp_path)
    d = tmp_path/'d'
    d.mkdir()
    p = shim.python(so, KILLER.replace('sys.argv[1]', repr(str(d))).split('for name')[0] + f'''
save = WRITERS['synth'][0]
n = []
for at in (4, 6):
    pid = os.fork()
    if pid == 0:
        lib.edge0_die(at, str(d).encode())
        save(d, 1)
        os._exit(7)
    os.waitpid(pid, 0)
    n.append(sum(f.stat().st_size for f in d.glob('*')))
save(d, 1)
print(json.dumps(n))
''')
    assert p.returncode == 0, p.stderr[-3000:]
    assert is_plan(d) == '1' and not list(d.glob('*.part')) and json.loads(p.stdout.splitlines()[-1])[0] > 0
