"The int4 kernels against the float64 oracle, at odd widths, with bad input, from several threads, after a fork."
import multiprocessing, os, subprocess, sys, threading

import edge0_lab
import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from edge0_lab import int4
from edge0_lab.int4 import (BITS, GROUPS, ExpertStack, QTensor, dequantize, expert_glu, expert_glu_kernel, expert_glu_ops, expert_glu_ref, expert_glu_tile,
                            floats, host, pack, pack4, plan_linear, qlinear, qlinear_kernel, qlinear_ref, quantize, relative_l2, resolve_kernel, unpack, unpack4, which_kernel)

LIMIT = dict(f32=1e-5, int16=1e-4)
DTYPES = dict(bf16=mx.bfloat16, f16=mx.float16, f32=mx.float32)


def weights(rng, *shape): return mx.array(rng.standard_normal(shape).astype(np.float32)/shape[-1]**0.5)

def make_stack(S, D, F, bits=(4, 4, 4), group=64, dtype='bf16', seed=0):
    "gate, up, down"
    rng = np.random.default_rng(seed)
    q = [quantize(weights(rng, S, *shape).astype(DTYPES[dtype]), b, group) for b, shape in zip(bits, ((F, D), (F, D), (D, F)))]
    return ExpertStack(gate=q[0], up=q[1], down=q[2])

def inputs(T, D, k, S, seed=1):
    rng = np.random.default_rng(seed)
    return rng.standard_normal((T, D)).astype(np.float32), rng.integers(0, S, (T, k))


@pytest.mark.case(23)  # CASE 23: every width there is
@pytest.mark.parametrize('bits', BITS)
@pytest.mark.parametrize('dtype', DTYPES)
def test_quantize_is_mx_quantize(bits, dtype):
    w = np.random.default_rng(bits).standard_normal((6, 256)).astype(np.float32)
    w[0], w[1, :128], w[2] = 0, 1.5, -np.abs(w[2])  # all zero, constant, one sign
    w = mx.array(w).astype(DTYPES[dtype])
    for group in GROUPS:
        ours = quantize(host(w), bits, group)
        for got, want in zip(ours.arrays, mx.quantize(w, group, bits)): np.testing.assert_array_equal(got, host(want))
        np.testing.assert_array_equal(dequantize(ours), np.array(dequantize(quantize(w, bits, group), mx.float32)))
        np.testing.assert_array_equal(pack(unpack(ours.weight, bits), bits), ours.weight)


@given(st.lists(st.integers(0, 15), min_size=8, max_size=8))
@settings(max_examples=30, deadline=None)
def test_pack4_is_one_hex_word(nibbles):
    q = np.array(nibbles)
    assert int(pack4(q)[0]) == int(''.join(f'{n:x}' for n in reversed(nibbles)), 16)
    np.testing.assert_array_equal(unpack4(pack4(q)), q)


@pytest.mark.case(27)  # CASE 27: the oracle is float64 from the first operation to the last
def test_oracle_is_float64():
    stack, (x, slots) = make_stack(2, 64, 32, group=32), inputs(2, 64, 2, 2)
    y = expert_glu_ref(x, stack, slots)
    assert y.dtype == np.float64
    g, u, d = (dequantize(q[int(slots[1, 0])].map(host), np.float64) for q in stack.projections)
    a = np.einsum('fd,d->f', g, x[1].astype(np.float64))
    np.testing.assert_allclose(y[1, 0], np.einsum('df,f->d', d, a/(1 + np.exp(-a))*np.einsum('fd,d->f', u, x[1].astype(np.float64))), rtol=1e-12)
    assert qlinear_ref(x, stack.up[0]).dtype == np.float64


@pytest.mark.parametrize('D, F', [(2048, 512), (1536, 512)])
def test_contract_at_both_tiers_widths(D, F):
    stack, (x, slots) = make_stack(4, D, F), inputs(2, D, 3, 4)
    want = expert_glu_ref(x, stack, slots)
    for form, limit in LIMIT.items(): assert relative_l2(expert_glu_kernel(x, stack, slots, form=form), want) <= limit
    xb = mx.array(x).astype(mx.bfloat16)
    y = expert_glu(xb, stack, mx.array(slots))
    assert y.dtype == mx.bfloat16 and y.shape == (2, 3, D)
    assert relative_l2(y, expert_glu_ref(xb, stack, slots)) <= 5e-3
    assert relative_l2(expert_glu_ops(x, stack, slots), want) <= 1e-5


@pytest.mark.case(26)  # CASE 26: tiny and odd numbers of outputs, and columns that fill no whole block
@pytest.mark.parametrize('rows', [1, 4, 7, 33, 96])
def test_odd_outputs(rows):
    rng = np.random.default_rng(rows)
    for cols in (64, 192, 448):
        q = quantize(weights(rng, rows, cols).astype(mx.bfloat16))
        for T in (1, 6):
            x = rng.standard_normal((T, cols)).astype(np.float32)
            want = qlinear_ref(x, q)
            for form, limit in LIMIT.items():
                y = qlinear_kernel(x, q, form)
                assert y.shape == (T, rows)
                # a few outputs may cancel to near nothing, so they are measured against |w| |x| instead of their own size
                size = np.linalg.norm(dequantize(q.map(host)))*np.linalg.norm(x) if rows < 33 else np.linalg.norm(want)
                assert np.linalg.norm(y - want) <= limit*size


@pytest.mark.case(26)
@pytest.mark.parametrize('D, F, T, k', [(64, 64, 1, 1), (64, 192, 5, 5), (192, 320, 2, 4), (320, 64, 70, 1)])
def test_odd_experts(D, F, T, k):
    stack, (x, slots) = make_stack(5, D, F), inputs(T, D, k, 5)
    want = expert_glu_ref(x, stack, slots)
    for form, limit in LIMIT.items(): assert relative_l2(expert_glu_kernel(x, stack, slots, form=form), want) <= limit


@pytest.mark.case(23)  # CASE 23: an expert of 6 bits, of 8, mixed ones: every one right, compiled or dequantised
@pytest.mark.parametrize('bits', [(3, 3, 3), (5, 5, 5), (6, 6, 6), (4, 4, 8), (8, 8, 4), (4, 6, 4)])
def test_other_widths(bits):
    stack, (x, slots) = make_stack(3, 128, 64, bits), inputs(3, 128, 2, 3)
    assert relative_l2(expert_glu(x, stack, slots, kernel='kernel'), expert_glu_ref(x, stack, slots)) <= 1e-4
    q = stack.gate[0]
    assert relative_l2(qlinear(x, q, kernel='kernel'), qlinear_ref(x, q)) <= 1e-4
    assert which_kernel(stack, 'kernel').startswith('kernel ' if set(bits) <= {2, 4, 8} else 'dequantise')  # and the route is named


@pytest.mark.parametrize('bits', [2, 4, 8])
@pytest.mark.parametrize('group, dtype', [(32, 'f16'), (128, 'f32')])
def test_groups_and_scales(bits, group, dtype):
    rng = np.random.default_rng(bits)
    q = quantize(weights(rng, 9, 384).astype(DTYPES[dtype]), bits, group)
    x = rng.standard_normal((2, 384)).astype(np.float32)
    for form, limit in LIMIT.items(): assert relative_l2(qlinear_kernel(x, q, form), qlinear_ref(x, q)) <= limit


def test_a_pair_does_not_depend_on_its_company():
    "The bits of one (token, expert) pair are the same alone, in a batch, in another slot and in any order."
    stack, (x, slots) = make_stack(6, 192, 128), inputs(23, 192, 4, 6)
    for form in LIMIT:
        y = expert_glu_kernel(x, stack, slots, form=form)
        order = np.random.default_rng(2).permutation(6)
        moved = ExpertStack(**{n: getattr(stack, n)[mx.array(order)] for n in ('up', 'gate', 'down')})
        np.testing.assert_array_equal(expert_glu_kernel(x, moved, np.argsort(order)[slots], form=form), y)
        for t, j in ((0, 0), (7, 3), (22, 1)):
            np.testing.assert_array_equal(expert_glu_kernel(x[t:t+1], stack, slots[t:t+1, j:j+1], form=form)[0, 0], y[t, j])


def test_nan_and_infinity_reach_the_output():
    "Never a plausible number from a broken activation."
    stack = make_stack(2, 128, 64)
    for bad in (np.nan, np.inf, -np.inf):
        x = np.ones((2, 128), np.float32)
        x[0, 5] = bad
        for form in LIMIT:
            y = expert_glu_kernel(x, stack, np.zeros((2, 1), int), form=form)
            assert np.isnan(y[0]).all() and np.isfinite(y[1]).all()
    for form in LIMIT: assert not expert_glu_kernel(np.zeros((1, 128), np.float32), stack, np.zeros((1, 1), int), form=form).any()
    assert not np.isnan(expert_glu_kernel(np.full((1, 128), 1e-38, np.float32), stack, np.zeros((1, 1), int))).any()


def test_extreme_gates():
    "silu at the ends of float32: no overflow to NaN."
    q = quantize(mx.full((1, 32, 32), 1.0), 4, 32)
    stack = ExpertStack(up=q, gate=q, down=q)
    for v in (-1e4, -30.0, 30.0, 1e4):
        x = np.full((1, 32), v, np.float32)
        want = expert_glu_ref(x, stack, np.zeros((1, 1), int))
        for form in LIMIT: np.testing.assert_allclose(expert_glu_kernel(x, stack, np.zeros((1, 1), int), form=form), want, rtol=2e-4, atol=1e-6)


def test_a_later_write_is_seen():
    "The kernel reads MLX's own memory: what a reader thread writes into a slot is what is computed."
    stack, other = make_stack(2, 64, 64), make_stack(2, 64, 64, seed=5)
    x = np.ones((1, 64), np.float32)
    before = expert_glu_kernel(x, stack, np.array([[1]]))
    for mine, theirs in zip(stack.views, other.views): mine[1] = theirs[0]
    after = expert_glu_kernel(x, stack, np.array([[1]]))
    np.testing.assert_array_equal(after, expert_glu_kernel(x, other, np.array([[0]])))
    assert relative_l2(after, before) > 0.1


def test_one_row_answers_are_their_own():
    "All layers answer a row in the same memory: each answer is a copy, from any thread, lazy or strided or broadcast x included."
    rng = np.random.default_rng(0)
    layers = [quantize(mx.array(rng.standard_normal((40, 128)).astype(np.float32))) for _ in range(3)]
    rows = [mx.array(rng.standard_normal((1, 128)).astype(np.float32)) for _ in range(3)]
    want = [[np.array(qlinear_kernel(x, q)) for x in rows] for q in layers]
    seen, wrong = [qlinear(x, q, 'kernel') for q in layers for x in rows], []
    for got, w in zip(seen, (w for some in want for w in some)): np.testing.assert_array_equal(np.array(got), w)
    def work(i):
        for n in range(300):
            q, j = (i + n) % 3, n % 3
            if not np.array_equal(np.array(qlinear(rows[j], layers[q], 'kernel')), want[q][j]): wrong.append((i, n))
    threads = [threading.Thread(target=work, args=(i,)) for i in range(3)]
    for t in threads: t.start()
    for t in threads: t.join(60)
    assert not wrong and not any(t.is_alive() for t in threads)
    for x in (rows[0] + 1, mx.repeat(rows[0], 2, 1)[:, ::2], mx.broadcast_to(mx.array([[1.5]]), (1, 128)), mx.full((1, 128), float('nan'))):
        np.testing.assert_array_equal(np.array(qlinear(x, layers[0], 'kernel')), qlinear_kernel(np.array(x), layers[0]))


def test_several_threads_at_once():
    stack, (x, slots) = make_stack(4, 256, 128), inputs(8, 256, 2, 4)
    want, got = expert_glu_kernel(x, stack, slots), [None]*4
    def work(i): got[i] = [expert_glu_kernel(x, stack, slots) for _ in range(20)]
    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for t in threads: t.start()
    for t in threads: t.join(30)
    for ys in got:
        assert len(ys) == 20
        for y in ys: np.testing.assert_array_equal(y, want)


@pytest.mark.skipif(not hasattr(os, 'fork'), reason='needs fork')
def test_after_a_fork():
    stack, (x, slots) = make_stack(2, 64, 64), inputs(1, 64, 2, 2)
    want = expert_glu_kernel(x, stack, slots)
    pid = os.fork()
    if not pid: os._exit(0 if np.array_equal(expert_glu_kernel(x, stack, slots), want) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


@pytest.mark.case(25)  # CASE 25: no biases, or 8-bit scales, are mxfp4 and nvfp4
def test_other_formats_are_refused_by_name():
    w = np.zeros((4, 8), np.uint32)
    with pytest.raises(ValueError, match='biases.*mxfp4'): QTensor(w, np.zeros((4, 2), np.uint8), None, 4, 32)
    with pytest.raises(ValueError, match='scales.*uint8.*nvfp4'): QTensor(w, np.zeros((4, 2), np.uint8), np.zeros((4, 2), np.uint8), 4, 32)
    mxfp4 = mx.quantize(mx.ones((4, 64)), 32, 4, mode='mxfp4')
    with pytest.raises(ValueError, match='mxfp4'): QTensor(*mxfp4, None, 4, 32)


BAD = [
    (lambda s, x, i: expert_glu(x[:, :-1], s, i), 'x.*127.*128'), (lambda s, x, i: expert_glu(x[0], s, i), 'x'),
    (lambda s, x, i: expert_glu(x.astype(int), s, i), 'x.*int64'), (lambda s, x, i: expert_glu(x, s, i[:1]), r'slots.*\(1, 2\)'),
    (lambda s, x, i: expert_glu(x, s, i + 3), r'slots.*0\.\.2'), (lambda s, x, i: expert_glu(x, s, i - 1), r'slots.*-1'),
    (lambda s, x, i: expert_glu(x, s, i[:, :0]), 'slots'), (lambda s, x, i: expert_glu(x, s, i*1.0), 'slots.*float64.*integers'),
    (lambda s, x, i: expert_glu(x, s, i, kernel='fast'), "kernel.*'fast'.*auto"), (lambda s, x, i: expert_glu_kernel(x, s, i, form='int8'), 'form.*int8'),
    (lambda s, x, i: quantize(x, 7), 'bits.*7'), (lambda s, x, i: quantize(x, 4, 96), 'group_size.*96'), (lambda s, x, i: quantize(x[:, :100]), r'w.*\(2, 100\).*64'),
    (lambda s, x, i: quantize(x.astype(int)), 'w.*int64'), (lambda s, x, i: pack4(np.arange(7)), 'q.*7'), (lambda s, x, i: pack4(np.full(8, 16)), 'q.*16'),
    (lambda s, x, i: QTensor(*s.up[0].arrays, 8, 64), 'weight.*8 bits'), (lambda s, x, i: QTensor(*s.up[0].arrays, 4, 128), 'weight.*128'),
    (lambda s, x, i: ExpertStack(up=s.up, gate=s.gate, down=s.up), 'down.*3, 128, 64'), (lambda s, x, i: ExpertStack(up=s.up, gate=s.down, down=s.down), 'gate'),
    (lambda s, x, i: ExpertStack(up=s.up[0], gate=s.gate, down=s.down), 'up'), (lambda s, x, i: qlinear(x[:, 1:], s.up[0]), 'x.*127'),
    (lambda s, x, i: qlinear(x, s.up), 'q.*3, 64, 128'), (lambda s, x, i: relative_l2(x, x[:1]), 'got'),
]

BAD += [  # found in review: these were silent, crashed, or failed without a name
    (lambda s, x, i: expert_glu(x.tolist(), s, i), 'x: list'), (lambda s, x, i: expert_glu(x, s, i.tolist()), 'slots: list'), (lambda s, x, i: expert_glu(x, s.up, i), 'stack: QTensor'),
    (lambda s, x, i: qlinear(x.tolist(), s.up[0]), 'x: list'), (lambda s, x, i: plan_linear(quantize(x, 3)), 'q: 3 bits'), (lambda s, x, i: plan_linear(x), 'q: '),
    (lambda s, x, i: qlinear_kernel(x, quantize(x, 3), 'int8'), 'form.*int8'), (lambda s, x, i: make_stack(2, 64, 64, (6, 6, 6)).plan_for(None), 'bits: 6/6/6'),
    (lambda s, x, i: quantize(x, 4.0), r'bits: 4\.0'), (lambda s, x, i: quantize(x.tolist()), 'w: list'), (lambda s, x, i: QTensor(*s.up[0].arrays, 4, 64.0), r'group_size: 64\.0'),
    (lambda s, x, i: QTensor(s.up.weight, *map(host, s.up.arrays[1:])), 'scales.*library'), (lambda s, x, i: QTensor(s.up.weight, None, s.up.biases), 'scales: NoneType'),
    (lambda s, x, i: ExpertStack(up=s.up, gate=s.gate.map(host), down=s.down), 'gate.*library'),
    (lambda s, x, i: pack(np.full(32, 9), 3), r'q: values 9\.\.9.*0\.\.7'), (lambda s, x, i: pack(np.full(32, -1), 8), 'q: values -1'), (lambda s, x, i: pack(np.ones(7, int), 3), 'q: 7 columns'),
    (lambda s, x, i: pack(np.ones(32, int), 7), 'bits: 7'), (lambda s, x, i: pack4(np.ones(8)), 'q: ndarray float64'), (lambda s, x, i: pack4(mx.zeros((8,), mx.uint8)), 'q: array'),
    (lambda s, x, i: unpack(np.zeros(4, np.uint32), 3), 'w: 4 words.*multiple of 3'), (lambda s, x, i: unpack4(np.zeros(4, np.int32)), 'w: ndarray int32'),
    (lambda s, x, i: dequantize(s.up, np.float32), 'dtype.*mlx'), (lambda s, x, i: dequantize(x), 'q: ndarray'), (lambda s, x, i: relative_l2([1.], x), 'got: list'),
]

@pytest.mark.parametrize('kernel', ['ref', 'ops', 'kernel'])
@pytest.mark.parametrize('dtype', [np.int8, np.uint8, np.int16, np.uint16, np.int32, np.uint32, np.int64, np.uint64])
def test_slots_of_every_integer_dtype(kernel, dtype):
    "uint16 stands for bf16 in x and scales, never in slots; reversed and strided slots are read in their order."
    stack, (x, _) = make_stack(4, 64, 32, group=32), inputs(1, 64, 1, 4)
    slots = np.array([[3, 2, 1, 0]])
    want = expert_glu_ref(x, stack, slots)
    assert relative_l2(expert_glu(x, stack, slots.astype(dtype), kernel), want) <= 1e-4
    assert relative_l2(expert_glu(x, stack, np.arange(4, dtype=dtype)[None, ::-1], kernel), want) <= 1e-4
    assert relative_l2(expert_glu(x, stack, slots.astype(dtype)[:, ::2], kernel), want[:, ::2]) <= 1e-4


@pytest.mark.parametrize('kernel', ['ref', 'ops', 'kernel'])
def test_no_token_at_all(kernel):
    "MLX's quantised matmul of no rows ends the process: it must not be asked."
    stack = make_stack(2, 64, 32, group=32)
    for x in (np.ones((0, 64), np.float32), mx.ones((0, 64), mx.bfloat16)):
        y, z = expert_glu(x, stack, np.zeros((0, 2), int), kernel), qlinear(x, stack.up[0], kernel)
        assert y.shape == (0, 2, 64) and z.shape == (0, 32) and y.dtype == z.dtype == x.dtype
    assert quantize(np.ones((0, 64), np.float32)).shape == (0, 64)


@pytest.mark.parametrize('call, message', BAD)
def test_bad_input(call, message):
    stack, (x, slots) = make_stack(3, 128, 64), inputs(2, 128, 2, 3)
    with pytest.raises(ValueError, match=message) as e: call(stack, x, slots)
    assert 'allowed' in str(e.value)


@pytest.mark.parametrize('shape', [(0, 64), (2, 0, 128), (0, 3, 64)])
@pytest.mark.parametrize('dtype', [None, mx.float32])
def test_nothing_is_dequantised_to_nothing(shape, dtype):
    q = quantize(mx.zeros(shape, mx.bfloat16))
    got = dequantize(q, dtype)
    assert tuple(got.shape) == shape == dequantize(q.map(host)).shape and got.dtype == (dtype or mx.bfloat16)


@pytest.mark.case(30)  # CASE 30: every bf16 tensor, a scalar too, becomes NumPy without turning complex
def test_bf16_to_numpy():
    for a in (mx.array(1.5, mx.bfloat16), mx.array([1.5, -2.0], mx.bfloat16), make_stack(1, 64, 64).up.scales):
        v = floats(host(a))
        assert v.dtype == np.float32 and v.shape == a.shape
        np.testing.assert_array_equal(v, np.array(a.astype(mx.float32)))
        hash(host(a).tobytes())
    assert relative_l2(mx.array(1.5, mx.bfloat16), np.float32(1.5)) == 0


@pytest.mark.case(28)  # CASE 28: no C compiler anywhere, an empty cache: it works, with one notice; warm, with none; a broken object is not loaded
def test_no_compiler_needed(tmp_path):
    code = ('import edge0_lab, numpy as np; from edge0_lab.int4 import *; q = quantize(np.ones((4, 64), np.float32)); '
            'x = np.ones((1, 64), np.float32); assert relative_l2(qlinear(x, q, kernel="kernel"), qlinear_ref(x, q)) < 1e-4')
    env = os.environ | dict(PATH='', EDGE0_LAB_CACHE=str(tmp_path), CC='/nowhere', CXX='/nowhere')
    run = lambda: subprocess.run([sys.executable, '-c', code], env=env, capture_output=True, text=True, timeout=60)
    first, second = run(), run()
    assert first.returncode == 0 and second.returncode == 0, first.stderr + second.stderr
    assert first.stderr.count('compiling kernel linear') == 1 and 'compiling' not in second.stderr
    for f in (tmp_path/'kernels').glob('*.o'): f.write_bytes(f.read_bytes()[:-100])
    broken = run()
    assert broken.returncode == 0 and broken.stderr.count('compiling kernel linear') == 1, broken.stderr
    for f in (tmp_path/'kernels').glob('*.o'): f.unlink(); f.mkdir()  # what cannot be read is compiled again, and said
    unreadable = run()
    assert unreadable.returncode == 0 and 'kernel not cached' in unreadable.stderr, unreadable.stderr


def test_cache_that_cannot_be_written(tmp_path):
    (tmp_path/'file').write_text('')
    code = 'import edge0_lab, numpy as np; from edge0_lab.int4 import *; print(qlinear(np.ones((1, 64), np.float32), quantize(np.ones((4, 64), np.float32)), kernel="kernel"))'
    r = subprocess.run([sys.executable, '-c', code], env=os.environ | dict(EDGE0_LAB_CACHE=str(tmp_path/'file')), capture_output=True, text=True, timeout=60)
    assert r.returncode == 0 and '64.' in r.stdout, r.stderr


def test_import_is_light():
    code = 'import sys; from edge0_lab.int4 import expert_glu; print(*sorted({m.split(".")[0] for m in sys.modules} & {"numba", "llvmlite", "plotly", "mlx_lm", "torch"}))'
    assert subprocess.run([sys.executable, '-c', code], capture_output=True, text=True, check=True).stdout.strip() == ''


def test_auto_is_named():
    assert resolve_kernel() == ('ops' if mx.default_device() == mx.Device(mx.gpu) else 'kernel')
