"What reads files of others, as functions of bytes. Each returns, or raises an error of its own with a message; anything else is a finding."
import io, json, os, struct, tempfile, warnings, zipfile
from pathlib import Path

import edge0_lab
import numpy as np

from edge0_lab.adapters import Adapter, read_lora, write_lora
from edge0_lab.checkpoint import read_header
from edge0_lab.doctor_files import check_template, packed_sizes
from edge0_lab.headfiles import find_heads, read_heads, write_heads
from edge0_lab.heads import Heads
from edge0_lab.repack import synth_experts
from edge0_lab.routing import Router
from edge0_lab.runconfig import RunConfig
from edge0_lab.settings import lab_defaults, tiers
from edge0_lab.store import Checkpoint, CheckpointError, ExpertStore
from edge0_lab.trace import Trace

ROOT = Path(__file__).resolve().parents[2]
SHM = '/dev/shm' if os.path.isdir('/dev/shm') and os.access('/dev/shm', os.W_OK) else None
_folder = tempfile.TemporaryDirectory(prefix='edge0-fuzz-', dir=SHM)   # memory, not a disk
HERE = Path(_folder.name)


def put(name, data):
    path = HERE/name
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(data)
    return path


def framed(data):
    "Raw bytes as they are, or (first byte odd) a header text that gets the right length word, and as much data as the next two bytes say."
    if not data or data[0]%2 == 0: return data[1:]
    n = int.from_bytes(data[1:3], 'little')
    return struct.pack('<Q', len(data[3:])) + data[3:] + bytes(n)


def frame(raw):
    "The inverse: a file as fuzzing input of the second kind."
    n = struct.unpack('<Q', raw[:8])[0]
    return b'\x01' + struct.pack('<H', min(65535, len(raw) - 8 - n)) + raw[8:8 + n]


# --- headers ---

def header(data):
    raw = framed(data)
    path = put('h/model.safetensors', raw)
    fd = os.open(path, os.O_RDONLY)
    try: entries, meta = read_header(path, fd, 0)
    except CheckpointError as e:
        assert e.fault and path.name in str(e)
        return
    finally: os.close(fd)
    end = 8 + int.from_bytes(raw[:8], 'little')
    for e in sorted(entries, key=lambda e: (e.offset, e.nbytes)):
        assert e.offset == end, 'ranges must tile the file'
        end += e.nbytes
    assert end == len(raw)
    with Checkpoint.open(path) as ck:
        try: ck.metadata
        except CheckpointError: pass                                          # a nested one that is not JSON: refused by name
        for e in entries:
            try: assert ck.array(e.name).nbytes == e.nbytes
            except CheckpointError as err: assert 'no NumPy storage' in str(err)


def experts(data):
    "A header of experts: layouts, bits, config.json of every kind."
    raw = framed(data)
    head, _, config = raw.rpartition(b'\x00config\x00')
    path = put('e/model.safetensors', head or raw)
    put('e/config.json', config if head else b'{}')
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')
        try:
            with Checkpoint.open(path.parent) as ck, ExpertStore(ck, threads=1) as st:
                for layer in st.layers:
                    spec = st.spec(layer)
                    assert spec.total == sum(spec.nbytes) > 0 and st.E(layer) > 0
                    if spec.total < 1 << 22: st.arrays(layer, st.E(layer) - 1)
        except CheckpointError: return


def config(data):
    "config.json: the router it means, and what it claims about a checkpoint that is sound."
    d = HERE/'c'
    if not d.exists(): synth_experts(d, 1, 4, 64, 64)
    put('c/config.json', data)
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')
        try:
            with Checkpoint.open(d) as ck:
                with ExpertStore(ck, threads=1) as st: assert st.E(0) == 4
                Router.from_config(ck.config)
        except ValueError as e: assert str(e)


def index(data):
    put('i/model.safetensors.index.json', data)
    if not (HERE/'i/model.safetensors').exists(): (HERE/'i/model.safetensors').write_bytes(b'\x02\0\0\0\0\0\0\0{}')
    try: Checkpoint.open(HERE/'i').close()
    except CheckpointError as e: assert e.fault


# --- what comes with a release ---

def heads(data):
    path = put('p/prerouter_k2.safetensors', framed(data))
    try: h = read_heads(path)
    except CheckpointError: return
    assert h.owners and h.k >= 1 and all(np.isfinite(a.astype(np.float64)).all() for p in h.parts.values() for a in p.values())
    write_heads(HERE/'p/again.safetensors', h)
    again = read_heads(HERE/'p/again.safetensors')
    assert again.owners == h.owners and again.k == h.k


def adapter(data):
    path = put('l/lora_k2.safetensors', framed(data))
    try: a = read_lora(path)
    except CheckpointError: return
    assert a.parts and a.r >= 1 and np.isfinite(a.alpha)
    write_lora(HERE/'l/again.safetensors', a, dtype=np.float32)
    assert read_lora(HERE/'l/again.safetensors').parts.keys() == a.parts.keys()


def template(data):
    put('t/tokenizer_config.json', data)
    for l in check_template(HERE/'t'): assert l.advice


# --- our own files ---

def settings(data):
    path = put('s/settings.ini', data)
    for read in (tiers, lab_defaults):
        try: read(path)
        except ValueError as e: assert 'settings' in str(e)


NAMES = list(RunConfig.__dataclass_fields__)


def run(data):
    "Settings of a run, as JSON values under their names."
    try: said = json.loads(data)
    except (ValueError, RecursionError): return
    if not isinstance(said, dict): return
    try: r = RunConfig(**{k: v for k, v in said.items() if k in NAMES})
    except ValueError as e:
        assert 'allowed' in str(e) or 'impossible' in str(e) or 'holds no expert' in str(e), e
        return
    hash(r.decode)


def trace(data):
    "A trace file: raw, or (first byte odd) a sound one in which a member is replaced, with a right checksum."
    path = put('z/t.npz', data[1:] if not data or data[0]%2 == 0 else changed_trace(data[1:]))
    try: t = Trace.load(path)
    except ValueError as e:
        assert path.name in str(e)
        return
    assert t.ids.shape[0] == t.T and t.meta['E'] > 0
    t.to_frame()


_sound = {}


def changed_trace(data):
    if not _sound:
        import sys
        sys.path.insert(0, str(ROOT/'tests'))
        from test_trace import run as made
        with zipfile.ZipFile(made(T=2).save(HERE/'sound.npz')) as z: _sound.update({n: z.read(n) for n in z.namelist()})
    names = sorted(_sound)
    at = (data[0] if data else 0)%len(names)
    out = io.BytesIO()
    with zipfile.ZipFile(out, 'w', zipfile.ZIP_DEFLATED if data[:1] > b'\x80' else zipfile.ZIP_STORED) as z:
        for i, n in enumerate(names): z.writestr(n, data[1:] if i == at else _sound[n])
    return out.getvalue()


PARSERS = {f.__name__: f for f in (header, experts, config, index, heads, adapter, template, settings, run, trace)}


def seeds(name):
    "Sound inputs to start from."
    if name == 'header': return [frame(p.read_bytes()) for p in sorted((ROOT/'data').glob('tiny-*/prerouter_k8.safetensors'))] + [b'\x01\x08\0{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"__metadata__":{"x":"y"}}', b'\x00\x02\0\0\0\0\0\0\0{}']
    if name == 'experts':
        out = []
        for i, layout in enumerate(('stacked', 'per_expert', 'fused')):
            d = synth_experts(HERE/f'seed{i}', 1, 2, 64, 64, layout=layout)
            f = frame((d/'model.safetensors').read_bytes().rstrip())
            out.append(f + b'\x00config\x00' + (d/'config.json').read_bytes())
        return out
    if name == 'config': return [p.read_bytes() for p in sorted((ROOT/'data').glob('tiny-*/config.json'))] + [b'{"model_type":"qwen3_moe","num_experts":4,"num_experts_per_tok":2,"norm_topk_prob":true,"quantization":{"bits":4,"group_size":64}}']
    if name == 'index': return [b'{"metadata":{"total_size":1},"weight_map":{"a":"model.safetensors","b":"model-00001-of-00002.safetensors"}}']
    if name == 'heads':
        h = Heads({1: dict(fc1=np.ones((3, 12), np.float16), fc2=np.ones((4, 3), np.float16), linear_init=np.ones((4, 12), np.float16))}, 2, 'seed')
        return [frame(write_heads(HERE/'seed.safetensors', h, spelling=s, metadata=m).read_bytes()) for s in ('layers', 'mlp') for m in ('nested', 'flat')]
    if name == 'adapter': return [frame(write_lora(HERE/'seed.safetensors', Adapter({'model.layers.0.self_attn.q_proj': (np.ones((2, 4), np.float16), np.ones((3, 2), np.float16))}, 2, 4.), metadata=m).read_bytes()) for m in ('nested', 'flat')]
    if name == 'template': return [json.dumps(dict(chat_template="{% for m in messages %}{{ m['role'] }}{% endfor %}")).encode(), b'{"chat_template":[{"name":"a","template":"{{ x }}"}]}']
    if name == 'settings': return [(ROOT/'settings.ini').read_bytes()]
    if name == 'run': return [json.dumps({n: f.default for n, f in RunConfig.__dataclass_fields__.items()}).encode(), b'{"decode":"hot","hot_slots":3,"k":2,"cache_slots":"2 MiB","paths":{"1":"exact"},"throttle":[0.1,1e9],"temperature":0.5}']
    changed_trace(b'')
    names = sorted(_sound)
    return [b'\x01' + bytes([i]) + _sound[n] for i, n in enumerate(names)] + [b'\x00' + (HERE/'sound.npz').read_bytes()]


def kept(name):
    "Findings of earlier runs, fixed and kept."
    return sorted((Path(__file__).parent/'cases'/name).glob('*'))
