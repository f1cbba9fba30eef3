"Every control of the dashboard does what it says: looked at in counters and in the trace, not in labels."
import re, shutil, threading
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest

from edge0_lab.bench.sweep import cell_name, run_sweep, sweep_cell
from edge0_lab.controls import controls, default_values, run_of, values_of
from edge0_lab.dashboard import Dashboard
from edge0_lab.decode import Lab
from edge0_lab.lora import Adapter, new_adapter, write_lora
from edge0_lab.panel import FigureTabs
from edge0_lab.probes import PROBES
from edge0_lab.runconfig import DECODE_PATHS, LORAS, PREFILL_PATHS, PREROUTERS
from edge0_lab.runs import compare_runs, open_run, save_run

N = 10


@pytest.fixture(scope='module')
def lab():
    with Lab.open('tiny-softmax') as lab: yield lab


@pytest.fixture
def dash(lab): return Dashboard(lab, max_tokens=N)


@pytest.fixture(scope='module')
def plain(lab): return Dashboard(lab, max_tokens=N).run_now()


def decode(run): return run.counters['decode']


def test_every_control_is_changed_here():
    said = Path(__file__).read_text()
    assert [n for n in controls() if not re.search(rf"\b{n}=|set\(\*\*\{{'{n}'", said)] == []


def test_model(dash, plain):
    "Another tier's name in the field: another model's layers in the trace; the lab that was given stays open."
    other = dash.run_now(model='tiny-sigmoid')
    assert other.trace.layers != plain.trace.layers and other.about['model'] == 'tiny-sigmoid'
    assert dash.run_now(model='tiny-softmax').tokens == plain.tokens
    assert dash.lab is dash.given     # not a second copy


def test_model_by_directory(lab):
    run = Dashboard(str(lab.loaded.path), max_tokens=2).run_now()
    assert run.trace.layers == lab.moe_layers


def test_prompt(dash, lab): assert dash.run_now(prompt='def f(x):', max_tokens=2).trace.prompt.tolist() == lab.encode('def f(x):')


@pytest.mark.parametrize('n', [1, 7])
def test_tokens(dash, n):
    run = dash.run_now(max_tokens=n)
    assert run.trace.T == len(run.tokens) == n and dash.progress.value == dash.progress.max == n


@pytest.mark.parametrize('path', DECODE_PATHS)
def test_decode_path(dash, lab, plain, path):
    run = dash.run_now(decode=path)
    served = set(np.unique(run.trace.path[:, list(run.trace.layers)])) if run.trace.layers else set()
    assert run.tokens == plain.tokens and decode(run)['drops'] == 0
    if path == 'resident': assert decode(run)['loads'] == 0
    else: assert served == {path}
    if path == 'whole-layer': assert decode(run)['loads'] == N*len(run.trace.layers)*lab.E


@pytest.mark.parametrize('path', [p for p in PREFILL_PATHS if p != 'resident'])
def test_prefill_path(dash, plain, path):
    run = dash.run_now(prefill=path)
    assert set(run.trace.prefill['path']) == {path} and run.tokens == plain.tokens


@pytest.mark.parametrize('k', [1, 4])
def test_k(dash, k):
    run = dash.run_now(k=k)
    assert run.trace.ids.shape[-1] == k and decode(run)['requests'] == N*len(run.trace.layers)*k


@pytest.mark.parametrize('who', controls()['prerouter'].choices)
def test_prerouter(dash, lab, who):
    run = dash.run_now(prerouter=who)
    predicted = (run.trace.predicted_ids >= 0).any(-1)
    if who == 'off': assert not predicted.any() and decode(run)['covered'] == 0
    else:
        assert set(np.flatnonzero(predicted.any(0))) == set(lab.tier.consumers)
        assert predicted[1:, list(lab.tier.consumers)].all() and decode(run)['fallbacks'] == 0


def test_prerouter_menu(): assert [{'off': False, 'on': True}.get(w, w) for w in controls()['prerouter'].choices] == list(PREROUTERS)


def test_lora(lab, tmp_path):
    "An adapter in the checkpoint's folder: beside the weights or merged into them it moves the last layer's routing; off again, nothing of it stays."
    for p in lab.loaded.path.iterdir():
        if p.is_file(): shutil.copyfile(p, tmp_path/p.name)
    for p in tmp_path.glob('lora_*'): p.unlink()
    rng, new = np.random.default_rng(0), new_adapter(lab.loaded.model, r=4, alpha=8, seed=1)
    write_lora(tmp_path/f'lora_k{lab.k}.safetensors', Adapter({path: (A, rng.normal(0, 0.05, B.shape).astype(np.float32)) for path, (A, B) in new.parts.items()}, r=4, alpha=8))
    dash = Dashboard(str(tmp_path), max_tokens=N)
    first, *worn, last = [dash.run_now(lora=w).trace for w in (*LORAS, 'off')]
    assert len(worn) == len(LORAS) - 1 >= 2
    weights = [t.weights[0, t.layers[-1]] for t in (first, *worn)]
    for a, b in combinations(weights, 2): assert not np.array_equal(a, b)
    assert (last.weights == first.weights).all() and (last.chosen == first.chosen).all()
    dash.close()


def test_cache(dash):
    loads = [decode(dash.run_now(decode='exact', cache_slots=c))['loads'] for c in ('8', '64', '512')]
    assert loads[0] > loads[1] > loads[2]
    assert decode(dash.run_now(cache_slots='2 MiB'))['requests'] == decode(dash.run)['hits'] + decode(dash.run)['covered'] + decode(dash.run)['misses']


def test_stage_slots(dash):
    few = dash.run_now(prerouter='previous', cache_slots='0', stage_slots='16')
    assert few.about['slots'][0]['total'] == 16
    assert decode(few)['fallbacks'] > 0 == decode(dash.run_now(stage_slots='auto'))['fallbacks']


def test_hot_slots(dash):
    few, many = (dash.run_now(decode='hot', cache_slots='16', hot_slots=h) for h in ('2', '24'))
    assert few.about['slots'][0]['hot'] == 2*len(few.trace.layers) and decode(many)['hits'] > decode(few)['hits']


def test_eviction(dash):
    lru, lfu = (dash.run_now(decode='exact', max_tokens=40, cache_slots='48', policy=p) for p in ('lru', 'lfu'))
    assert lru.tokens == lfu.tokens and decode(lru)['loads'] != decode(lfu)['loads']


@pytest.mark.parametrize('fill', controls()['fill'].choices)
def test_fill_mode(dash, plain, monkeypatch, fill):
    from edge0_lab.arena import Arena
    used, select = [], Arena.select
    monkeypatch.setattr(Arena, 'select', lambda self, *a, **kw: (used.append(self.fill), select(self, *a, **kw))[1])
    run = dash.run_now(fill=fill)
    assert run.tokens == plain.tokens and set(used) <= {fill}
    stacked = 'stack' in used
    assert stacked == (fill == 'stack') and decode(run)['loads'] == decode(plain)['loads']


@pytest.mark.parametrize('who', ('worker', 'main'))
def test_fill_thread(dash, lab, monkeypatch, who):
    names, read = [], lab.store.read_counted
    monkeypatch.setattr(lab.store, 'read_counted', lambda *a: (names.append(threading.current_thread().name), read(*a))[1])
    dash.run_now(decode='exact', prefill='exact', fill_thread=who)
    workers = {n.startswith('edge0-fill') for n in names}
    assert names and workers == {who == 'worker'}


def test_held(dash):
    one, two = (dash.run_now(hold=h).about['slots'][0] for h in ('single', 'double'))
    assert two['stage'] == 2*one['stage'] and two['bytes'] > one['bytes']


def test_slow_disk(dash):
    run = dash.run_now(decode='exact', prefill='exact', cache_slots='8', max_tokens=4, throttle='8 ms, 1000 MB/s')
    assert run.about['disk'] == 'simulated'
    assert sum(run.timing['step_s']) >= 4*len(run.trace.layers)*0.008     # every layer of every step waits for at least one read


def test_temperature_and_seed(dash, plain):
    a, b, c = (dash.run_now(temperature='1.5', seed=s).tokens for s in ('1', '2', '1'))
    assert a == c and a != b and a != plain.tokens
    assert dash.run_now(temperature='0', seed='7').tokens == plain.tokens


@pytest.mark.parametrize('name, text', [('k', '99'), ('k', '0'), ('k', 'x'), ('max_tokens', ''), ('cache_slots', '-1'), ('cache_slots', '3 apples'), ('stage_slots', 'many'), ('hot_slots', '0'), ('throttle', '1 ms'),
                                        ('throttle', 'x ms, 3 MB/s'), ('temperature', '-1'), ('temperature', 'nan'), ('seed', '-1'), ('prompt', ''), ('model', 'nothing-here'), ('model', 'edge0-35b')])
def test_a_bad_value_is_one_sentence_in_the_panel(dash, plain, monkeypatch, tmp_path, name, text):
    monkeypatch.setenv('EDGE0_35B', str(tmp_path/'none'))
    dash.show(plain)
    dash.set(**{name: text})
    dash.buttons['run'].click()
    said = dash.said.value
    word = dict(model='tier edge0-35b' if text == 'edge0-35b' else 'name').get(name, name)
    assert f'{word}:' in said and '\n' not in said and 'Traceback' not in said and said.count('<span') == 1
    assert dash.run is plain and not dash.buttons['run'].disabled and dash.buttons['stop'].disabled
    dash.set(**{name: default_values('tiny-softmax')[name] or '', 'max_tokens': '2'})
    dash.buttons['run'].click()
    assert dash.error is None and dash.said.value == '' and len(dash.run.tokens) == 2


def test_choices_that_exclude_each_other(dash):
    dash.set(decode='resident', prerouter='on')
    dash.buttons['run'].click()
    assert 'prerouter' in dash.said.value


def test_stop_leaves_a_run_and_a_lab_that_works(dash, plain):
    for _ in dash._work():
        if dash.progress.value == 3: dash.buttons['stop'].click()
    assert dash.run.finish == 'closed' and dash.run.tokens == plain.tokens[:3] and dash.said.value == 'stopped'
    assert dash.run_now().tokens == plain.tokens


def test_run_twice_at_once_is_one_run(dash):
    work = dash._work()
    next(work)
    dash.start()
    assert dash.run is None and dash.busy
    for _ in work: pass
    assert dash.run is not None


def test_inside_a_loop_stop_is_heard_between_tokens(dash):
    import asyncio
    async def press():
        dash.set(max_tokens=200)
        dash.start()
        while dash.progress.value < 4: await asyncio.sleep(0.001)
        dash.buttons['stop'].click()
        await dash.task
    asyncio.run(press())
    assert dash.run.finish == 'closed' and 4 <= len(dash.run.tokens) < 200


def test_click_pin_compare_save_open(dash, tmp_path):
    run = dash.run_now(decode='exact')
    dash.strip.buttons.index = 6
    rows = re.findall(r'<tr>(<td>.*?)</tr>', dash.detail.value)
    assert len(rows) == len(run.trace.layers)
    for l, row in zip(run.trace.layers, rows):
        cells = re.findall(r'<td>(.*?)</td>', row)
        assert cells[0] == str(l) and cells[3] == ' '.join(map(str, run.trace.ids[6, l].tolist())) and cells[6] == str(run.trace.loads[6, l])
    assert dash.figures.front() == 'expert_map' and dash.figures.drawn['expert_map'] == 1
    dash.pin.value = True
    assert dash.compared.value == ''
    other = dash.run_now(cache_slots='8')
    t = compare_runs(run, other)
    at = dict(zip(t['what'], zip(t['pinned'], t['this'])))
    assert at['decode loads'] == (f"{decode(run)['loads']:,}", f"{decode(other)['loads']:,}")
    kinds = [w.split()[0].rstrip(':,') for w in t['what']]
    assert kinds == sorted(kinds, key=['set', 'decode', 'prefill', 'tokens', 'experts', 'memory', 'time'].index)      # counters before anything, time last
    for a, b in at.values(): assert a in dash.compared.value and b in dash.compared.value
    dash.folder.value = str(tmp_path/'kept')
    dash.buttons['save'].click()
    fresh = Dashboard('tiny-sigmoid')
    fresh.folder.value = str(tmp_path/'kept')
    fresh.buttons['open'].click()
    assert fresh.error is None and fresh.values() == other.values and fresh.run.report == other.report and fresh.figures.run is fresh.run
    assert fresh.run.counters == other.counters and fresh.run.versions == other.versions and fresh.run.about['machine'] == other.about['machine']
    for name in ('ids', 'native_ids', 'weights', 'loads', 'slots', 'waits'): np.testing.assert_array_equal(getattr(fresh.run.trace, name), getattr(other.trace, name))
    assert fresh.run_now().tokens == other.tokens                     # and it runs again from there
    dash.pin.value = False
    assert dash.compared.value == '' and dash.pinned is None


def test_open_a_sweep(dash, plain, tmp_path):
    "A finished sweep by its folder: each cell, put into the controls and run, counts what its record has; a refused one says why."
    run_sweep(dict(cache_slots=[8, 64], decode=['exact', 'resident'], tokens=[6]), tmp_path/'grid', run=sweep_cell, progress=False)
    dash.show(plain)
    dash.folder.value = str(tmp_path/'grid')
    dash.buttons['open'].click()
    records = dash.sweep.records
    assert dash.error is None and len(records) == 4 and dash.sweep.widget.layout.display == '' and dash.run is plain
    for i, r in enumerate(records):
        dash.sweep.cell.value = i
        if 'refused' in r:
            assert 'cache_slots' in dash.said.value and r['cell']['decode'] == 'resident'
            continue
        run = dash.run_now()
        assert run.tokens == r['tokens'] and {n: decode(run)[n] for n in ('loads', 'hits', 'drops', 'requests')} == {n: r['counters'][n] for n in ('loads', 'hits', 'drops', 'requests')}
    assert sum('refused' in r for r in records) == 2
    (tmp_path/'grid'/f"{cell_name(dict(k=1))}.json").write_text('{"cell"')
    dash.buttons['open'].click()
    assert cell_name(dict(k=1)) in dash.said.value and dash.sweep.records is records
    dash.folder.value = str(save_run(plain, str(tmp_path/'kept')))
    dash.buttons['open'].click()
    assert dash.error is None and dash.sweep.widget.layout.display == 'none' and dash.run.tokens == plain.tokens


def test_what_a_cell_has_beyond_the_controls_is_said(dash):
    dash.at_cell(dict(cell=dict(k=2, kernel='ops', pages='cold')))
    assert dash.values()['k'] == '2' and 'kernel, pages' in dash.said.value


def test_buttons_without_a_run(lab):
    dash = Dashboard(lab)
    dash.pin.value = True
    assert 'pin' in dash.said.value and not dash.pin.value
    dash.buttons['save'].click()
    assert 'save' in dash.said.value
    dash.folder.value = 'no-such-run'
    dash.buttons['open'].click()
    assert 'no-such-run' in dash.said.value and dash.run is None


def damaged(folder, file):
    data = (folder/file).read_bytes()
    (folder/file).write_bytes(data[:len(data)//2])


@pytest.mark.parametrize('file', ['run.json', 'trace.npz'])
def test_a_damaged_run_is_refused_by_its_file(plain, tmp_path, file):
    folder = save_run(plain, str(tmp_path/'kept'))
    damaged(folder, file)
    with pytest.raises(ValueError, match=file): open_run(str(folder))


def test_an_interrupted_save_leaves_no_run(plain, tmp_path, monkeypatch):
    def boom(path): raise OSError('disk full')
    monkeypatch.setattr(plain.trace, 'save', boom)
    with pytest.raises(OSError): save_run(plain, str(tmp_path/'kept'))
    assert not (tmp_path/'kept').exists()
    monkeypatch.undo()
    assert open_run(str(save_run(plain, str(tmp_path/'kept')))).tokens == plain.tokens


def test_words_and_runs_are_inverses():
    for changes in (dict(), dict(k='3', throttle='1 ms, 2.5 MB/s'), dict(prerouter='on', cache_slots='1.5 GiB'), dict(decode='hot', prefill='hot', hot_slots='4', temperature='0.25')):
        values = default_values('m') | changes | dict(prefill=changes.get('prefill', 'exact'))
        assert values_of(*run_of(values), 'm', values['prompt']) == values


def test_only_what_changed_is_redrawn(plain):
    tabs = FigureTabs()
    tabs.show(plain)
    for name in tabs.names: tabs.tabs.selected_index = tabs.names.index(name)
    assert dict(tabs.drawn) == dict.fromkeys(PROBES, 1)
    for name in tabs.names: tabs.tabs.selected_index = tabs.names.index(name)
    tabs.show(plain)
    assert dict(tabs.drawn) == dict.fromkeys(PROBES, 1)
    tabs.at_step(2)
    again = {n for n, c in tabs.drawn.items() if c > 1}
    assert again <= {'expert_map', 'step_timeline', tabs.front()} and again


def test_bench_redraw_draws_every_tab_in_every_way(tmp_path, capsys):
    import json
    from edge0_lab.redraw import WAYS, bench_redraw
    said = bench_redraw(tokens=4, rounds=3, browser=False, out=str(tmp_path/'redraw.json'))
    assert json.loads((tmp_path/'redraw.json').read_text()) == said and said['rounds'] == 3
    assert sorted((r['way'], r['tab']) for r in said['rows']) == sorted((w, n) for w in WAYS for n in PROBES)
    assert all(r['kernel_ms'] > 0 and r['kib'] > 1 for r in said['rows']) and 'slot_table' in capsys.readouterr().out
    with pytest.raises(ValueError, match='rounds: 2'): bench_redraw(rounds=2)
