# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
#       format_version: '1.3'
#       jupytext_version: 1.19.6
#   kernelspec:
#     display_name: python3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # probe recovery
#
# > What an adapter becomes, drawn from a campaign's file.
#
# The probes of 14b to 14d look at one run. This one looks at a file that many runs made: `edge0-lab bench merge` puts every way to serve an adapter side by side. It answers: *how large must a change be to survive a merge, and does it?*

# %%
#| default_exp probe_recovery

# %%
#| hide
import edge0_lab

# %%
#| export
import json

import numpy as np

from edge0_lab.columns import columns, with_table
from edge0_lab.settings import COLORS, _plotly, data_path, figure

# %%
#| hide
from fastcore.test import *
from edge0_lab.columns import as_text
from edge0_lab.settings import probe


# %% [markdown]
# ## The table first
#
# One row per point: a kind of layer, a grid, a size of the change in steps, what survives. A curve belongs to random changes; adapters are single points on it, at their own size.

# %%
#| export
def merge_report()->dict:
    "What the shipped campaign found."
    path = data_path('tiny', 'merge.json')
    if not path.exists(): raise FileNotFoundError('data/tiny/merge.json is not there; make it: edge0-lab bench merge --out data/tiny/merge.json')
    return json.loads(path.read_text())

def survival_rows(
    report:dict,       # from `bench_merge`
    tier:str='',       # '' is the first
    grid:str='refit',  # 'refit' or 'base'
)->dict:               # kind, what, steps, survival
    "Survival in the weights: random changes by size, and adapters at their own."
    tier = tier or next(iter(report['tiers']))
    if tier not in report['tiers']: raise ValueError(f'tier: {tier!r}; allowed: {", ".join(report["tiers"])}')
    if grid not in ('refit', 'base'): raise ValueError(f"grid: {grid!r}; allowed: 'refit', 'base'")
    out = []
    for kind, w in report['tiers'][tier]['weights'].items():
        c = w['curve']
        out += [dict(kind=kind, what='random', steps=s, survival=v) for s, v in zip(c['sizes'], c[grid])]
        out += [dict(kind=kind, what=name, steps=a['steps'], survival=a[grid]) for name, a in w['adapters'].items() if a]
    return columns(out)

def needed(
    steps, survival, # (n,) a curve
    share:float=0.5, # that must survive
)->float:            # steps; NaN if it never does
    "The size from which on that share survives."
    steps, v = np.asarray(steps, float), np.asarray(survival, float)
    i = next((i for i in range(1, len(v)) if v[i] >= share > v[i - 1]), None)
    if i is None: return float(steps[0]) if len(v) and v[0] >= share else float('nan')
    t = (share - v[i - 1])/(v[i] - v[i - 1])
    return float(np.exp(np.log(steps[i - 1]) + t*(np.log(steps[i]) - np.log(steps[i - 1]))))


# %%
test_close(needed([0.1, 1.0], [0.0, 1.0]), 0.1**0.5, eps=1e-6)
assert np.isnan(needed([0.1, 1.0], [-1.0, 0.2])); test_eq(needed([0.1, 1], [0.7, 0.9]), 0.1)
report = merge_report()
rows = survival_rows(report)
assert rows['survival'].min() < 0 and rows['survival'].max() <= 1
with expect_fail(ValueError, 'allowed: tiny-softmax'): survival_rows(report, 'edge0-35b')
with expect_fail(ValueError, "'refit', 'base'"): survival_rows(report, grid='none')
print(as_text({c: v[::6] for c, v in rows.items()}))

# %% [markdown]
# ## The picture
#
# What to look for: where each curve crosses 0 (smaller changes are better left out than merged) and one half; the paper's two figures for weights, as lines, say how small its own changes were; and our adapters' points, where there are any. The axis is cut at `low`, and points below it are drawn on the cut.

# %%
#| export
_SHADE = {'attention': COLORS['router'], 'linear attention': COLORS['ours'], 'shared expert': COLORS['head']}

@with_table(survival_rows)
def merge_survival(
    report:dict,       # from `bench_merge`
    tier:str='',       # '' is the first
    grid:str='refit',  # 'refit' or 'base'
    low:float=-2.0,    # where the axis is cut
):                     # plotly Figure
    "What survives a merge, by the size of the change."
    if not -100 <= low < 0: raise ValueError(f'low: {low!r}; allowed: -100 to below 0')
    go, t = _plotly(), survival_rows(report, tier, grid)
    cut, traces, half = lambda v: np.maximum(v, low).round(4), [], []
    for kind in dict.fromkeys(t['kind'].tolist()):
        curve, own = ((t['kind'] == kind) & (t['what'] == 'random') if random else (t['kind'] == kind) & (t['what'] != 'random') for random in (True, False))
        half.append(needed(t['steps'][curve], t['survival'][curve]))
        traces.append(go.Scatter(x=t['steps'][curve], y=cut(t['survival'][curve]), mode='lines+markers', marker_size=4, line_color=_SHADE.get(kind), name=kind))
        if own.any(): traces.append(go.Scatter(x=t['steps'][own], y=cut(t['survival'][own]), mode='markers', marker=dict(symbol='star', size=13, color=_SHADE.get(kind), line=dict(color='#222', width=1)), text=t['what'][own], hovertemplate='%{text}: %{x:.3f} steps, survival %{y:.2f}<extra></extra>', name=f'{kind}: ours', showlegend=False))
    where = f'{np.nanmin(half):.2g} to {np.nanmax(half):.2g}' if np.isfinite(half).any() else 'more than these'
    fig = figure(*traces, title=f'Half survives from {where} steps on ({tier or next(iter(report["tiers"]))}, {grid} grid)', x='RMS of the change (quantisation steps)', y='survival', width=700, height=340)
    for name in ('attention', 'dense'): fig.add_hline(y=report['paper'][name], line=dict(dash='dash', width=1, color=COLORS['paper']), annotation_text=f"paper, {name}: {report['paper'][name]:.0%}", annotation_position='top left', annotation_font_size=10)
    fig.add_hline(y=0, line=dict(color='#222', width=1))
    return fig.update_xaxes(type='log').update_yaxes(range=[low - 0.1, 1.1])


# %%
probe(lambda tier, grid: merge_survival(report, tier, grid), tier=list(report['tiers']), grid=['refit', 'base'])

# %% [markdown]
# **On the base's own grid nothing is ever worse than leaving the adapter out, and nothing small survives either.**

# %%
merge_survival(report, list(report['tiers'])[-1], 'base', -0.5).show()

# %%
for fig in (merge_survival(report, t, g) for t in report['tiers'] for g in ('refit', 'base')): assert len(fig.to_json()) < 20_000
with expect_fail(ValueError, 'below 0'): merge_survival(report, low=0)
test_eq(merge_survival.table(report)['kind'].tolist(), rows['kind'].tolist())

# %% [markdown]
# ## What to keep
#
# - A picture of a campaign takes the campaign's file, not a run; its table is `merge_survival.table(report)`.
# - `needed` reads a threshold off a curve.
#
# Next: the chapter `why_we_do_not_merge`.
