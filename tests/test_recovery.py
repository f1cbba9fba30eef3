"Phases 2 and 3: the batched student is the served model, only the adapter learns, runs resume and share their batches."
import json, os, subprocess, sys
from dataclasses import replace
from pathlib import Path

import edge0_lab
import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten, tree_map, tree_unflatten

from edge0_lab.attach import adapter_of, new_adapter
from edge0_lab.corpus import Corpus
from edge0_lab.decode import Lab, RunConfig
from edge0_lab.heads import Heads, router_weights, warm_heads
from edge0_lab.opd import OpdRun, pools_of, student_rows, tail_kl, teacher_top, train_opd
from edge0_lab.rowfiles import RowPlan, prompts_of, shipped_rows, teacher_rows, weights_mark
from edge0_lab.settings import tier
from edge0_lab.sft import AdaptRun, added_logits, ce, fit_student, soft_ce, train_sft, trained_heads
from edge0_lab.student import Student
from edge0_lab.synth import synth_family

FAMILIES = ('qwen3_5_moe', 'bailing_moe_v3')


def heads_of(folder, k, seed=0):
    "Heads whose every part is at work."
    from edge0_lab.store import Checkpoint
    with Checkpoint.open(folder) as ck: gates = router_weights(ck)
    owners = [N for N in sorted(gates) if N + 1 in gates]
    heads, rng = warm_heads(gates, owners, k, 8, seed), np.random.default_rng(seed)
    return Heads({N: {n: (a + 0.2*rng.standard_normal(a.shape)).astype(np.float32) for n, a in p.items()} for N, p in heads.parts.items()}, k, 'drawn')


@pytest.fixture(scope='module', params=FAMILIES)
def made(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    synth_family(request.param, folder)
    s = Student(folder)
    heads = heads_of(folder, s.k)
    return folder, heads, [N + 1 for N in heads.owners]


def tokens_of(folder, B, T, seed=0):
    c = json.loads((Path(folder)/'config.json').read_text())
    return np.random.default_rng(seed).integers(0, c.get('text_config', c)['vocab_size'], (B, T))


def test_the_student_is_the_served_model(made):
    folder, heads, consumers = made
    tokens = tokens_of(folder, 3, 21)
    with Lab.open(folder, kernel='ops') as lab:
        use = [l for l in consumers if l >= min(lab.loaded.blocks) + max(1, len(lab.loaded.blocks)//5)]     # what a lab without a tier consumes
        student = Student(folder, None, heads, use)
        ours, own = np.array(student.logits(tokens)), np.array(student.logits(tokens, native=21))
        for b in range(3):
            theirs = np.array(lab.logits(tokens[b], RunConfig(prerouter=True, heads=heads, kernel='ops')))
            assert np.abs(theirs - ours[b]).max() < 2e-4*max(1, np.abs(theirs).max())
            plain = np.array(lab.logits(tokens[b], RunConfig(kernel='ops')))
            assert np.abs(plain - own[b]).max() < 2e-4*max(1, np.abs(plain).max())
        assert np.abs(ours - own).max() > 1e-2                                                               # prediction changes something
        mixed = np.array(student.logits(tokens, native=np.array([1, 5, 21])))                                # each row by its own prompt
        assert np.abs(mixed[0] - ours[0]).max() < 1e-4 and np.abs(mixed[2] - own[2]).max() < 1e-4
        assert np.abs(mixed[1, :5] - own[1, :5]).max() < 1e-4 and np.abs(mixed[1] - own[1]).max() > 1e-3


def test_sampling_greedily_is_generating(made):
    folder, heads, consumers = made
    prompts = tokens_of(folder, 2, 6, 1)
    with Lab.open(folder, kernel='ops') as lab:
        use = [l for l in consumers if l >= min(lab.loaded.blocks) + max(1, len(lab.loaded.blocks)//5)]
        ours = Student(folder, None, heads, use).sample(prompts, 10, temperature=0)
        for p, row in zip(prompts, ours):
            assert row[6:].tolist() == lab.generate(p, 10, RunConfig(decode='exact', prerouter=True, heads=heads, kernel='ops'), stop=()).tokens


def test_gradients_are_those_of_mlx_alone(made):
    "The grouped experts against gather_mm, the whole model through: values and gradients of every pair."
    folder, heads, consumers = made
    tokens, student = tokens_of(folder, 2, 19, 2), Student(folder, None, heads, consumers)
    rng = np.random.default_rng(3)
    student.wear(new_adapter(student.model, 4, 8), trainable=True)
    params = tree_map(lambda a: a + 0.1*mx.array(rng.standard_normal(a.shape), mx.float32), student.arrays(('lora', 'heads')))
    def loss(p):
        student.put(p)
        return ce(added_logits(student, tokens, 4), tokens[:, 4:]).mean()
    value, g = mx.value_and_grad(loss)(params)
    for b in student.blocks.values(): b.path = b.path.gathered
    again, h = mx.value_and_grad(loss)(params)
    assert abs(value.item() - again.item()) < 1e-5
    for (n, a), (_, b) in zip(tree_flatten(g), tree_flatten(h)): assert mx.abs(a - b).max() < 1e-3*mx.abs(b).max() + 1e-7, n
    flat = dict(tree_flatten(g))
    for part in ('lora', 'heads'): assert sum(float(mx.abs(a).max()) > 0 for n, a in flat.items() if n.startswith(part)) >= 3
    student.put(params)
    chosen = {}
    mx.eval(student.hidden(tokens[:, :-1], native=4, ids=chosen))
    for n, b in student.blocks.items(): b.choose = lambda l, held=chosen[n].reshape(-1, chosen[n].shape[-1]): (held, None)   # a choice is a step: held, the rest is smooth
    eps, along = 3e-4, tree_map(lambda a: mx.array(rng.standard_normal(a.shape), mx.float32), {'lora': params['lora']})
    moved = lambda s: loss({**params, 'lora': tree_map(lambda p, d: p + s*eps*d, params['lora'], along['lora'])}).item()
    slope = sum(float((a*b).sum()) for (_, a), (_, b) in zip(tree_flatten(g['lora']), tree_flatten(along['lora'])))
    assert abs((moved(1) - moved(-1))/(2*eps) - slope) < 0.05*abs(slope) + 0.02


def test_heads_that_lack_a_layer_and_native_zero_are_refused(made):
    folder, heads, consumers = made
    with pytest.raises(ValueError, match='heads'): Student(folder, None, Heads({999: heads.parts[heads.owners[0]]}, heads.k), consumers)
    with pytest.raises(ValueError, match='native'): Student(folder, None, heads, consumers).logits(tokens_of(folder, 1, 5), native=0)
    with pytest.raises(ValueError, match='k'): Student(folder, 10_000)


def test_untrained_heads_are_refused_with_the_reason(tmp_path, monkeypatch):
    t = tier('tiny-softmax')
    from edge0_lab.store import Checkpoint
    with Checkpoint.open(t.checkpoint) as ck: blank = warm_heads(router_weights(ck), t.owners, 4, t.head_hidden)
    with pytest.raises(ValueError, match='never trained.*gradient'): trained_heads(blank)
    with pytest.raises(ValueError, match='k = 5'): train_sft('tiny-softmax', 5, AdaptRun(rows=8, batch=8), keep=False)
    with pytest.raises(ValueError, match='start.*train sft'): train_opd('tiny-softmax', 5, keep=False)


def run_small(student, rows, run, **kw):
    student.wear(new_adapter(student.model, 4, 8, seed=1), trainable=True)
    curve = fit_student(student, run, lambda i: (rows[i*run.batch % len(rows):][:run.batch],), lambda r: ce(added_logits(student, r, 4), r[:, 4:]).mean(), **kw)
    return curve, adapter_of(student.model)


def test_only_the_adapter_learns_and_a_resumed_run_is_the_same(made, tmp_path):
    folder, heads, consumers = made
    student, rows, run = Student(folder, None, heads, consumers), tokens_of(folder, 8, 14, 5), AdaptRun(rows=24, batch=4, lr=1e-2, warmup=2)
    before = {n: np.array(a) for n, a in tree_flatten(student.model.parameters())}
    head = {N: {n: np.array(a) for n, a in tree_flatten(h.parameters())} for N, h in student.heads.items()}
    curve, whole = run_small(student, rows, run)
    assert curve[-1][0] < curve[0][0] and len(curve) == run.steps
    state = tmp_path/'s.safetensors'
    for stop in (1, 3, 4): run_small(student, rows, run, state=state, save_every=1, stop=stop)
    again, resumed = run_small(student, rows, run, state=state, save_every=1)
    assert again == curve
    for p in whole.parts: assert all((a == b).all() for a, b in zip(whole.parts[p], resumed.parts[p])), p
    with pytest.raises(ValueError, match='another run'): run_small(student, rows, replace(run, lr=1e-3), state=state)
    with pytest.raises(ValueError, match='another run'): run_small(student, rows, run, state=state, about='other text')
    student.wear(None)
    for n, a in tree_flatten(student.model.parameters()): assert (np.array(a) == before[n]).all(), n
    for N, h in student.heads.items():
        for n, a in tree_flatten(h.parameters()): assert (np.array(a) == head[N][n]).all()


SCRIPT = '''
import json, sys
sys.path.insert(0, {tests!r})
import edge0_lab, numpy as np
import mlx.core as mx
group = mx.distributed.init(strict=True)
from test_recovery import two_phases
curves, parts = two_phases({folder!r}, group)
if group.rank() == 0: json.dump(dict(size=group.size(), curves=curves, parts=parts), open({out!r}, 'w'))
'''


def two_phases(folder, group=None):
    "A few steps of phase 2 and of phase 3."
    heads = heads_of(folder, Student(folder).k)
    student, teacher, consumers = Student(folder, None, heads, [N + 1 for N in heads.owners]), Student(folder), [N + 1 for N in heads.owners]
    rows = tokens_of(folder, 8, 14, 5)
    a, adapter = run_small(student, rows, AdaptRun(rows=16, batch=4, warmup=1), group=group)
    corpus, plan, run = Corpus({'train/a': tokens_of(folder, 1, 400)[0]}), RowPlan(prompt=4, T=12), OpdRun(rows=8, pool=4, passes=1, batch=2, warmup=1, top=8)
    b = fit_student(student, run, pools_of(student, teacher, corpus, plan, run, group), lambda r, *top: tail_kl(added_logits(student, r, 4), *top).mean(), group=group)
    return [a, b], [float(np.abs(B).sum()) for _, B in adapter_of(student.model).parts.values()]


def test_two_processes_have_the_losses_of_one(tmp_path):
    folder, out, script = tmp_path/'model', tmp_path/'out.json', tmp_path/'run.py'
    synth_family('qwen3_5_moe', folder)
    script.write_text(SCRIPT.format(tests=str(Path(__file__).parent), folder=str(folder), out=str(out)))
    launch = Path(sys.executable).with_name('mlx.launch')
    p = subprocess.run([str(launch), '-n', '2', '--backend', 'ring', '--starting-port', str(21000 + os.getpid() % 20000), '--', sys.executable, str(script)], capture_output=True, text=True, timeout=240)
    assert out.exists(), p.stdout[-2000:] + p.stderr[-2000:]
    got, (curves, parts) = json.loads(out.read_text()), two_phases(folder)
    assert got['size'] == 2
    for a, b in zip(got['curves'], curves): assert np.abs(np.array(a)[:, 0] - np.array(b)[:, 0]).max() < 1e-5
    assert np.allclose(got['parts'], parts, rtol=1e-3) and max(parts) > 1e-3


# ---- rows

def test_rows_are_made_once_and_the_same(tmp_path, monkeypatch):
    corpus, plan = Corpus({'train/a': np.arange(5, 2000), 'train/b': np.arange(2000, 4000)}), RowPlan(prompt=4, T=9, block=3, seed=7)
    rows = teacher_rows('tiny-softmax', 5, plan, corpus, tmp_path, progress=False)
    assert rows.shape == (5, 9) and rows.dtype == np.uint16 and (rows[:3, :4] == prompts_of(corpus, plan, 0)).all()
    import edge0_lab.rowfiles as room
    monkeypatch.setattr(room, 'Student', lambda *a: pytest.fail('made again'))
    assert (teacher_rows('tiny-softmax', 6, plan, corpus, tmp_path, progress=False)[:5] == rows).all()
    monkeypatch.undo()
    (next(tmp_path.glob('*-1.npy'))).unlink()                                    # one block lost: made again, the same
    assert (teacher_rows('tiny-softmax', 5, plan, corpus, tmp_path, progress=False) == rows).all()
    assert len(shipped_rows('tiny-softmax', plan=plan)) == 0                     # another plan's rows are not taken for these


def test_shipped_rows_are_of_this_teacher():
    for name in ('tiny-softmax', 'tiny-sigmoid'):
        file = tier(name).checkpoint/'rows.npz'
        if not file.exists(): continue
        rows = shipped_rows(name)
        assert len(rows) and rows.max() < 4096 and file.stat().st_size < 400_000, f'{file.name} is of another teacher: python tools/recover.py'


# ---- phase 3

def dense_kl(student, teacher, m, direction):
    s, t = np.asarray(student, np.float64), np.asarray(teacher, np.float64)
    q, p = (np.exp(x - x.max(-1, keepdims=True)) for x in (s, t))
    q, p = q/q.sum(-1, keepdims=True), p/p.sum(-1, keepdims=True)
    top = np.argsort(-p, -1)[:, :m]
    lump = lambda x: np.concatenate([np.take_along_axis(x, top, -1), 1 - np.take_along_axis(x, top, -1).sum(-1, keepdims=True)], -1)[:, :m + (m < x.shape[-1])]
    Q, P = lump(q), lump(p)
    return (Q*np.log(Q/P)).sum(-1) if direction == 'reverse' else (P*np.log(P/Q)).sum(-1)


@pytest.mark.parametrize('direction', ['reverse', 'forward'])
def test_tail_kl_is_the_oracles(direction):
    rng = np.random.default_rng(0)
    for V, m in ((30, 1), (30, 7), (30, 29), (30, 30), (2, 1)):
        s, t = (mx.array(2*rng.standard_normal((5, V)), mx.float32) for _ in range(2))
        top = teacher_top(t, m)
        value, g = mx.value_and_grad(lambda s: tail_kl(s, *top, direction).sum())(s)
        assert abs(value.item() - dense_kl(s, t, m, direction).sum()) < 1e-4
        d = rng.standard_normal(s.shape)
        slope = (dense_kl(np.array(s, np.float64) + 1e-5*d, t, m, direction).sum() - dense_kl(np.array(s, np.float64) - 1e-5*d, t, m, direction).sum())/2e-5
        assert abs(slope - (np.array(g)*d).sum()) < 1e-3*max(1, abs(slope)), (V, m)
        assert (np.array(tail_kl(s, *top, direction)) <= dense_kl(s, t, V, direction) + 1e-4).all()


def test_a_tail_smaller_than_a_float_step_still_counts():
    "The teacher's other tokens together have 1e-9; the student gives them a third."
    t = mx.array(np.log([[0.6, 0.4, 6e-10, 4e-10]]), mx.float32)
    s = mx.array(np.log([[0.4, 0.3, 0.2, 0.1]]), mx.float32)
    for direction, sign in (('reverse', 1), ('forward', -1)):
        P, Q = (0.6, 0.4, 1e-9), (0.4, 0.3, 0.3)
        want = sum(q*np.log(q/p) if sign > 0 else p*np.log(p/q) for p, q in zip(P, Q))
        assert abs(tail_kl(s, *teacher_top(t, 2), direction).item() - want) < 1e-5*want


def test_soft_cross_entropy_is_forward_kl():
    rng = np.random.default_rng(1)
    s, t = (mx.array(rng.standard_normal((2, 3, 12)), mx.float32) for _ in range(2))
    assert np.abs(np.array(soft_ce(s, t)).reshape(-1) - dense_kl(np.array(s).reshape(-1, 12), np.array(t).reshape(-1, 12), 12, 'forward')).max() < 1e-5


def test_pools_are_on_policy_and_shared(made):
    folder, heads, consumers = made
    student, teacher = Student(folder, None, heads, consumers), Student(folder)
    corpus, plan, run = Corpus({'train/a': tokens_of(folder, 1, 300)[0]}), RowPlan(prompt=3, T=9), OpdRun(rows=8, pool=4, passes=2, batch=2, top=5)
    told = []
    batch_of = pools_of(student, teacher, corpus, plan, run, note=lambda j, rows, *top: told.append((j, rows)))
    seen = [batch_of(i) for i in range(run.steps)]
    assert [j for j, _ in told] == [0, 1] and run.steps == 8
    for j, rows in told:
        mine = np.concatenate([seen[i][0] for i in range(4*j, 4*j + 2)])
        assert sorted(map(tuple, mine)) == sorted(map(tuple, rows))                       # a pass shows each row of the pool once
    rows, ids, logp, rest = seen[0]
    want = teacher_top(added_logits(teacher, rows, 3), 5)
    assert np.abs(np.sort(want[1], -1) - np.sort(logp, -1)).max() < 1e-4 and ids.shape == (2, 6, 5) and np.abs(np.exp(logp).sum(-1) + np.exp(rest) - 1).max() < 1e-5
    class Half:                                                                           # a process of two: its own rows and numbers
        def size(self): return 2
        def rank(self): return 1
    prompts = prompts_of(corpus, replace(plan, block=4), 0)
    both = student_rows(student, prompts, plan, 3)
    draws = np.random.default_rng(3).random((6, 4))
    assert (student.sample(prompts[1::2], 6, draws=draws[:, 1::2]) == both[1::2]).all()


def test_adapters_that_ship_fit_and_change_the_answer():
    for name, ks in (('tiny-softmax', (8, 4, 2)), ('tiny-sigmoid', (8, 4))):
        t = tier(name)
        for k in ks:
            file = t.checkpoint/f'lora_k{k}.safetensors'
            if not file.exists(): continue
            log = json.loads(file.with_suffix('.json').read_text())
            assert log['marks']['model'] == weights_mark(t.checkpoint), f'{file.name} is for another base: python tools/recover.py'
