"The store: refusals by name, layouts, parallel reads, eviction, repack, throttle. Cases 19 to 25."
import json, os, shutil, signal, struct, threading, warnings
from pathlib import Path

import edge0_lab
import mlx.core as mx, numpy as np, pytest
from hypothesis import given, settings, strategies as st
from safetensors.numpy import save_file

from edge0_lab import reads
from edge0_lab.int4 import PARTS
from edge0_lab.store import Checkpoint, CheckpointError, ExpertStore, Throttle, flat_rows, repack, synth_experts

L, E, D, F = 2, 6, 128, 64
LAYOUTS = ('stacked', 'per_expert', 'fused')


def opened(d, **kw): return ExpertStore(Checkpoint.open(d), **kw)


@pytest.fixture
def small(tmp_path): return synth_experts(tmp_path/'small', L, E, D, F)


def put(d, tensors, config=None):
    d.mkdir(exist_ok=True)
    save_file({k: np.ascontiguousarray(v) for k, v in tensors.items()}, d/'model.safetensors')
    (d/'config.json').write_text(json.dumps(config or {}))
    return d


def write(path, header, data, length=None):
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack('<Q', len(raw) if length is None else length) + raw + data)


def nine(E, D, F, bits=(4, 4, 4), G=64, dtype=np.float16, seed=0):
    "Stacked parts by name under one head, per-projection bits (gate, up, down)."
    rng, out = np.random.default_rng(seed), {}
    for (proj, o, i), b in zip((('gate', F, D), ('up', F, D), ('down', D, F)), bits):
        head = f'model.layers.0.mlp.switch_mlp.{proj}_proj'
        out |= {f'{head}.weight': rng.integers(0, 1 << 32, (E, o, i*b//32), np.uint32), f'{head}.scales': rng.standard_normal((E, o, i//G)).astype(dtype), f'{head}.biases': rng.standard_normal((E, o, i//G)).astype(dtype)}
    return out


# --- files ---

@pytest.mark.case(20)
@pytest.mark.parametrize('cut', [1, 4096, 50_000])
def test_cut_shard_is_refused_before_anything_is_read(small, cut):  # CASE 20
    file = small/'model-00002-of-00002.safetensors'
    os.truncate(file, file.stat().st_size - cut)
    with pytest.raises(CheckpointError) as e: Checkpoint.open(small)
    assert e.value.tensor and 'layers.1' in e.value.tensor and file.name in str(e.value) and 'bytes are missing' in str(e.value)
    assert str(file.stat().st_size) in str(e.value.found)


@pytest.mark.case(20)
@pytest.mark.parametrize('op', ['cut', 'grow back with zeros', 'overwrite'])
def test_file_changed_while_open_never_becomes_zeros(small, op):  # CASE 20
    with Checkpoint.open(small) as ck, ExpertStore(ck, threads=2) as s:
        file, rows = small/'model-00001-of-00002.safetensors', flat_rows(s.spec(0).empty())
        size, mark = file.stat().st_size, file.stat().st_mtime_ns
        if op == 'overwrite':
            with open(file, 'r+b') as f: f.seek(-9, 2); f.write(b'damaged!!')
        else: os.truncate(file, size - 9000)
        if op == 'grow back with zeros': os.truncate(file, size)
        os.utime(file, ns=(mark + 10**7, mark + 10**7))
        # the last expert's last part lies at the end of the file
        with pytest.raises(CheckpointError) as err: s.read_into(0, E - 1, rows)
        assert 'model-00001' in str(err.value)
        if op == 'cut': assert 'layer 0 expert 5' in str(err.value) and 'missing' in str(err.value)
        with pytest.raises(CheckpointError): ck.check()
        assert s.read_into(1, 0, rows) == s.spec(1).total  # the other file is untouched


def test_replaced_file_keeps_serving_the_bytes_that_were_checked(small, tmp_path):
    other = synth_experts(tmp_path/'other', L, E, D, F, seed=9)
    with Checkpoint.open(small) as ck, ExpertStore(ck) as s:
        before = s.arrays(0, 3)
        os.replace(other/'model-00001-of-00002.safetensors', small/'model-00001-of-00002.safetensors')
        assert all((a == before[p]).all() for p, a in s.arrays(0, 3).items())
        with pytest.raises(CheckpointError, match='replaced|written'): ck.check()


GOOD = dict(a=dict(dtype='F32', shape=[2, 2], data_offsets=[0, 16]), b=dict(dtype='U8', shape=[4], data_offsets=[16, 20]))


@pytest.mark.case(21)
@pytest.mark.parametrize('header,data,length,said', [
    (GOOD, bytes(20), 0, 'header length'), (GOOD, bytes(20), 1 << 50, 'header length'), (b'nonsense', bytes(20), None, 'JSON'), (b'\xff\xfe{}', bytes(20), None, 'JSON'),
    (b'['*9000, bytes(20), None, 'JSON'), (b'{"a": NaN}', b'', None, 'NaN'),
    ({**GOOD, 'a': dict(dtype='F32', shape=[2, 3], data_offsets=[0, 16])}, bytes(20), None, '24 bytes'),
    ({**GOOD, 'a': dict(dtype='F32', shape=[1 << 62, 1 << 62], data_offsets=[0, 16])}, bytes(20), None, 'fewer than 2'),
    ({**GOOD, 'b': dict(dtype='U8', shape=[4], data_offsets=[12, 16])}, bytes(16), None, 'overlaps'), (GOOD, bytes(21), None, 'after the last'),
    ({**GOOD, 'b': dict(dtype='U8', shape=[True], data_offsets=[16, 17])}, bytes(17), None, 'shape'), ({**GOOD, 'b': dict(dtype='U8', shape=[4])}, bytes(20), None, 'fields'),
    ({**GOOD, '__metadata__': {'a': 1}}, bytes(20), None, 'metadata')])
def test_bad_headers(tmp_path, header, data, length, said):  # CASE 21
    write(tmp_path/'model.safetensors', header, data, length)
    with pytest.raises(CheckpointError, match=said): Checkpoint.open(tmp_path)


@pytest.mark.case(21)
def test_fewer_than_eight_bytes(tmp_path):  # CASE 21
    (tmp_path/'model.safetensors').write_bytes(b'\x01\x00')
    with pytest.raises(CheckpointError, match='2 bytes'): Checkpoint.open(tmp_path)


@pytest.mark.case(21)
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_damaged_headers_are_refused_or_still_add_up(tmp_path_factory, data):  # CASE 21
    d = tmp_path_factory.mktemp('fuzz')
    write(d/'model.safetensors', GOOD, bytes(range(20)))
    raw = bytearray((d/'model.safetensors').read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        how = data.draw(st.sampled_from(['set', 'insert', 'delete', 'cut']))
        at = data.draw(st.integers(0, len(raw) - 1)) if raw else 0
        if how == 'set' and raw: raw[at] = data.draw(st.integers(0, 255))
        elif how == 'insert': raw[at:at] = data.draw(st.binary(min_size=1, max_size=4))
        elif how == 'delete' and raw: del raw[at]
        else: del raw[at:]
    (d/'model.safetensors').write_bytes(raw)
    try: ck = Checkpoint.open(d)
    except CheckpointError as e: assert str(d/'model.safetensors') == e.file and e.fault; return
    with ck:
        entries = [ck.entry(n) for n in ck.names()]
        assert sum(e.nbytes for e in entries) == len(raw) - 8 - int.from_bytes(raw[:8], 'little')
        for e in entries:
            if e.dtype in reads_storage(): assert ck.array(e.name).nbytes == e.nbytes


def reads_storage():
    from edge0_lab.header import STORAGE
    return STORAGE


def test_duplicate_names_missing_shards_and_a_wrong_index(tmp_path, small):
    d = put(tmp_path/'twice', {'a': np.zeros(3, np.float32)})
    save_file({'a': np.ones(3, np.float32)}, d/'model-extra.safetensors')
    with pytest.raises(CheckpointError, match="'a': tensor in two files"): Checkpoint.open(d)
    names = Checkpoint.open(small).names()
    hint = dict(weight_map={n: 'model-00001-of-00002.safetensors' for n in names})
    (small/'model.safetensors.index.json').write_text(json.dumps(hint))
    with Checkpoint.open(small) as ck:  # the index lies about layer 1; the headers decide
        assert len(ck.notes) == len(names)//2 and 'is in model-00002' in ck.notes[0]
    hint['weight_map']['x'] = '../elsewhere.safetensors'
    (small/'model.safetensors.index.json').write_text(json.dumps(hint))
    with pytest.raises(CheckpointError, match='leads out'): Checkpoint.open(small)
    (small/'model.safetensors.index.json').unlink(); (small/'model-00001-of-00002.safetensors').unlink()
    with pytest.raises(CheckpointError, match='model-00001-of-00002.*missing'): Checkpoint.open(small)
    with pytest.raises(CheckpointError, match='no checkpoint here'): Checkpoint.open(tmp_path)


def test_links_out_of_the_directory_are_refused_but_a_hub_snapshot_is_not(small, tmp_path):
    d = tmp_path/'linked'; d.mkdir()
    for f in small.iterdir(): (d/f.name).symlink_to(f)
    with pytest.raises(CheckpointError, match='leads out'): Checkpoint.open(d)
    blobs, snap = tmp_path/'hub'/'blobs', tmp_path/'hub'/'snapshots'/'abc'
    blobs.mkdir(parents=True); snap.mkdir(parents=True)
    for i, f in enumerate(small.iterdir()): os.replace(f, blobs/str(i)); (snap/f.name).symlink_to(blobs/str(i))
    with opened(snap) as s: assert s.read_into(0, 0, flat_rows(s.spec(0).empty())) == s.spec(0).total
    (d/'f').mkdir(); os.mkfifo(d/'f'/'model.safetensors')
    with pytest.raises(CheckpointError, match='regular file'): Checkpoint.open(d/'f')


def test_heads_and_adapters_beside_the_model_are_not_its_weights(small):
    save_file({'layers.0.fc1.weight': np.zeros((2, 2), np.float16)}, small/'prerouter_k4.safetensors', metadata={'__metadata__': '{"K": "4"}'})
    save_file({'x.lora_A': np.zeros((2, 2), np.float16)}, small/'lora_k4.safetensors')
    with Checkpoint.open(small) as ck: assert all('switch_mlp' in n for n in ck.names())
    with Checkpoint.open(small/'prerouter_k4.safetensors') as ck: assert ck.metadata == {'K': '4'}


@pytest.mark.case(30)
def test_arrays_equal_other_readers_bf16_too(small):  # CASE 30
    file = small/'model-00001-of-00002.safetensors'
    theirs = mx.load(str(file))
    with Checkpoint.open(file) as ck:
        assert set(ck.names()) == set(theirs)
        for n, a in theirs.items():
            wide = np.array(a.astype(mx.float32)) if a.dtype == mx.bfloat16 else np.array(a)
            assert (ck.array(n, widen=True) == wide).all(), n


# --- experts ---

@pytest.mark.case(22)
@pytest.mark.parametrize('bits,G,dtype', [(4, 64, 'bf16'), (3, 32, 'f16'), (5, 64, 'bf16'), (6, 64, 'f32'), (8, 64, 'f16'), (2, 64, 'bf16')])
def test_three_layouts_same_experts(tmp_path, bits, G, dtype):  # CASE 22, 23
    stores = [opened(synth_experts(tmp_path/n, L, E, D, F, bits=bits, group_size=G, layout=n, dtype=dtype)) for n in LAYOUTS]
    stores.append(opened(synth_experts(tmp_path/'release', L, E, D, F, bits=bits, group_size=G, dtype=dtype, key='experts')))
    for s in stores:
        assert (s.layers, s.E(1), s.notes) == ((0, 1), E, [])
        assert s.spec(0).bits == (bits,)*3 and s.spec(0).group_size == (G,)*3 and s.spec(0) == stores[0].spec(0)
        for layer in range(L):
            for e in range(E):
                want = stores[0].arrays(layer, e)
                for part, a in s.arrays(layer, e).items(): assert a.tobytes() == want[part].tobytes(), (part, layer, e)


@pytest.mark.case(23)
def test_bits_by_tensor_and_overrides_under_another_prefix(tmp_path):  # CASE 23
    tensors = nine(E, D, F, bits=(3, 5, 6)) | {'model.layers.0.mlp.gate.weight': np.zeros((E, D//4), np.uint32)}
    q = dict(bits=4, group_size=64) | {f'language_model.model.layers.0.mlp.switch_mlp.{p}_proj': dict(bits=b, group_size=64) for p, b in (('gate', 3), ('up', 5), ('down', 6))}
    with opened(put(tmp_path/'mixed', tensors, dict(quantization=q))) as s:
        assert s.spec(0).bits == (3, 5, 6) and s.notes == []
        assert s.arrays(0, 2)['down.weight'].shape == (D, F*6//32)


@pytest.mark.case(24)
def test_contradicting_config_is_named_and_shapes_decide(tmp_path):  # CASE 24
    d = put(tmp_path/'eight', nine(E, D, F), dict(quantization=dict(bits=8, group_size=64), text_config=dict(hidden_size=D, moe_intermediate_size=F*2, num_experts=E)))
    with pytest.warns(UserWarning, match='says 8 bits'): s = opened(d)
    assert s.spec(0).bits == (4, 4, 4) and len(s.notes) == 2 and f'moe_intermediate_size {2*F}; the file holds F = {F}' in s.notes[1]


@pytest.mark.case(25)
@pytest.mark.parametrize('scales', [np.uint8, np.float16])
def test_scales_without_biases_are_refused(tmp_path, scales):  # CASE 25
    tensors = {k: v.astype(scales) if 'scales' in k else v for k, v in nine(E, D, F).items() if 'biases' not in k}
    with pytest.raises(CheckpointError, match='gate_proj.scales.*not supported.*affine'): opened(put(tmp_path/'mx', tensors))


@pytest.mark.parametrize('change,said', [
    (lambda t: {k: v for k, v in t.items() if 'up_proj' not in k}, 'no weights'),
    (lambda t: {**t, 'model.layers.0.mlp.experts.0.up_proj.weight': np.zeros((F, D//8), np.uint32)}, 'both stacked and per expert'),
    (lambda t: {**t, 'model.layers.0.mlp.switch_mlp.down_proj.bias': np.zeros((E, D), np.float16)}, "unknown part of an expert"),
    (lambda t: {k: v[:5] if 'down' in k else v for k, v in t.items()}, 'number of experts'),
    (lambda t: {k: v[:, :, :-1] if k.endswith('up_proj.weight') else v for k, v in t.items()}, 'bits per weight of up'),
    (lambda t: {k: v[:, :-1] if k.endswith('down_proj.scales') else v for k, v in t.items()}, 'scales'),
    (lambda t: {k: np.zeros(v.shape, np.float16) for k, v in t.items() if 'weight' in k}, 'not quantised')])
def test_impossible_experts(tmp_path, change, said):
    with pytest.raises(CheckpointError, match=said): opened(put(tmp_path/'bad', change(nine(E, D, F))))


def test_mtp_layers_are_noted_and_left_out(tmp_path):
    tensors = nine(E, D, F)
    tensors |= {k.replace('model.layers', 'mtp.layers'): v for k, v in nine(E, D, F, seed=1).items()}
    with pytest.warns(UserWarning, match='mtp'): s = opened(put(tmp_path/'mtp', tensors))
    assert s.layers == (0,) and (s.arrays(0, 0)['gate.weight'] == tensors['model.layers.0.mlp.switch_mlp.gate_proj.weight'][0]).all()


# --- reads ---

@pytest.mark.case(19)
def test_bytes_read_equal_distinct_bytes(small, monkeypatch):  # CASE 19
    s, spans, real = opened(small, threads=4), [], reads._preadv
    s.evict()
    lock = threading.Lock()

    def spy(fd, rows, offset, *flags):
        n = real(fd, rows, offset, *flags)
        with lock: spans.append((fd, offset, n))
        return n

    monkeypatch.setattr(reads, '_preadv', spy)
    jobs = [(0, e, flat_rows(s.spec(0).empty())) for e in range(E)]
    assert sum(f.result() for f in s.read_many(jobs)) == E*s.spec(0).total == sum(n for *_, n in spans)
    covered = sorted((f, o, o + n) for f, o, n in spans if n)
    assert all(a[0] != b[0] or a[2] <= b[1] for a, b in zip(covered, covered[1:]))  # no byte twice


def test_short_and_interrupted_reads_are_finished(small, monkeypatch):
    s, want, turn = opened(small, threads=1), None, []
    want = s.arrays(1, 4)

    def stutter(fd, rows, offset, *flags):
        turn.append(1)
        if len(turn)%3 == 0: raise InterruptedError
        row = next(r for r in map(memoryview, rows) if r.nbytes)
        return os.preadv(fd, [row.cast('B')[:1000]], offset)

    monkeypatch.setattr(reads, '_preadv', stutter)
    got = s.arrays(1, 4)
    assert all(got[p].tobytes() == a.tobytes() for p, a in want.items()) and len(turn) > s.spec(1).total//1000


def test_many_threads_agree_with_one(small):
    s = opened(small, threads=8)
    want = {(layer, e): s.arrays(layer, e) for layer in range(L) for e in range(E)}
    rng = np.random.default_rng(0)
    jobs, kept = [], []
    for _ in range(120):
        layer, e = int(rng.integers(L)), int(rng.integers(E))
        kept.append(((layer, e), s.spec(layer).empty())); jobs.append((layer, e, flat_rows(kept[-1][1])))
    for f in s.read_many(jobs): assert f.result() == s.spec(0).total
    for key, arrays in kept: assert all(a.tobytes() == w.tobytes() for a, w in zip(arrays, want[key].values()))


@pytest.mark.parametrize('layout', LAYOUTS)
def test_read_block_fills_consecutive_slots(tmp_path, layout):
    s = opened(synth_experts(tmp_path/'b', 1, E, D, F, layout=layout))
    block = s.spec(0).empty(4)
    assert sum(f.result() for f in s.read_block(0, 2, 6, flat_rows(block))) == 4*s.spec(0).total
    for i, e in enumerate(range(2, 6)):
        for a, want in zip(block, s.arrays(0, e).values()): assert (a[i] == want).all()
    with pytest.raises(ValueError, match='2 experts of layer 0 need'): s.read_block(0, 0, 2, flat_rows(block))


def test_wrong_arguments_name_themselves(small):
    s = opened(small); rows = flat_rows(s.spec(0).empty())
    with pytest.raises(ValueError, match=r'rows\[8\] \(down.biases\)'): s.read_into(0, 0, rows[:8] + [rows[0]])
    with pytest.raises(ValueError): s.read_into(0, 0, rows[:8])
    with pytest.raises(ValueError, match='expert: 6 in layer 0'): s.read_into(0, 6, rows)
    with pytest.raises(ValueError, match='layer: 5'): s.spec(5)
    with pytest.raises(ValueError, match='threads: 0'): opened(small, threads=0)
    s.ck.close(); s.ck.close()
    with pytest.raises(CheckpointError, match='closed'): s.read_into(0, 0, rows)


# --- page cache ---

@pytest.mark.skipif(reads.CALLS.name != 'linux', reason='page-cache calls of Linux')
def test_evict_is_cold_also_for_mapped_and_dirty_pages(small):
    s, file = opened(small), small/'model-00001-of-00002.safetensors'
    held = np.memmap(file, np.uint8, 'r')
    total = int(held.sum(dtype=np.uint64))
    assert s.resident_fraction(0, 0) == 1.0 and s.cold_bytes(0, 0) == 0
    assert s.evict() == 0.0 and s.resident_fraction(0, 0) == 0.0 and s.cold_bytes(0, 0) == s.spec(0).total
    rows = flat_rows(s.spec(0).empty())
    seen = []
    for _ in range(30):                 # a busy machine may finish the disk's work before it looks: then a page counts as there
        n, cold = s.read_counted(0, 0, rows)
        assert n == s.spec(0).total and 0 <= cold <= n and s.read_counted(0, 0, rows) == (n, 0)
        seen.append(cold)
        if cold: break
        assert s.evict() == 0.0
    assert seen[-1] > 0
    assert int(held.sum(dtype=np.uint64)) == total  # eviction loses nothing
    assert s.evict(1) == 0.0 and s.will_need(1, 2)


def test_plain_systems_read_and_say_unknown(small, monkeypatch):
    monkeypatch.setattr(reads, '_NOWAIT', None)
    monkeypatch.setattr(reads, '_preadv', reads._preadv_plain)
    s, rows = opened(small, calls=reads.platform_calls('plan9')), None
    rows = flat_rows(s.spec(0).empty())
    assert s.calls.name == 'plain' and not s.will_need(0, 0)
    assert np.isnan(s.resident_fraction(0, 0)) and np.isnan(s.evict()) and s.cold_bytes(0, 0) == s.spec(0).total
    assert s.read_counted(0, 0, rows) == (s.spec(0).total,)*2
    assert all(r.any() for r in rows)


def test_mac_calls_are_the_ones_of_the_manual(small, monkeypatch):
    import fcntl
    said = []
    monkeypatch.setattr(fcntl, 'fcntl', lambda fd, cmd, arg=0: said.append((cmd, arg)) or 0)

    class Libc:
        def madvise(self, at, n, advice): said.append(('madvise', advice)); return 0
        def msync(self, at, n, flags): said.append(('msync', flags)); return 0
        def mincore(self, at, n, out): return 0
    with Checkpoint.open(small) as ck:
        mac, shard = reads.platform_calls('darwin'), ck.shards[0]
        base = shard.base
        monkeypatch.setattr(reads, '_libc', Libc())
        mac.will_need(shard.fd, 4096, 8192); mac.evict(shard.fd, base, shard.size, 0, 4096); mac.no_guessing(shard.fd)
        monkeypatch.undo()
    assert said == [(44, struct.pack('qi4x', 4096, 8192)), (48, 1), ('madvise', 4), ('msync', 2), (48, 0), (45, 0)]


# --- repack and throttle ---

@pytest.mark.parametrize('layout', LAYOUTS)
def test_repack_same_bytes_one_read_and_plain_safetensors(tmp_path, layout):
    src = synth_experts(tmp_path/'src', L, E, D, F, layout=layout)
    save_file({'model.norm.weight': np.arange(D, dtype=np.float32)}, src/'model-rest.safetensors')
    (src/'tokenizer.json').write_text('{}'); save_file({'layers.0.fc1.weight': np.zeros(2, np.float32)}, src/'prerouter_k4.safetensors')
    done = repack(src, tmp_path/'out')
    assert done['tensors'] == L*E*9 + 1 and done['written'] == L + 1 and not list((tmp_path/'out').glob('*.part'))
    a, b = opened(src), opened(tmp_path/'out')
    assert a.spec(0) == b.spec(0) and b.notes == [] and b.ck.notes == []
    for layer in range(L):
        for e in range(E):
            assert len(b.plan(layer, e)) == 1 and b.ranges(layer, e)[0].offset + b.spec(layer).total == b.ranges(layer, e)[8].offset + b.ranges(layer, e)[8].nbytes
            for p, v in a.arrays(layer, e).items(): assert v.tobytes() == b.arrays(layer, e)[p].tobytes()
    assert (b.ck.array('model.norm.weight') == np.arange(D)).all() and (tmp_path/'out'/'tokenizer.json').exists() and (tmp_path/'out'/'prerouter_k4.safetensors').exists()
    for f in sorted((tmp_path/'out').glob('model*.safetensors')):
        for n, v in mx.load(str(f)).items(): assert np.array(v.view(mx.uint8)).tobytes() == b.ck.array(n).tobytes()
    again = repack(src, tmp_path/'out')
    assert (again['written'], again['kept']) == (0, L + 1)


def test_repack_goes_on_after_an_error_and_distrusts_damage(small, tmp_path):
    def stop(file, done, of):
        if done == 2: raise KeyboardInterrupt
    with pytest.raises(KeyboardInterrupt): repack(small, tmp_path/'out', progress=stop)
    first = tmp_path/'out'/'model-00002-of-00003.safetensors'
    assert first.exists() and not (tmp_path/'out'/'model-00003-of-00003.safetensors').exists()
    raw = bytearray(first.read_bytes()); raw[-1] ^= 1; first.write_bytes(raw)
    done = repack(small, tmp_path/'out')
    assert (done['written'], done['kept']) == (2, 1)
    a, b = opened(small), opened(tmp_path/'out')
    assert all(v.tobytes() == b.arrays(0, E - 1)[p].tobytes() for p, v in a.arrays(0, E - 1).items())
    with pytest.raises(ValueError, match='checkpoint itself'): repack(small, small)
    with pytest.raises(CheckpointError, match='another checkpoint'): repack(synth_experts(tmp_path/'x', 1, E, D, F), tmp_path/'out')


def test_repack_keeps_nothing_of_another_checkpoint_of_the_same_shape(tmp_path):
    "Headers alone cannot tell a model from the same model trained on."
    old, new = (synth_experts(tmp_path/str(seed), 2, E, D, F, seed=seed) for seed in (1, 2))
    repack(old, tmp_path/'out')
    assert (repack(old, tmp_path/'out')['kept'], repack(new, tmp_path/'out')['kept']) == (3, 1)       # the first file holds no expert: empty in both
    a, b = opened(new), opened(tmp_path/'out')
    for layer in a.layers: assert all(v.tobytes() == b.arrays(layer, 1)[p].tobytes() for p, v in a.arrays(layer, 1).items())


def test_throttle_is_simulated_and_shares_its_bandwidth(small):
    s = opened(small)
    slow = Throttle(s, 0.01, 1e6)
    assert slow.label == 'simulated' and s.label == 'disk' and slow.spec(0) is s.spec(0)
    assert np.allclose([slow.due(0, 1000) for _ in range(3)], [0.011, 0.012, 0.013])
    rows = [flat_rows(s.spec(0).empty()) for _ in range(2)]
    fast = Throttle(s, 0, 1e15)
    assert [f.result() for f in fast.read_many([(0, i, r) for i, r in enumerate(rows)])] == [s.spec(0).total]*2
    assert (rows[1][0] == s.arrays(0, 1)['gate.weight'].reshape(-1).view(np.uint8)).all()
    for args in ((s, -1, 1), (s, float('nan'), 1), (s, float('inf'), 1), (s, '1', 1), (s, None, 1)):
        with pytest.raises(ValueError, match='latency_s'): Throttle(*args)
    for rate in (0, float('nan'), '1', None):
        with pytest.raises(ValueError, match='bytes_per_s'): Throttle(s, 0, rate)
    for threads in (0, 1.5, True, '8'):
        with pytest.raises(ValueError, match='threads'): ExpertStore(s.ck, threads=threads)


def test_fill_in_place_allocates_nothing(small):
    from edge0_lab.bench.io import allocations
    got = allocations(opened(small), n=100)
    assert got['python_kept_bytes'] < 512 and got['mlx_bytes'] == 0 and got['python_peak_bytes'] < 16_384 and got['faults'] < 20


def test_synth_refuses_what_it_cannot_make(tmp_path):
    for kw, said in ((dict(layout='heap'), 'layout'), (dict(bits=7), 'bits'), (dict(dtype='f8'), 'dtype'), (dict(group_size=48), 'D: 128')):
        with pytest.raises(ValueError, match=said): synth_experts(tmp_path/'n', 1, 2, D, F, **kw)


def test_impossible_sizes_are_refused_by_name(tmp_path):
    for i, shape in enumerate(([1 << 62]*20, [0] + [1 << 62]*3)):
        d = tmp_path/f'{i}'
        d.mkdir()
        write(d/'model.safetensors', {'a': dict(dtype='F32', shape=shape, data_offsets=[0, 0])}, b'')
        with pytest.raises(CheckpointError, match="'a': shape"): Checkpoint.open(d)
    with pytest.raises(CheckpointError, match='no experts'): opened(put(tmp_path/'none', nine(0, 64, 64)))


def test_what_names_no_expert_is_refused(small):
    s = opened(small)
    rows = flat_rows(s.spec(0).empty())
    with pytest.raises(ValueError, match='rows: 8 arrays'): s.read_into(0, 0, rows[:8])
    with pytest.raises(ValueError, match='without a layer'): s.evict(None, 3)
    with Throttle(s, 0, 1e12) as t: assert t.read_counted(0, 0, rows)[0] == s.spec(0).total
    with pytest.raises(RuntimeError): s.read_many([(0, 0, rows)])


def test_repack_names_a_log_that_is_not_its_own(small, tmp_path):
    out = tmp_path/'out'
    out.mkdir()
    for text in ('{"sour', '[]', '{}'):
        (out/'repack.json').write_text(text)
        with pytest.raises(CheckpointError, match='repack.json'): repack(small, out)
    with pytest.raises(ValueError, match='dir: '): repack(next(small.glob('*.safetensors')), tmp_path/'other')


# --- what was attacked in session 2 ---

def _killed_repack(src, out, n):
    "A child that repacks and kills itself at its n-th write, flush, copy or rename, in the middle of a write; False if it finished before."
    pid = os.fork()
    if pid == 0:
        from edge0_lab import writer
        left, put = [n], writer._put
        def last():
            left[0] -= 1
            return left[0] == 0
        def counted(f):
            def call(*a, **kw):
                if last(): os.kill(os.getpid(), signal.SIGKILL)
                return f(*a, **kw)
            return call
        def torn(f, piece):
            if last():
                f.write(bytes(piece)[:len(bytes(piece))//2])
                os.kill(os.getpid(), signal.SIGKILL)
            return put(f, piece)
        writer._put, os.replace, os.fsync, shutil.copy2 = torn, counted(os.replace), counted(os.fsync), counted(shutil.copy2)
        code = 1
        try:
            repack(src, out)
            code = 0
        finally: os._exit(code)
    status = os.waitpid(pid, 0)[1]
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0
    return os.WIFSIGNALED(status)


@pytest.mark.skipif(not hasattr(os, 'fork'), reason='kills a forked child')
def test_a_killed_repack_leaves_old_or_new_files_and_goes_on(tmp_path):
    src = synth_experts(tmp_path/'src', 2, 3, 64, 64)
    (src/'tokenizer.json').write_text('{"a": 1}')
    repack(src, tmp_path/'whole')
    want = {p.name: p.read_bytes() for p in (tmp_path/'whole').iterdir()}
    old, end = dict(want), 5*2 + 2*(1 + 27) + 3 + 3*2
    old['model-00002-of-00003.safetensors'] = b'\0'*100         # a damaged file of an earlier run
    rng = np.random.default_rng(0)
    for round, n in enumerate(rng.permutation(np.arange(1, end))[:14].tolist()):
        out = tmp_path/f'out{round}'
        if round%2: shutil.copytree(tmp_path/'whole', out); (out/'model-00002-of-00003.safetensors').write_bytes(b'\0'*100)
        killed = _killed_repack(src, out, n)
        for p in out.iterdir():
            if p.suffix == '.part' or p.name == 'repack.json': continue
            assert p.read_bytes() in (want[p.name], old[p.name]), (p.name, n)
        if (out/'repack.json').exists(): json.loads((out/'repack.json').read_text())
        assert killed or n > 20
        repack(src, out)
        got = {p.name: p.read_bytes() for p in out.iterdir() if p.suffix != '.part'}
        assert got == want, (n, {k for k in want if got.get(k) != want[k]})


def test_repack_leaves_weights_of_any_name_behind(small, tmp_path):
    src = tmp_path/'named'
    shutil.copytree(small, src)
    for i, p in enumerate(sorted(src.glob('model*.safetensors'))): p.rename(src/f'weights-{i}.safetensors')
    repack(src, tmp_path/'out')
    assert sorted(p.name for p in (tmp_path/'out').glob('*.safetensors')) == [f'model-0000{i}-of-00003.safetensors' for i in (1, 2, 3)]
    a, b = opened(src), opened(tmp_path/'out')
    assert all(v.tobytes() == b.arrays(1, 2)[p].tobytes() for p, v in a.arrays(1, 2).items())


def test_repack_follows_no_link_out_of_the_checkpoint(small, tmp_path):
    (tmp_path/'secret.json').write_text('{}')
    (small/'tokenizer.json').symlink_to(tmp_path/'secret.json')
    with pytest.raises(CheckpointError, match='tokenizer.json: leads out of the checkpoint'): repack(small, tmp_path/'out')
    assert not list((tmp_path/'out').glob('*.safetensors'))
    (small/'tokenizer.json').unlink()
    (small/'tokenizer.json').symlink_to('config.json')          # a link inside is what it points to
    repack(small, tmp_path/'out')
    assert (tmp_path/'out'/'tokenizer.json').read_text() == (small/'config.json').read_text() and not (tmp_path/'out'/'tokenizer.json').is_symlink()


@pytest.mark.case(25)
@pytest.mark.parametrize('parts, said', [(('qweight', 'qzeros', 'scales'), "unknown part of an expert; found 'qweight'"), (('weight', 'weight_scale_inv'), "found 'weight_scale_inv'"), (('weight_packed', 'weight_scale'), "found 'weight_packed'")])
def test_other_quantisations_are_refused_by_the_part_that_shows_them(tmp_path, parts, said):
    # CASE 25: gptq, block fp8, compressed-tensors
    head = 'model.layers.0.mlp.experts.0.gate_proj'
    with pytest.raises(CheckpointError, match=said): opened(put(tmp_path/'q', {f'{head}.{p}': np.zeros((4, 4), np.float16) for p in parts}))


def test_a_mode_that_the_file_does_not_hold_is_named(small):
    config = json.loads((small/'config.json').read_text())
    config['quantization']['mode'] = 'mxfp4'
    (small/'config.json').write_text(json.dumps(config))
    with pytest.warns(UserWarning, match="mode 'mxfp4'; the file holds affine"): s = opened(small)
    assert s.spec(0).bits == (4, 4, 4)


def test_a_closed_store_says_so(small):
    s = opened(small)
    rows = flat_rows(s.spec(0).empty())
    s.close()
    for call in (lambda: s.read_many([(0, 0, rows)]), lambda: s.read_block(0, 0, 1, rows)):
        with pytest.raises(RuntimeError, match='ExpertStore: the pool of readers is closed'): call()
    assert s.read_into(0, 0, rows) == s.spec(0).total           # the checkpoint is still open
    s.ck.close()
    with pytest.raises(CheckpointError, match='layer 0 expert 0: checkpoint is closed'): s.read_into(0, 0, rows)
    with pytest.raises(CheckpointError, match='checkpoint is closed'): s.ck.array(s.ck.names()[0])


def test_one_writer_makes_the_same_file_in_any_pieces(tmp_path):
    from edge0_lab.writer import file_head, write_stream
    tensors = [('a', 'F32', (3, 5)), ('none', 'F16', (0, 4)), ('b', 'BF16', (7,)), ('c', 'U8', ())]
    data = dict(a=np.arange(15, dtype=np.float32).reshape(3, 5), none=np.zeros((0, 4), np.float16), b=np.arange(7, dtype=np.uint16), c=np.array(9, np.uint8))
    whole = write_stream(tmp_path/'a.safetensors', tensors, lambda n: (data[n],), dict(k='v'), align=8)
    write_stream(tmp_path/'b.safetensors', tensors, lambda n: [bytes([x]) for x in data[n].tobytes()], dict(k='v'), align=8)
    raw = (tmp_path/'a.safetensors').read_bytes()
    assert raw == (tmp_path/'b.safetensors').read_bytes() and len(raw) == whole == file_head(tensors, dict(k='v'), 8)[1][-1]
    with Checkpoint.open(tmp_path/'a.safetensors') as ck: assert ck.metadata == {'k': 'v'} and ck.names() == [n for n, _, _ in tensors]
    with pytest.raises(ValueError, match="'a' twice"): file_head(tensors[:1]*2)
    with pytest.raises(ValueError, match="'a' ends at byte"): write_stream(tmp_path/'b.safetensors', tensors, lambda n: (data[n],)*2)
    assert (tmp_path/'b.safetensors').read_bytes() == raw       # a failed write leaves the old file


@pytest.mark.parametrize('e', [1.0, None, '1', -1, E])
def test_an_expert_that_is_no_number_of_one_is_refused_by_name(small, e):
    with Checkpoint.open(small) as ck, ExpertStore(ck) as store:
        rows = [np.empty(n, np.uint8) for n in store._layers[0].sizes]
        with pytest.raises(ValueError, match=r'^expert: .* in layer 0'): store.read_into(0, e, rows)
        assert store.read_into(0, np.int64(1), rows) == store.spec(0).total


@pytest.mark.parametrize('name, value', [('group_size', 0), ('L', 0), ('E', 0), ('D', -64), ('F', 64.0), ('E', True)])
def test_sizes_of_a_made_checkpoint_are_refused_by_name(tmp_path, name, value):
    with pytest.raises(ValueError, match=f'^{name}: '): synth_experts(tmp_path/'no', **{**dict(L=1, E=4, D=64, F=64), name: value})
    assert not (tmp_path/'no').exists()
