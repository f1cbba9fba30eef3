"What a file system can do to a lab that is running: every fault is an error with a name, and the next call gives the tokens of a fresh lab."
import gc, json, os, shutil, signal, struct, subprocess, sys, threading, time
from pathlib import Path

import edge0_lab
import numpy as np
import pytest

import shim
from edge0_lab import limits, reads
from edge0_lab.decode import Lab, RunConfig
from edge0_lab.slots import ReadError
from edge0_lab.store import Checkpoint, CheckpointError
from edge0_lab.synth import synth_family

PROMPT, N = [5, 17, 3, 29, 42], 10
FEW = dict(cache_slots=4)                      # so few slots that every step reads
needs_shim = pytest.mark.skipif(not shim.available(), reason='needs Linux and a C compiler to put a library below the store')


def tokens(lab, run=None, n=N, prompt=PROMPT): return lab.generate(prompt, n, run or RunConfig(trace=False, **FEW), stop=()).tokens


@pytest.fixture(scope='module')
def original(tmp_path_factory):
    d = tmp_path_factory.mktemp('original')/'m'
    synth_family('qwen3_5_moe', d, num_hidden_layers=4, num_experts=16, num_experts_per_tok=3)
    with Lab.open(d) as lab: want = tokens(lab)
    return d, want


@pytest.fixture
def copy(original, tmp_path):
    d = tmp_path/'m'
    shutil.copytree(original[0], d)
    return d, original[1]


def weights(d): return next(d.glob('model*.safetensors'))


def same_as_fresh(d, want):
    with Lab.open(d) as lab: assert tokens(lab) == want


# --- before a lab opens ---

def cut(d, f): os.truncate(f, f.stat().st_size - 4096)
def half(d, f): os.truncate(f, f.stat().st_size//2)
def empty(d, f): os.truncate(f, 0)
def gone(d, f): f.unlink()
def folder_instead(d, f): f.unlink(); f.mkdir()
def pipe_instead(d, f): f.unlink(); os.mkfifo(f)
def link_out(d, f): shutil.move(f, d.parent/'elsewhere.safetensors'); f.symlink_to(d.parent/'elsewhere.safetensors')
def loop(d, f): f.unlink(); f.symlink_to(f.name)


def rewrite_header(f, change):
    raw = f.read_bytes()
    n = struct.unpack('<Q', raw[:8])[0]
    head = json.loads(raw[8:8 + n])
    change(head)
    text = json.dumps(head, separators=(',', ':')).encode()
    text += b' '*(n - len(text))
    assert len(text) == n, 'the changed header must not be longer'
    f.write_bytes(raw[:8] + text + raw[8 + n:])


def overlapping(d, f):
    def change(head):
        a, b = sorted((v for k, v in head.items() if k != '__metadata__' and v['data_offsets'][0] > 0), key=lambda v: v['data_offsets'])[:2]
        size = b['data_offsets'][1] - b['data_offsets'][0]
        b['data_offsets'] = [a['data_offsets'][0], a['data_offsets'][0] + size]
    rewrite_header(f, change)


def swapped_names(d, f):
    "Two tensors of different shape exchange their names."
    def change(head):
        a = next(k for k in head if k.endswith('scales') and 'switch_mlp' in k)
        b = a.replace('scales', 'weight')
        head[a], head[b] = head[b], head[a]
    rewrite_header(f, change)


@pytest.mark.case(20)
@pytest.mark.parametrize('fault', [cut, half, empty, gone, folder_instead, pipe_instead, link_out, loop, overlapping, swapped_names], ids=lambda f: f.__name__)
def test_a_bad_file_is_refused_before_anything_is_read(copy, original, fault):
    d, want = copy
    f = weights(d)
    fault(d, f)
    start = time.monotonic()
    with pytest.raises((CheckpointError, FileNotFoundError)) as e: Lab.open(d)
    assert time.monotonic() - start < 60 and (f.name in str(e.value) or d.name in str(e.value) or 'layers' in str(e.value))
    same_as_fresh(*original)


def test_an_unreadable_file(copy):
    "As root nothing is unreadable, so root becomes nobody for the length of the call."
    d, want = copy
    os.chmod(weights(d), 0)
    root = os.geteuid() == 0
    try:
        if root:
            for p in (d, *d.parents):
                if p.stat().st_uid == 0 and not p.stat().st_mode & 1 and str(p).startswith(str(d.parents[2])): os.chmod(p, p.stat().st_mode | 0o755)
            os.seteuid(65534)
        with pytest.raises((PermissionError, CheckpointError)) as e: Checkpoint.open(d)
    finally:
        if root: os.seteuid(0)
        os.chmod(weights(d), 0o644)
    assert 'Permission' in str(e.value) or 'regular file' in str(e.value) or d.name in str(e.value)
    same_as_fresh(d, want)


# --- while it runs ---

def shortened(f, keep): os.truncate(f, f.stat().st_size//3)
def overwritten(f, keep):
    with open(f, 'r+b') as h: h.seek(f.stat().st_size//2); h.write(b'\xff'*64)
def replaced(f, keep): shutil.copy(keep, f.with_suffix('.new')); os.replace(f.with_suffix('.new'), f)
def removed(f, keep): f.unlink()
def touched(f, keep): os.utime(f, ns=(1, 1))


@pytest.mark.parametrize('fault, survives', [(shortened, False), (overwritten, False), (touched, False), (replaced, True), (removed, True)], ids=lambda v: getattr(v, '__name__', v))
@pytest.mark.parametrize('decode', ['staged', 'exact', 'hot', 'whole-layer'])
def test_a_file_that_changes_under_a_running_request(copy, original, fault, survives, decode):
    "Either the bytes that were checked are still served, or the request ends with the file's name. Never other tokens."
    d, want = copy
    f = weights(d)
    run = RunConfig(decode=decode, trace=False, **FEW)
    with Lab.open(d) as lab:
        s = lab.stream(PROMPT, N, run, stop=())
        got = [next(s).token for _ in range(3)]
        fault(f, weights(original[0]))
        if survives:
            got += [p.token for p in s]
            assert got == want
            with pytest.raises(CheckpointError, match='was replaced|was removed|removed while'): lab.checkpoint.check()
        else:
            with pytest.raises((ReadError, CheckpointError)) as e:
                for p in s: got.append(p.token)
                tokens(lab, run)                                     # everything needed was in slots: then the next request says it
            assert f.name in str(e.value) and got == want[:len(got)]
            assert lab.loaded.__dict__.get('serving') is None
    f.unlink(missing_ok=True)
    shutil.copy(weights(original[0]), f)
    same_as_fresh(d, want)


def test_a_slow_disk_changes_nothing_but_time(copy, monkeypatch):
    d, want = copy
    real = reads._preadv
    def late(*a): time.sleep(.002); return real(*a)
    with Lab.open(d) as lab:
        monkeypatch.setattr(reads, '_preadv', late)
        out = lab.generate(PROMPT, N, RunConfig(**FEW), stop=())
        assert out.tokens == want and out.counters['decode']['drops'] == 0 and out.counters['decode']['waits'] > 0


# --- below the store, on worker threads ---

BELOW = '''
import sys, json, shim
lib = shim.loaded()
import edge0_lab
from edge0_lab.decode import Lab, RunConfig
from edge0_lab.slots import ReadError
from edge0_lab.store import CheckpointError
d, kind, out = sys.argv[1], int(sys.argv[2]), []
with Lab.open(d) as lab:
    for decode in ('staged', 'exact', 'hot', 'whole-layer'):
        for thread in ('worker', 'main'):
            run = RunConfig(decode=decode, prefill='whole-layer' if decode in ('staged', 'whole-layer') else decode, fill_thread=thread, cache_slots=4, trace=False)
            lib.edge0_reads(5, kind)
            error = None
            try: got = lab.generate([5, 17, 3, 29, 42], 10, run, stop=()).tokens
            except (ReadError, CheckpointError, OSError) as e: got, error = None, f'{type(e).__name__}: {e}'
            hits = lib.edge0_hits()
            lib.edge0_reads(0, 0)
            out.append(dict(decode=decode, thread=thread, got=got, error=error, hits=hits, after=lab.generate([5, 17, 3, 29, 42], 10, run, stop=()).tokens))
print(json.dumps(out))
'''


@pytest.fixture(scope='module')
def so(tmp_path_factory): return shim.build(tmp_path_factory.mktemp('shim'))


@needs_shim
@pytest.mark.parametrize('kind', ['EIO', 'short', 'late', 'EINTR'])
def test_reads_that_fail_below_the_store(original, so, kind):
    d, want = original
    p = shim.python(so, BELOW.replace('sys.argv[1]', repr(str(d))).replace('sys.argv[2]', str(dict(EIO=1, short=2, late=3, EINTR=4)[kind])))
    assert p.returncode == 0, p.stderr[-3000:]
    rows = json.loads(p.stdout.splitlines()[-1])
    assert len(rows) == 8
    for r in rows:
        assert r['hits'] > 0 and r['after'] == want, r
        if kind == 'EIO': assert r['error'] is None and r['got'] == want or 'Input/output error' in r['error'] and ('layer' in r['error'] or 'expert' in r['error']), r
        else: assert r['error'] is None and r['got'] == want, r
    if kind == 'EIO': assert sum(r['error'] is not None for r in rows) >= 6


# --- stops ---

class After:
    "SIGINT from outside, some seconds after it is entered; the main thread gets KeyboardInterrupt."
    def __init__(self, seconds): self.seconds = seconds
    def __enter__(self):
        self.was = signal.signal(signal.SIGINT, signal.default_int_handler)
        self.t = threading.Timer(self.seconds, lambda: os.kill(os.getpid(), signal.SIGINT))
        self.t.start()
    def __exit__(self, kind, *_):
        self.t.cancel(); self.t.join()
        signal.signal(signal.SIGINT, self.was)


def interrupted(work, seconds):
    "True if the interrupt came while it worked."
    try:
        with After(seconds): work()
    except KeyboardInterrupt: return True
    return False


@pytest.mark.parametrize('phase', ['prefill', 'decode', 'score', 'walk'])
@pytest.mark.parametrize('decode', ['staged', 'exact', 'whole-layer'])
def test_ctrl_c_in_every_phase(original, phase, decode):
    d, want = original
    run = RunConfig(decode=decode, trace=False, **FEW)
    def walk(lab):
        with lab.walk(PROMPT, 40, run) as w: w.finish()
    with Lab.open(d) as lab:
        long = (PROMPT*30)[:100]
        work = dict(prefill=lambda: lab.generate(long, 0, RunConfig(decode=decode, prefill_chunk=8, trace=False, **FEW), stop=()), decode=lambda: tokens(lab, run, 120), score=lambda: lab.logits(long, RunConfig(prefill_chunk=8, trace=False)), walk=lambda: walk(lab))[phase]
        tokens(lab, run)
        came = 0
        for again in range(5):                       # on a busy machine the measured time may not be the next one's
            start = time.perf_counter()
            work()
            took = time.perf_counter() - start
            for part in (.05, .3, .6):
                came += interrupted(work, took*part)
                assert lab.loaded.__dict__.get('serving') is None and lab._walk is None
                assert tokens(lab, run) == want
            if came: break
        assert came >= 1
        gc.collect()
        assert not [t for t in threading.enumerate() if t.name.startswith('edge0-walk')]


def test_stop_in_prefill_and_decode(original):
    "What a Stop button does: the iterator is closed, from the same thread or when it is dropped."
    d, want = original
    with Lab.open(d) as lab:
        for n in (0, 1, 4):
            s = lab.stream(PROMPT, 50, RunConfig(**FEW), stop=())
            for _ in range(n): next(s)
            s.close()
            assert lab.loaded.__dict__.get('serving') is None and tokens(lab) == want
        s = lab.stream(PROMPT, 50, RunConfig(**FEW), stop=())
        next(s)
        del s
        gc.collect()
        assert lab.loaded.__dict__.get('serving') is None and tokens(lab) == want


# --- memory, processes, threads ---

@pytest.mark.parametrize('run, name', [(dict(cache_slots=10**9), 'cache_slots: 1000000000'), (dict(cache_slots='4000000 GiB'), "cache_slots: '4000000 GiB'"), (dict(stage_slots=10**9), 'stage 1000000000'), (dict(decode='hot', hot_slots=10**8), 'hot 400000000')])
def test_slots_that_do_not_fit_are_refused_before_they_are_made(original, run, name):
    d, want = original
    with Lab.open(d) as lab:
        import mlx.core as mx
        before = mx.get_active_memory()
        with pytest.raises(ValueError, match='GiB.*are free') as e: tokens(lab, RunConfig(trace=False, **run))
        assert name in str(e.value) and mx.get_active_memory() - before < 1 << 20
        assert tokens(lab) == want


def test_a_whole_layer_that_does_not_fit(original, monkeypatch):
    d, want = original
    with Lab.open(d) as lab:
        monkeypatch.setattr(limits, 'free_memory', lambda: dict(machine=100_000))
        with pytest.raises(ValueError, match=r"prefill: 'whole-layer' takes .*two arenas of 16 experts"): tokens(lab)
        monkeypatch.undo()
        assert tokens(lab) == want


def test_two_processes_on_one_checkpoint(original):
    d, want = original
    code = f'import edge0_lab; from edge0_lab.decode import Lab, RunConfig\nwith Lab.open({str(d)!r}) as lab:\n for _ in range(3): print(lab.generate({PROMPT}, {N}, RunConfig(trace=False, cache_slots=4), stop=()).tokens)'
    others = [subprocess.Popen([sys.executable, '-c', code], stdout=subprocess.PIPE, text=True) for _ in range(2)]
    with Lab.open(d) as lab: mine = [tokens(lab) for _ in range(3)]
    for p in others:
        lines = p.communicate(timeout=300)[0].splitlines()
        assert p.returncode == 0 and [json.loads(l) for l in lines] == mine == [want]*3


THREADS = '''
import threading, json, edge0_lab
from edge0_lab.decode import Lab, RunConfig
from edge0_lab.limits import finish_thread
d, got = {d!r}, {{}}
shared = Lab.open(d)
def work(i):
    try:
        with Lab.open(d) as own:
            for lab in (own, shared, own): got.setdefault(i, []).append(lab.generate({p}, {n}, RunConfig(decode=('staged', 'exact', 'hot')[i], cache_slots=4, trace=False), stop=()).tokens)
    except BaseException as e: got[i] = repr(e)
    finally: finish_thread()
ts = [threading.Thread(target=work, args=(i,)) for i in range(3)]
for t in ts: t.start()
for t in ts: t.join()
shared.close()
print(json.dumps(got))
'''


def test_labs_in_threads_take_turns(original):
    "Three threads, a lab of their own and one they share; in a process of its own, because what is tested for is its end."
    d, want = original
    p = subprocess.run([sys.executable, '-c', THREADS.format(d=str(d), p=PROMPT, n=N)], capture_output=True, text=True, timeout=300)
    assert p.returncode == 0, p.stderr[-3000:]
    assert json.loads(p.stdout.splitlines()[-1]) == {str(i): [want]*3 for i in range(3)}


def test_a_walk_at_a_stop_does_not_hold_the_others(original):
    d, want = original
    with Lab.open(d) as a, Lab.open(d) as b:
        with a.walk(PROMPT, 3, RunConfig(trace=False)) as w:
            w.step()
            done = threading.Event()
            t = threading.Thread(target=lambda: (tokens(b) == want and done.set(), limits.finish_thread()))
            t.start(); t.join(120)
            assert done.is_set()
            w.finish()
