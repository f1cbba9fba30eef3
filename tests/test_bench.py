"The paper's tables and what carries them: control groups, processes of their own, lifted routing, both models, the command."
import json, os, subprocess, sys

import numpy as np
import pytest

from edge0_lab.bench.lifted import TinyText, copies_of, lag_overlap, layer_plan, lifted_sets, share_of, supplied_routes, typical_stretch
from edge0_lab.bench.paired import ChildDied, limited, own_process
from edge0_lab.bench.paper import REPLAYED, SCHEDULES, apart_cell, decode_cell, paper_cells, paper_tier
from edge0_lab.bench.paper_tables import arm_table, memory_table, paper_beside, paper_html, paper_speed
from edge0_lab.bench.sweep import cell_process
from edge0_lab.cli import main
from edge0_lab.settings import data_path
from edge0_lab.synth import synth

SMALL_8B = dict(layers=4, hidden_size=128, intermediate_size=128, moe_intermediate_size=64, moe_shared_expert_intermediate_size=64, vocab_size=512, num_attention_heads=4, head_dim=32, q_lora_rank=64, kv_lora_rank=64, qk_nope_head_dim=32, qk_rope_head_dim=16, v_head_dim=32)


@pytest.mark.parametrize('version', [1, 2])
def test_a_control_group_of_either_version(tmp_path, version, monkeypatch):
    from edge0_lab.bench import paired
    monkeypatch.setattr(paired, '_emptied', lambda group: gone.append(group))
    gone, home = [], tmp_path if version == 2 else tmp_path/'memory'
    home.mkdir(exist_ok=True)
    if version == 2:
        (home/'cgroup.controllers').write_text('cpu memory')
        (home/'cgroup.subtree_control').write_text('cpu')
    with limited(5 << 20, tmp_path) as join:
        group, = home.glob('edge0-lab-*')
        join()
        assert (group/'cgroup.procs').read_text() == '0'
        assert (group/('memory.max' if version == 2 else 'memory.limit_in_bytes')).read_text() == str(5 << 20)
    if version == 2: assert (home/'cgroup.subtree_control').read_text() == '+memory'
    assert gone == [group]


def test_two_groups_at_once_are_two(tmp_path, monkeypatch):
    from edge0_lab.bench import paired
    monkeypatch.setattr(paired, '_emptied', lambda group: None)
    (tmp_path/'memory').mkdir()
    with limited(1, tmp_path), limited(2, tmp_path): assert sorted(p.read_text() for p in (tmp_path/'memory').glob('*/memory.limit_in_bytes')) == ['1', '2']


def test_no_control_group_is_said_plainly(tmp_path):
    with pytest.raises(OSError, match='may make one'):
        with limited(1, tmp_path/'nowhere'): pass


def test_a_cell_that_dies_is_quoted():
    with pytest.raises(ChildDied, match=r'sweep_cell: ended with 1.*TypeError'): cell_process(dict(k=2, prompt=5))


def test_a_name_that_is_not_there_is_quoted():
    with pytest.raises(ChildDied, match='cannot import name'): own_process('bench.paired:moon', {})


# lifted routing

def visits(rng, T, L, k, E, stay):
    "Sets in which an expert stays with a probability."
    ids = np.empty((T, L, k), int)
    for l in range(L):
        now = rng.permutation(E)[:k]
        for t in range(T):
            now = np.array([e for e in now if rng.random() < stay], int)
            now = np.append(now, [e for e in rng.permutation(E) if e not in now][:k - len(now)])
            ids[t, l] = now
    return ids


@pytest.mark.parametrize('seed', range(5))
def test_neighbours_and_recall_are_kept_to_the_last_digit(seed):
    rng = np.random.default_rng(seed)
    gate = visits(rng, 60, 3, 4, 16, .4)
    head = np.where(rng.random((60, 3, 1)) < .5, gate, visits(rng, 60, 3, 4, 16, .3))
    plan = [0, 0, 1, 2, 2]
    a, b = lifted_sets([gate, head], 16, plan, 64, seed)
    for i, s in enumerate(plan):
        np.testing.assert_array_equal(share_of(a[1:, i], a[:-1, i]), share_of(gate[1:, s], gate[:-1, s]))
        np.testing.assert_array_equal(share_of(b[1:, i], b[:-1, i]), share_of(head[1:, s], head[:-1, s]))
        np.testing.assert_array_equal(share_of(b[:, i], a[:, i]), share_of(head[:, s], gate[:, s]))
    assert (np.diff(np.sort(a, -1), axis=-1) > 0).all() and set(np.unique(a)) <= set(range(64)) and len(np.unique(a[:, 0])) > 16
    assert not np.array_equal(a[:, 0], a[:, 1])                          # one source, two numberings
    assert lag_overlap(a, 4) < lag_overlap(gate[:, plan], 4)


def test_a_visit_has_one_copy_and_the_next_visit_a_new_draw():
    ids = np.array([[0], [0], [1], [0], [0]])
    drawn = {tuple(c[[0, 1, 3, 4], 0]) for s in range(40) for c in [copies_of([ids], 2, 4, np.random.default_rng(s))]}
    assert all(a == b and c == d for a, b, c, d in drawn) and any(a != c for a, _, c, _ in drawn)


def test_one_copy_is_a_renumbering():
    gate = visits(np.random.default_rng(0), 30, 2, 2, 8, .5)
    a, = lifted_sets([gate], 8, [0, 1], 8)
    for lag in (1, 3, 7): assert lag_overlap(a, lag) == lag_overlap(gate, lag)


def test_skew_is_kept_on_average():
    rng, p = np.random.default_rng(1), np.array([.5, .2, .1, .1, .05, .05])
    gate = np.array([[rng.choice(6, 2, False, p)] for _ in range(4000)])
    a, = lifted_sets([gate], 6, [0], 24)
    share, big = (np.sort(np.bincount(v.ravel(), minlength=n))[::-1]/v.size for v, n in ((gate, 6), (a, 24)))
    np.testing.assert_allclose(big.reshape(6, 4).sum(1), share, atol=.03)


@pytest.mark.parametrize('layers, consumers, source, eaten', [(range(40), range(7, 39), range(8), range(2, 8)), (range(1, 24), range(8, 24), range(1, 9), range(3, 9)), ((0, 1), (1,), range(8), range(2, 8))])
def test_consumers_stand_for_consumers(layers, consumers, source, eaten):
    plan = layer_plan(layers, consumers, source, eaten)
    assert list(plan) == list(layers) and all(plan[c] in eaten for c in consumers)
    assert [plan[c] for c in consumers] == sorted(plan[c] for c in consumers)
    assert all(plan[l] not in eaten for l in layers if l < min(consumers))


def test_the_typical_stretch_is_the_nearest():
    near = np.random.default_rng(2).random((2, 3, 40))
    w, first = typical_stretch(near, 8, step=4)
    off = lambda v, s: sum(abs(m[v, s + 1:s + 9].mean()/m[:, 1:].mean() - 1) for m in near)
    assert off(w, first) == pytest.approx(min(off(v, s) for v in range(3) for s in range(0, 32, 4)))
    with pytest.raises(ValueError, match='39'): typical_stretch(near, 40)


def test_sizes_that_do_not_fit_are_refused():
    s = TinyText(*[visits(np.random.default_rng(0), 12, 3, 2, 8, .5)[None]]*3, (0, 1, 2), (1, 2), 8, 'made up')
    with pytest.raises(ValueError, match='multiple of 8'): supplied_routes(s, 4, range(4), (2, 3), 20)
    with pytest.raises(ValueError, match='11'): supplied_routes(s, 12, range(4), (2, 3), 16)
    with pytest.raises(ValueError, match='source_consumers'): layer_plan(range(4), (2, 3), range(3), ())


# both models

@pytest.fixture(scope='module')
def small_8b(tmp_path_factory):
    d = tmp_path_factory.mktemp('s8b')
    synth('edge0-8b', d, lora=False, **SMALL_8B)
    return d


def test_8b_runs_schedules_and_replayed_ones(small_8b):
    assert paper_tier(small_8b) == 'edge0-8b'
    for names, routes in ((SCHEDULES, ''), (REPLAYED, 'tiny-sigmoid')):
        cell = decode_cell(str(small_8b), 8, {n: dict(schedule=n) for n in names}, steps=3, rounds=1, routes=routes)
        assert list(cell['arms']) == [*names, 'exact again'] and len({r['slot_bytes'] for a in cell['arms'].values() for r in a}) == 1
        assert all(r['drops'] == 0 for a in cell['arms'].values() for r in a)
        assert ('recall' in cell['routing']) == bool(routes)


def test_every_turn_in_a_process_of_its_own(small_8b):
    cell = apart_cell(1, checkpoint=str(small_8b), k=8, arms={n: dict(schedule=n) for n in ('exact', 'oracle')}, steps=2)
    assert {n: [r['cold_start'] for r in a] for n, a in cell['arms'].items()} == {n: [True, False] for n in ('exact', 'oracle', 'exact again')}
    assert list(cell['about']) == ['exact', 'oracle'] and len({r['slot_bytes'] for a in cell['arms'].values() for r in a}) == 1


def test_the_command_takes_the_issues_spelling_goes_on_and_writes_a_page(small_8b, tmp_path, capsys):
    out = tmp_path/'paper.json'
    words = ['bench', 'paper', '--checkpoint', str(small_8b), '--limits', 'free', '--ks', '8', '--steps', '3', '--prompt', '40', '--routes', 'tiny-sigmoid', '--out', str(out)]
    assert main([*words, '--plan']) == 0
    assert capsys.readouterr().out.splitlines() == [f'{n}: to do' for n in ('schedules, K = 8, free', 'replayed tiny-sigmoid, K = 8, free', 'fill modes', 'cache sizes', 'prompt, free', 'merge survival, tiny-sigmoid')]
    assert main([*words, '--cells', 'replayed|prompt|schedules']) == 0
    report = json.loads(out.read_text())
    assert set(report['cells']) == {'schedules, K = 8, free', 'replayed tiny-sigmoid, K = 8, free', 'prompt, free'} and not report['failed'] and report['tier'] == 'edge0-8b'
    before = out.read_text()
    assert main([*words, '--cells', 'replayed|prompt|schedules']) == 0 and json.loads(out.read_text())['cells'] == json.loads(before)['cells']
    beside = paper_beside(report)
    assert beside['paper'][beside['quantity'].index('decode')] == '28.0' and beside['here, free'][beside['quantity'].index('prefill, warm')]
    for name in ('schedules, K = 8, free', 'replayed tiny-sigmoid, K = 8, free'): assert any(v.startswith('A/A') for v in arm_table(report['cells'][name])['verdict'])
    assert memory_table(report, 8)['limit'] == ['free']*len(SCHEDULES)
    page = out.with_suffix('.html').read_text()
    assert 'random heads' in page and 'recall of the heads' in page and page == paper_html(report)


@pytest.mark.parametrize('words, match', [(['--checkpoint', 'nowhere'], 'config.json'), (['--limits', 'free,much'], 'limits'), (['--rounds', '2'], 'from 3')])
def test_the_command_refuses(words, match, capsys):
    assert main(['bench', 'paper', *words]) == 2 and match in capsys.readouterr().err


def test_every_limit_of_the_issue_is_planned():
    plan = paper_cells()
    for where in ('free', '16 GiB', '12 GiB', '8 GiB'):
        assert {f'schedules, K = {k}, {where}' for k in (2, 4, 8)} | {f'prompt, {where}', f'replayed tiny-softmax, K = 4, {where}'} <= set(plan)
    assert plan['prompt, free'][1]['prompt'] == 3100 and list(plan['cache sizes'][1]['arms'])[0] == '64'


def test_every_line_of_the_paper_is_known_to_the_page():
    for tier in ('edge0-35b', 'edge0-8b'):
        t = paper_beside(dict(cells={}, tier=tier))
        assert len(t['paper']) == len(paper_speed(tier)) and not any(t['here, free'])


# the pages that read the report

RUN_PAGE = '''
import os, sys, nbformat
page = nbformat.read(sys.argv[1], 4)
os.chdir(os.path.dirname(sys.argv[1]))
got = {'__name__': '__main__'}
for c in page.cells:
    if c.cell_type == 'code': exec(compile(chr(10).join(l for l in c.source.splitlines() if not l.startswith('#|')), sys.argv[1], 'exec'), got)
print(*got.get('rows', ()), sep=chr(10))
'''


def invented():
    "A whole campaign of made-up figures: exact 2 tokens a second, staged 3, the heads 4, warm; half of it cold."
    speed = {'exact': 2, 'hot': 2, 'staged': 3, 'cross-token': 4, 'oracle': 4, 'exact again': 2.02}

    def one(v, cold): return dict(tokens_per_s=v*(.5 if cold else 1), cold_start=cold, step_ms=1000/v, cores=1.5, slot_bytes=7, loads=30., mib=50., wait_ms=1., hit=.2, drops=0, fallbacks=0, rss=4 << 30, rss_anonymous=2 << 30, page_cache=1 << 30, allocator_active=1, allocator_peak=2 << 30, checkpoint=9)

    def cell(arms, cold=True, **kw):
        return dict(arms={n: ([one(v, True)] if cold else []) + [one(v*f, False) for f in (1, 1.01, 1.02)] for n, v in arms.items()}, traced={n: [dict(cold=c, load_ms=1 + c + .01*i) for c in (.1, .9)] for i, n in enumerate(arms) if not n.endswith('again')} if cold else {},
                    about={n: dict(dtype='float32', kernel='auto', read_threads=8, fill='inplace') for n in arms}, residency=1 << 30, slots=384, expert_bytes=2 << 20, disk='real', heads='synth seed 0', **kw)
    three, places = dict(text=.2, stretch=.21, here=.21), ('free', '16 GiB', '12 GiB', '8 GiB')
    lifted = dict(source='tiny-softmax, K = 4', overlap={'1': three, '2': three}, head_overlap=three, recall=three)
    cells = {f'schedules, K = {k}, {p}': cell(speed) for k in (2, 4, 8) for p in places} | {f'replayed tiny-softmax, K = 4, {p}': cell(speed, routing=lifted) for p in places}
    cells |= {'fill modes': cell({'stack': 2, 'patch': 2.5, 'inplace': 3, 'stack again': 2}, False), 'cache sizes': cell({'64': 2, '900': 3, '64 again': 2}, False)}
    cells |= {f'prompt, {p}': {w: dict(tokens_per_s=50.) for w in ('cold', 'warm')} for p in places}
    cells['merge survival, tiny-softmax'] = dict(weights={'attention': dict(refit=.5), 'shared expert': dict(refit=.7)}, logits={'4 bits, group 64': .6})
    return dict(schema=2, command='edge0-lab bench paper --checkpoint invented', checkpoint='invented', tier='edge0-35b', machine=dict(cpu='a cpu', cores=2, system='x', mlx='0', python='3'), cells=cells, failed={'prompt, 4 GiB': 'prefill_cell: ended with -9'})


@pytest.mark.parametrize('report', ['none', 'whole', 'one cell'])
def test_the_pages_render_with_and_without_the_report(report, tmp_path):
    shipped, here = data_path(), tmp_path/'data'
    (here/'bench').mkdir(parents=True)
    for p in shipped.iterdir():
        if p.name != 'bench': (here/p.name).symlink_to(p)
    for p in (shipped/'bench').iterdir():
        if p.name != 'paper.json': (here/'bench'/p.name).symlink_to(p)
    got = invented()
    if report == 'one cell': got.update(cells={n: got['cells'][n] for n in ('schedules, K = 4, 12 GiB',)}, failed={})
    if report != 'none': (here/'bench'/'paper.json').write_text(json.dumps(got))
    said = {}
    for page in ('index.ipynb', 'chapters/paper_tables.ipynb'):
        p = subprocess.run([sys.executable, '-c', RUN_PAGE, str(shipped.parent/'nbs'/page)], capture_output=True, text=True, env=os.environ | dict(EDGE0_LAB_DATA=str(here), IN_TEST='1'), timeout=300)
        assert p.returncode == 0, p.stderr[-3000:]
        said[page] = p.stdout
    chapter = said['chapters/paper_tables.ipynb']
    assert ('not measured yet: edge0-lab bench paper' in chapter) == (report == 'none')
    assert ('35b shape in 12 GiB, K = 4, random routing' in said['index.ipynb']) == (report != 'none')
    assert ('routing of tiny-softmax replayed' in said['index.ipynb']) == ('recall of the heads 21.0%' in chapter) == ('died: prompt, 4 GiB' in chapter) == (report == 'whole')
    if report != 'none': assert 'staged 1.50 times exact warm, 1.50 from a cold start' in said['index.ipynb'] and '1.50 times faster' in chapter and 'A/A' in chapter
