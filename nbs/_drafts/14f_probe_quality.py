# %% [markdown]
# # probe_quality
#
# > The recovery table as a picture that has its numbers with it.
#
# The dashboard and the pages want one figure for what the adapters brought back, cell by cell, beside the paper's. The question here: *can it be read at a glance and copied as a table?* `recovery_table` draws, `recovery_table.table` is its columns.

# %%
#| default_exp probe_quality

# %%
#| hide
import edge0_lab

# %%
#| export
import csv

import numpy as np

from edge0_lab.columns import columns, with_table
from edge0_lab.quality import recovery_rows
from edge0_lab.settings import COLORS, _plotly, data_path, figure

# %%
#| hide
from fastcore.test import *

# %%
#| export
def recovery_columns(
    reports=None, # from `quality`; default the shipped ones
)->dict:          # {column: (n,) array}; NaN where an arm has nothing to recover
    "One row per cell and arm."
    rows = recovery_rows(reports)
    names = [n for n in dict.fromkeys(n for r in rows for n in r) if n not in ('counts', 'reaches')]
    return columns({n: r.get(n, np.nan) for n in names} | dict(counts=str(r.get('counts', '')), reaches=str(r.get('reaches', ''))) for r in rows)

def paper_quality()->list: # dicts tier, task, served, fp16
    "The paper's second table."
    with open(data_path('paper', 'quality.csv'), newline='') as f: return list(csv.DictReader(f))

_ADAPTED = (('sft', '+ SFT', 'head'), ('opd', '+ on-policy', 'ours'))

@with_table(recovery_columns)
def recovery_table(
    reports=None, # as in `recovery_columns`
):                # plotly Figure
    "Share of the lost loss that came back, with intervals, cell by cell; the dotted line is the mark."
    t, go = recovery_columns(reports), _plotly()
    if not len(t): raise ValueError('reports: no cell has been measured; allowed: after edge0-lab quality')
    bars = []
    for arm, name, color in _ADAPTED:
        at = np.flatnonzero(t['arm'] == arm)
        share, low, high = (t[n][at]*100 for n in ('recovered', 'recovered_low', 'recovered_high'))
        bars.append(go.Bar(x=[f"{str(t['tier'][i]).removeprefix('tiny-')}, k = {t['k'][i]}" + ('' if t['counts'][i] == 'True' else ' (small loss)') for i in at], y=share, name=name, marker_color=COLORS[color],
                           error_y=dict(type='data', symmetric=False, array=high - share, arrayminus=share - low, thickness=1.2)))
    last = np.flatnonzero(t['arm'] == _ADAPTED[-1][0])
    title = f"{sum(t['reaches'][i] == 'True' for i in last)} of {len(last)} cells recover 60 % beyond their interval"
    return figure(*bars, title=title, x='cell', y='% of the lost loss recovered', width=720, height=360).add_hline(60, line_dash='dot', line_color=COLORS['muted'])

# %%
recovery_table().show()

# %%
t = recovery_table.table()
test_eq(len(set(map(len, t.values()))), 1)
keep = t['arm'] == 'opd'
for tier, k, v, lo, hi, c, r in zip(*(t[n][keep] for n in ('tier', 'k', 'recovered', 'recovered_low', 'recovered_high', 'counts', 'reaches'))): print(f'{tier:13} k = {k}: {v:.0%} ({lo:.0%} to {hi:.0%}), counts {c}, reaches {r}')
with expect_fail(ValueError, 'no cell'): recovery_table([])

# %% [markdown]
# Beside it the paper's: what is kept of the fp16 result on each benchmark.

# %%
for p in paper_quality(): print(f"{p['tier']:10} {p['task']:10} served {float(p['served']):5.1f} of {float(p['fp16']):5.1f}: {float(p['served'])/float(p['fp16']):.0%} kept")

# %% [markdown]
# ## What to keep
#
# - One figure, one table; a cell whose loss is small against its own noise says so.
