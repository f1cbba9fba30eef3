"A sweep on a Dask cluster whose worker is killed on the way: nothing lost, nothing twice; and the local one, through the command."
import json, os, signal, sys, threading, time
from collections import Counter

import pytest

from edge0_lab.cli import main
from edge0_lab.bench.sweep import cell_name, grid_cells, locally, read_sweep, run_sweep


def test_a_killed_worker_loses_nothing_and_doubles_nothing(tmp_path):
    distributed = pytest.importorskip('distributed')
    import dask
    log, out, grid = tmp_path/'log', tmp_path/'out', json.dumps(dict(k=[2, 4], cache_slots=list(range(8, 20))))
    log.mkdir()

    def cell(c, log=str(log), name=cell_name):   # by value: the worker has no tests folder
        import json, os, time, uuid
        with open(f'{log}/{uuid.uuid4()}', 'w') as f: json.dump(dict(cell=c, pid=os.getpid()), f)
        time.sleep(0.25)
        return dict(cell=c, tokens_per_s=c['cache_slots'], pid=os.getpid())

    def started(): return [json.loads(p.read_text() or 'null') for p in log.iterdir()]

    with dask.config.set({'distributed.scheduler.allowed-failures': 5}):
        with distributed.LocalCluster(n_workers=2, threads_per_worker=1, processes=True, dashboard_address=None, silence_logs=50) as cluster:
            killed = []

            def kill():
                while len(started()) < 5: time.sleep(0.02)
                pid = next(s['pid'] for s in started() if s)
                os.kill(pid, signal.SIGKILL)
                killed.append(pid)
            threading.Thread(target=kill, daemon=True).start()
            said = run_sweep(grid, out, scheduler=cluster.scheduler_address, run=cell, progress=False)
    cells = grid_cells(grid)
    assert killed, 'no worker was killed'
    assert said == dict(cells=24, done=24, before=0, died=[])
    assert sorted(p.stem for p in out.glob('*.json')) == sorted(map(cell_name, cells)) and not list(out.glob('*.part'))
    ran = Counter(cell_name(s['cell']) for s in started() if s)
    again = [n for n, times in ran.items() if times > 1]
    assert len(again) <= 2, 'more than what the killed worker had in hand ran twice'
    assert set(ran) == set(map(cell_name, cells)) and max(ran.values()) <= 2
    assert sorted(read_sweep(out)['tokens_per_s']) == sorted(c['cache_slots'] for c in cells)
    stamps = {p.name: p.stat().st_mtime_ns for p in out.iterdir()}
    assert run_sweep(grid, out, run=cell, progress=False)['done'] == 0
    assert stamps == {p.name: p.stat().st_mtime_ns for p in out.iterdir()}


def test_the_command_runs_a_grid_in_processes(tmp_path):
    grid = tmp_path/'grid.json'
    grid.write_text(json.dumps(dict(k=[2], cache_slots=[16], tokens=[4], decode=['staged', 'resident'])))
    assert main(['sweep', str(grid), '--out', str(tmp_path/'out'), '--workers', '2']) == 0
    t = read_sweep(tmp_path/'out')
    assert len(t['k']) == 2 and sum('cache_slots' in r for r in t['refused'] if r) == 1 and sorted(t['drops'], key=str) == [0, None]


def test_without_dask_it_says_so(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, 'dask.distributed', None)
    with pytest.raises(ValueError, match=r'edge0-lab\[dask\]'): run_sweep('{"k": [2]}', tmp_path, scheduler='tcp://127.0.0.1:1', progress=False)


def test_what_has_not_begun_does_not_begin_after_ctrl_c():
    "The generator is closed, as Ctrl-C closes it."
    began = []
    def run(c):
        began.append(c)
        time.sleep(0.05)
        return {}
    cells = locally(range(50), run)
    next(cells)
    cells.close()
    assert len(began) <= 3


def test_a_damaged_record_is_measured_again_and_cells_are_counted_once(tmp_path):
    run = lambda c: dict(cell=c, tokens_per_s=1)
    assert run_sweep('{"k": [2, 2, 4]}', tmp_path, run=run, progress=False) == dict(cells=2, done=2, before=0, died=[])
    bad = next(tmp_path.glob('*.json'))
    bad.write_text(bad.read_text()[:9])
    assert run_sweep('{"k": [2, 4]}', tmp_path, run=run, progress=False) == dict(cells=2, done=1, before=1, died=[])
    assert read_sweep(tmp_path)['tokens_per_s'] == [1, 1]


def test_no_checkpoint_leaves_no_record(tmp_path):
    said = run_sweep('{"tier": ["nowhere"], "k": [2]}', tmp_path/'out', progress=False)
    assert said['done'] == 0 and 'nowhere' in said['died'][0] and not list((tmp_path/'out').glob('*.json'))
    with pytest.raises(ValueError, match='workers: 0'): run_sweep('{"k": [2]}', tmp_path/'out', workers=0, progress=False)


@pytest.mark.parametrize('grid, match', [('{"k": 2}', 'a list'), ('{"k": [2', 'not JSON'), ('[1]', 'an object of lists'), ('{"moon": [1]}', 'moon'), ('{"k": []}', 'a list')])
def test_wrong_grids_are_refused(grid, match, tmp_path):
    with pytest.raises(ValueError, match=match): run_sweep(grid, tmp_path, progress=False)
