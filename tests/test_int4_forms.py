"The vector forms: every multiply-add of pairs that can run here agrees bit for bit; the Arm one is compiled and looked at."
import re

import edge0_lab
import numpy as np
import pytest

from edge0_lab.int4 import plan_linear, qlinear_ref, quantize, relative_l2
from edge0_lab.rows import Form, Layout, emit_rows
from edge0_lab.tasks import emit_expert, emit_linear, linear_code, plan_rows, run_linear
from edge0_lab.vector import assembly, features, new_module, pair_instruction

NEEDS = dict(sse2='sse2', avx2='avx2', avx512='avx512bw', vnni='avx512vnni', neon=None)  # plain IR of the NEON form runs anywhere


def test_all_pair_instructions_agree():
    rng = np.random.default_rng(0)
    q, x = quantize(rng.standard_normal((5, 192)).astype(np.float32)), rng.standard_normal((2, 192)).astype(np.float32)
    plan, got = plan_linear(q), {}
    for pairs, need in NEEDS.items():
        if need and not features().get(need): continue
        for lanes in (16,) if 'vnni' in pairs or '512' in pairs else (8, 16):
            got[pairs, lanes] = run_linear(plan_rows(Form('int16', pairs, lanes), Layout(4, 64, 'f32'), plan.plan.parts, 5, 192), x, np.empty((2, 5), np.float32))
    assert len(got) >= 4
    same = got.get((pair_instruction(), 16))
    for (name, lanes), y in got.items():
        assert relative_l2(y, qlinear_ref(x, q)) <= 1e-4, name
        if name != 'neon' and pair_instruction() != 'neon': np.testing.assert_array_equal(y, same)
    np.testing.assert_array_equal(got['neon', 8], got['neon', 16])


@pytest.mark.parametrize('lanes', [8, 16])
@pytest.mark.parametrize('bits, group, cols', [(4, 64, 4096 + 192), (4, 32, 4096), (8, 128, 2048 + 128), (2, 32, 8192 + 64), (4, 128, 4096 + 128)])
@pytest.mark.parametrize('form', [Form('int16', pair_instruction()), Form('f32', None)])
def test_rows_longer_than_a_chunk(form, bits, group, cols, lanes):
    "A row is walked 32 blocks at a time: whole chunks, a chunk that is all tail, groups that end inside one; the same bits for any number of rows and tokens at once."
    rng = np.random.default_rng(1)
    q, x = quantize(rng.standard_normal((9, cols)).astype(np.float32), bits, group), rng.standard_normal((5, cols)).astype(np.float32)
    held, form = plan_linear(q), form._replace(lanes=lanes if form.pairs not in ('vnni', 'avx512') else 16)
    if form.pairs == 'neon' and group*bits//32 < 4: pytest.skip('NEON adds words 0 and 2')
    plan = plan_rows(form, Layout(bits, group, 'f32'), held.plan.parts, 9, cols)
    y = run_linear(plan, x, np.empty((5, 9), np.float32))
    assert relative_l2(y, qlinear_ref(x, q)) <= (1e-5 if form.kind == 'f32' else 1e-4)
    four = plan._replace(task=linear_code(form, Layout(bits, group, 'f32'), 4)[1])
    for t in range(5):
        for p in (plan, four): np.testing.assert_array_equal(run_linear(p, x[t:t + 1], np.empty((1, 9), np.float32))[0], y[t])


@pytest.mark.parametrize('form, wanted', [(Form('int16', 'neon'), r'\bsm(ull|lal)2?\b\s+v\d+\.4s'), (Form('f32', None), r'\bfml[as]\b\s+v\d+\.4s')])
@pytest.mark.parametrize('triple', ['aarch64-unknown-linux-gnu', 'arm64-apple-macosx14.0.0'])
def test_arm_has_vector_instructions(form, wanted, triple):
    "Cannot run here: the inner loop must be NEON, with no call and no scalar multiply."
    m = new_module('arm', triple)
    emit_rows(m, form, Layout(4, 64, 'bf16'), 1, 1).linkage = 'external'
    text = assembly(m, 'apple-m1' if 'apple' in triple else 'cortex-a76')
    wanted = wanted if 'apple' not in triple else wanted.replace(r'\s+v\d+\.4s', r'\.4s')
    assert len(re.findall(wanted, text)) >= 8, text[:3000]
    assert not re.search(r'\bbl\s+(?!_?(memcpy|memset))', text)


@pytest.mark.parametrize('form', [Form('int16', 'neon'), Form('f32', None)])
def test_arm_compiles_whole_kernels(form):
    l = Layout(4, 64, 'bf16')
    for name, emit in (('expert_task', lambda m: emit_expert(m, form, l, l, l)), ('linear_task', lambda m: emit_linear(m, form, l))):
        m = new_module('arm', 'aarch64-unknown-linux-gnu')
        emit(m)
        assert name in assembly(m, 'cortex-a76')


def test_x86_uses_its_widest_pairs():
    m = new_module('x86', 'x86_64-unknown-linux-gnu')
    emit_rows(m, Form('int16', 'vnni'), Layout(4, 64, 'bf16'), 1, 1).linkage = 'external'
    text = assembly(m, 'cascadelake', '+fast-dpwssd,-prefer-256-bit')
    assert len(re.findall(r'vpdpwssd.*zmm', text)) >= 4
    m = new_module('x86', 'x86_64-unknown-linux-gnu')
    emit_rows(m, Form('int16', 'avx2'), Layout(4, 64, 'bf16'), 1, 1).linkage = 'external'
    assert len(re.findall(r'vpmaddwd.*ymm', assembly(m, 'haswell'))) >= 8
