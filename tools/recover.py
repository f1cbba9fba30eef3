"""Adapters and their quality for every cell of the tiny tiers: rows, phase 2, phase 3, measurement, table, cards.

    python tools/recover.py                        all cells, two processes at a time; goes on where it was stopped
    python tools/recover.py --cells tiny-softmax:4 some cells
    python tools/recover.py --compare              phases compared on one cell: data/tiny-softmax/phases_k4.json
    python tools/recover.py --heads-first          the experiment of the chapter heads_first
    python tools/recover.py --table --cards        only recovery.csv and CARDS.md, from what is there

A step is skipped if its log names the same base, teacher, heads and settings. Options: --rows N --opd-rows N --lr X --jobs N.
"""
import argparse, json, os, subprocess, sys, tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path

import edge0_lab  # noqa: F401  loads the BLAS before MLX
from edge0_lab.adapters import read_lora
from edge0_lab.cards import write_cards
from edge0_lab.opd import OpdRun, train_opd
from edge0_lab.order import heads_first
from edge0_lab.quality import quality, write_recovery
from edge0_lab.rowfiles import RowPlan, ship_rows, teacher_rows, weights_mark
from edge0_lab.settings import tier
from edge0_lab.sft import AdaptRun, marks_of, train_sft
from edge0_lab.tiny_corpus import TASKS, task_items
from edge0_lab.writer import write_json

CELLS = (('tiny-softmax', 4), ('tiny-sigmoid', 8), ('tiny-softmax', 2), ('tiny-sigmoid', 4), ('tiny-softmax', 8))
SHIPPED_ROWS = 768


def questions(n=38): return {kind: task_items(kind, n, seed=5000 + i) for i, kind in enumerate(TASKS)}   # the corpus uses seeds to 1499


def is_made(log, run, marks):
    "Is this log of the same run on the same files?"
    if not log.exists(): return False
    said = json.loads(log.read_text())
    return said.get('marks') == marks and (run is None or said.get('run') == json.loads(json.dumps(asdict(run))))


def one_cell(name, k, sft, opd):
    "Phase 2, phase 3, measurement of a cell; what is there is left."
    folder = tier(name).checkpoint
    marks = marks_of(folder, k)
    if not is_made(folder/f'lora_k{k}_sft.json', sft, marks): print('sft', name, k, train_sft(name, k, sft)['hours'], 'h', flush=True)
    fresh = is_made(folder/f'lora_k{k}.json', opd, marks) and json.loads((folder/f'lora_k{k}.json').read_text())['start'] == weights_mark(folder/f'lora_k{k}_sft.safetensors')
    if not fresh: print('opd', name, k, train_opd(name, k, opd)['hours'], 'h', flush=True)
    measured = folder/f'quality_k{k}.json'
    newest = max((folder/f).stat().st_mtime for f in (f'lora_k{k}.safetensors', f'lora_k{k}_sft.safetensors'))
    if not is_made(measured, None, marks) or measured.stat().st_mtime < newest: print('quality', name, k, quality(name, k, questions())['minutes'], 'min', flush=True)


def compare(name, k, sft, opd):
    "What phase 3 is worth against other ways to spend its rows: forward KL, more of phase 2, phase 3 alone."
    folder, arms = tier(name).checkpoint, {}
    start = read_lora(folder/f'lora_k{k}_sft.safetensors')
    with tempfile.TemporaryDirectory() as tmp:
        def made(arm, f, *args, **kw):
            f(name, k, *args, out=Path(tmp)/f'{arm}.safetensors', keep=False, **kw)
            arms[arm] = read_lora(Path(tmp)/f'{arm}.safetensors')
        arms['sft'] = start
        made('reverse KL', train_opd, opd, start=start)
        made('forward KL', train_opd, replace(opd, direction='forward'), start=start)
        made('more sft', train_sft, replace(sft, rows=opd.rows*opd.passes, batch=opd.batch, lr=opd.lr, warmup=opd.warmup, seed=sft.seed + 1), plan=RowPlan(), start=start)
        made('opd alone', train_opd, replace(opd, lr=sft.lr, rows=4*opd.rows), start='nothing')
    report = quality(name, k, {}, arms, out='')
    write_json(folder/f'phases_k{k}.json', report | dict(command='python tools/recover.py --compare', opd=asdict(opd), sft=asdict(sft)), indent=None)


def run_cells(cells, jobs, words):
    "Every cell in a process of its own, one core each; the rows of a tier are made first."
    threads = str(max(1, (os.cpu_count() or 1)//jobs))
    env = os.environ | dict(OMP_NUM_THREADS=threads, MKL_NUM_THREADS=threads, OPENBLAS_NUM_THREADS=threads, EDGE0_LAB_THREADS=threads)
    def go(*what):
        p = subprocess.run([sys.executable, __file__, *what, *words], env=env)
        if p.returncode: raise RuntimeError(f'{" ".join(what)}: ended with {p.returncode}')
    with ThreadPoolExecutor(jobs) as pool:
        list(pool.map(lambda name: go('--rows-of', name), dict.fromkeys(n for n, _ in cells)))
        done = [pool.submit(go, '--one', f'{n}:{k}') for n, k in cells]
    for d in done: d.result()


def main(argv=None):
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument('--cells', default=''); p.add_argument('--one', default=''); p.add_argument('--rows-of', default='')
    p.add_argument('--jobs', type=int, default=2); p.add_argument('--rows', type=int, default=AdaptRun.rows); p.add_argument('--opd-rows', type=int, default=OpdRun.rows); p.add_argument('--lr', type=float, default=AdaptRun.lr)
    for flag in ('compare', 'heads-first', 'table', 'cards'): p.add_argument(f'--{flag}', action='store_true')
    a = p.parse_args(argv)
    sft, opd = AdaptRun(rows=a.rows, lr=a.lr), OpdRun(rows=a.opd_rows)
    cell = lambda text: (text.split(':')[0], int(text.split(':')[1]))
    if a.rows_of:
        teacher_rows(a.rows_of, a.rows)
        ship_rows(a.rows_of, min(SHIPPED_ROWS, a.rows))
    elif a.one: one_cell(*cell(a.one), sft, opd)
    elif a.compare: compare('tiny-softmax', 4, sft, opd)
    elif a.heads_first: heads_first()
    else:
        if not (a.table or a.cards): run_cells([cell(c) for c in a.cells.split(',')] if a.cells else CELLS, a.jobs, ['--rows', str(a.rows), '--opd-rows', str(a.opd_rows), '--lr', str(a.lr)])
        if a.table or not a.cards: print(write_recovery().name)
        if a.cards or not a.table: print(*(write_cards(n).name for n in ('tiny-softmax', 'tiny-sigmoid')))


if __name__ == '__main__': main()
