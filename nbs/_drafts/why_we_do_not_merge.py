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
# # why we do not merge
#
# > An adapter is 42 MB and costs two thin products a layer. Merging it costs nothing, and throws it away.
#
# Quantising a model to four bits loses something, and routing by prediction loses something more; an adapter of rank 16 is trained to give it back. It could be added to the weights once, and every step would be as fast as before. The paper does not do that and says why: of its adapter 34 % survive in attention projections, 2 % in dense projections, and 18 % at the logits. The question of this chapter: *where does the rest go, and how large would a change have to be to stay?* The answers are a picture of sixteen values, a curve, and a table of distances.

# %%
#| hide
import edge0_lab
import json
import mlx.core as mx, numpy as np
import plotly.graph_objects as go
from fastcore.test import *
from edge0_lab.bench.merge import base_tensors, random_adapter
from edge0_lab.columns import as_text
from edge0_lab.int4 import dequantize
from edge0_lab.lora import detach_lora, merge_lora, merge_of, merged_tensor, steps_of, survival
from edge0_lab.models import load_model
from edge0_lab.probe_recovery import merge_report, merge_survival, needed, survival_rows
from edge0_lab.settings import COLORS, data_path, figure, probe

# %% [markdown]
# ## Sixteen values
#
# Take 24 weights of one group of the tiny tier's first attention layer. In four bits each is one of sixteen values, here the horizontal lines. An adapter moves each weight a little (the arrows' length is typical for a quarter of a step). The sum must go back onto a line, and the nearest line is nearly always the one it came from.

# %%
model = load_model(data_path('tiny-softmax')).model
tensors = base_tensors(model)
path = next(p for p, (_, kind) in sorted(tensors.items()) if kind == 'attention' and p.endswith('q_proj'))
q = tensors[path][0]
delta = random_adapter(model, 0.25).delta(path)
B, M = (np.array(dequantize(t, mx.float32)) for t in (q, merged_tensor(q, delta, grid='base')))
n, row = 24, 0
b, u, m = B[row, :n], B[row, :n] + delta[row, :n], M[row, :n]
lines = np.unique(B[row, :64])
stayed = np.mean(M == B)
fig = figure(go.Scatter(x=np.arange(n), y=b, mode='markers', name='base', marker=dict(color=COLORS['control'], size=9)),
             go.Scatter(x=np.arange(n), y=u, mode='markers', name='base + change', marker=dict(color=COLORS['ours'], size=6)),
             go.Scatter(x=np.arange(n), y=m, mode='markers', name='merged', marker=dict(color=COLORS['theirs'], size=13, symbol='circle-open', line_width=2)),
             title=f'A change of a quarter of a step leaves {stayed:.0%} of the weights where they were', x='weight', y='value', height=340, width=700)
for v in lines: fig.add_hline(y=float(v), line=dict(color=COLORS['muted'], width=1))
fig.show()

# %% [markdown]
# What a rounded weight keeps is all or nothing: none of its change, or a whole step. On average that is right; in sum it is noise of the size of a step, in 128 directions instead of the adapter's sixteen.

# %%
singular = lambda a: np.linalg.svd(a, compute_uv=False)
kept = singular(M - B)
assert np.sum(singular(delta) > 1e-4*singular(delta)[0]) <= 16 < np.sum(kept > 0.1*kept[0])
fig = figure(go.Scatter(y=singular(delta), name='the change', line_color=COLORS['ours']), go.Scatter(y=kept, name='what the merge did', line_color=COLORS['theirs']),
             title='Sixteen directions go in, noise comes out', x='direction', y='singular value', height=280)
fig.show()

# %% [markdown]
# ## Two controls
#
# Before believing such a number one must know what it says without an adapter. **Requantising the untouched base, with scales chosen anew, moves part of the weights: quantisation is not idempotent.** So survival may be negative, and every axis here goes below 0. On the base's own grid nothing moves, by construction. The paper's project saw 12 % of the weights and 3.4 % in L2.

# %%
report = merge_report()
print(report['command'])
control = [dict(tier=t, kind=k, matrices=r['matrices'][k], moved=f"{w['curve']['control']['moved']:.1%}", l2=f"{w['curve']['control']['moved_l2']:.1%}") for t, r in report['tiers'].items() for k, w in r['weights'].items()]
still = merge_of(q, np.zeros_like(delta), grid='base')
test_eq((still['moved'], still['moved_l2']), (0, 0))
print(as_text({c: np.array([r[c] for r in control]) for c in control[0]}))

# %% [markdown]
# ## How large must a change be?
#
# A random change of rank 16, scaled from a hundredth of a step to four. Pick a tier and a grid. **Where scales are chosen anew, anything below about a quarter of a step does more harm than good, and half survives only from more than half a step on.** Stars, if there are any, are the adapters that ship with the lab.

# %%
probe(lambda tier, grid: merge_survival(report, tier, grid), tier=list(report['tiers']), grid=['refit', 'base'])

# %% [markdown]
# The same on the base's own grid: the loss is gentler, nothing is below 0, and a tenth of a step still leaves nothing.

# %%
merge_survival(report, list(report['tiers'])[0], 'base', -0.5).show()


# %% [markdown]
# Measured in steps the curve hardly depends on the number of bits. So the question becomes how large a step is. **Each bit less doubles the step, and with it the change that would survive.** Here is the size from which half survives, as a root mean square of the weight itself, for teachers' matrices at every width; an adapter (dotted) is to the left of the points it will not survive at.

# %%
def thresholds(report, tier):
    return [dict(bits=f['bits'], group=f['group_size'], step=f['step'], half=needed(f['sizes'], f['refit'])*f['step'], zero=needed(f['sizes'], f['refit'], 0)*f['step']) for f in report['tiers'][tier]['forms']]
def half_figure(tier):
    rows = thresholds(report, tier)
    shade = {32: COLORS['hit'], 64: COLORS['ours'], 128: COLORS['router']}
    fig = figure(*(go.Scatter(x=[r['half'] for r in rows if r['group'] == g], y=[r['bits'] for r in rows if r['group'] == g], mode='lines+markers', name=f'groups of {g}', line_color=shade[g]) for g in (32, 64, 128)),
                 title=f'Half of a change survives from this size on ({tier})', x='RMS of the change', y='bits', height=320, width=700)
    for kind, w in report['tiers'][tier]['weights'].items():
        for name, a in w['adapters'].items():
            if a: fig.add_vline(x=a['rms'], line=dict(dash='dot', color=COLORS['alert'], width=1))
    fig.add_vline(x=1e-3, line=dict(dash='dash', color=COLORS['paper'], width=1), annotation_text='paper: RMS 1e-3', annotation_position='top right', annotation_font_size=10)
    return fig.update_xaxes(type='log', range=[-3.2, 0]).update_yaxes(tickvals=[2, 3, 4, 5, 6, 8])
rows = {(r['bits'], r['group']): r for r in thresholds(report, 'tiny-softmax')}
assert rows[(8, 64)]['half'] < rows[(6, 64)]['half'] < rows[(4, 64)]['half'] < rows[(2, 64)]['half'] and rows[(4, 32)]['step'] < rows[(4, 128)]['step']
probe(half_figure, tier=list(report['tiers']))

# %% [markdown]
# Try it on one matrix: pick bits, group and size.

# %%
from edge0_lab.int4 import quantize
W = mx.array(B).astype(mx.bfloat16)
def one_merge(bits, group, size):
    "Distribution of what each weight keeps of its change."
    t = quantize(W, bits, group)
    d = delta/np.float32(steps_of(t, delta))*np.float32(size)
    got = merge_of(t, d)
    base, merged = (np.array(dequantize(v, mx.float32)) for v in (t, merged_tensor(t, d)))
    error = ((merged - base - d)/np.sqrt(np.mean(d**2))).reshape(-1)
    counts, edges = np.histogram(np.clip(error, -6, 6), 49)
    return figure(go.Bar(x=(edges[1:] + edges[:-1])/2, y=counts/len(error), marker_color=COLORS['theirs']), title=f'{bits} bits, groups of {group}, {size:g} steps: survival {got["survival"]:.2f}', x="error of the merge, in units of the change's RMS (cut at 6)", y='share of the weights', height=280)
probe(one_merge, bits=[4, 8, 6, 5, 3, 2], group=[64, 32], size=[0.5, 0.05, 0.125, 0.25, 1.0, 2.0])


# %% [markdown]
# ## At the logits
#
# Weights do not speak; logits do. For each kind of layer the adapter sits on that kind alone. $R$ is float32: dequantised base plus change, experts too. The distance is in units of the adapter's effect: 0 is the adapter, 1 is none at all. **On every kind of layer the unmerged adapter is nearer than any merge into four bits or fewer; the last column says how many times.**

# %%
def distances(tier):
    return [dict(adapter=l['adapter'], kind=l['kind'], effect=f"{l['effect']:.1%}", unmerged=l['variants']['unmerged']['distance'], **{n: l['variants'][v]['distance'] for n, v in (('8 bits', '8 bits, group 64'), ('4, refit', '4 bits, group 64'), ('4, base grid', '4 bits, group 64, grid of the base'), ('3 bits', '3 bits, group 64'), ('2 bits', '2 bits, group 64'))},
                 times=round(min(v['distance'] for n, v in l['variants'].items() if n[0] in '234')/l['variants']['unmerged']['distance'])) for l in report['tiers'][tier]['logits']]
for tier in report['tiers']:
    t = distances(tier)
    print(tier)
    print(as_text({c: np.array([r[c] for r in t]) for c in t[0]}))
    assert all(r['unmerged'] < min(r['4, refit'], r['4, base grid'], r['3 bits'], r['2 bits']) for r in t)

# %% [markdown]
# The paper's measure at the logits, beside the paper's 18 %. The smaller random change is an eighth of a step; the shipped adapter is the one each tier is served with.

# %%
names = {'4 bits, group 64': 'refit', '4 bits, group 64, grid of the base': 'base grid'}
bars = [(f"{l['kind']}, {l['adapter'].replace('random, ', '')}, {tier.removeprefix('tiny-')}", names[v], l['variants'][v]['survival']) for tier, r in report['tiers'].items() for l in r['logits'] if l['kind'] == 'all' for v in names]
fig = figure(*(go.Bar(y=[b for b, n, _ in bars if n == which], x=[max(v, -3) for _, n, v in bars if n == which], name=which, orientation='h', marker_color=c) for which, c in (('refit', COLORS['theirs']), ('base grid', COLORS['router']))),
             title='Survival at the logits after a merge into 4 bits (cut at -3)', x='survival', height=340, width=700)
fig.add_vline(x=report['paper']['logits'], line=dict(dash='dash', color=COLORS['paper']), annotation_text='paper 18 %', annotation_position='top').add_vline(x=0, line_color='#222')
fig.update_layout(margin_l=220).show()

# %% [markdown]
# ## Our own adapters
#
# Training decides how large a change is. The paper's changes are small, 1e-3 in RMS and below the step. **Ours are not**: a few hundred fast steps on two thousand rows move a tiny model's weights by 0.6 to 2 steps, and more than half of that survives a merge. Even so the merged model is not the adapted one: at the logits a large part of the effect is gone. What ships beside the tiers, per kind of layer, against the paper's 34 % and 2 %:

# %%
own = [dict(tier=t, adapter=a, kind=k, rms=f"{v['rms']:.1e}", steps=v['steps'], refit=v['refit'], base_grid=v['base']) for t, r in report['tiers'].items() for k, w in r['weights'].items() for a, v in w['adapters'].items() if v]
if own: print(as_text({c: np.array([r[c] for r in own]) for c in own[0]}))
else: print('This campaign was run before an adapter shipped; run it again with the command above.')

# %%
if own:
    label = [f"{r['kind']}, {r['adapter'].removeprefix('lora_')}, {r['tier'].removeprefix('tiny-')}" for r in own]
    fig = figure(*(go.Bar(y=label, x=[max(r[c], -3) for r in own], name=n, orientation='h', marker_color=col) for c, n, col in (('refit', 'refit', COLORS['theirs']), ('base_grid', 'base grid', COLORS['router']))),
                 title='What a merge would leave of our adapters, in the weights (cut at -3)', x='survival', height=360, width=700)
    for k in ('attention', 'dense'): fig.add_vline(x=report['paper'][k], line=dict(dash='dash', color=COLORS['paper']), annotation_text=f"paper, {k}", annotation_font_size=10, annotation_position='top' if k == 'attention' else 'bottom')
    fig.add_vline(x=0, line_color='#222')
    fig.update_layout(margin_l=230).show()

# %% [markdown]
# ## The price of not merging
#
# On this machine, at the shape of the 35b tier, all 310 targets:

# %%
lora = json.loads(data_path('bench', 'lora.json').read_text())
print(lora['command'])
print(f"{lora['adapter']['targets']} targets, {lora['adapter']['bytes']/1e6:.0f} MB: {lora['added']:+.1%} of a decode step")
assert lora['added'] < 0.10

# %% [markdown]
# ## What to keep
#
# - A merge rounds the sum; what is below half a step is gone, and choosing scales anew adds damage of its own, so survival goes below 0.
# - Without any adapter, requantising already moves a seventh of the weights; on the base's own grid it moves none.
# - At the logits the unmerged adapter is nearer to float32 than every merge into four bits or fewer, on every kind of layer, by the factors in the table.
# - Our own adapters are larger than the paper's, so more of them survives; what is lost is still a large part of their effect.
# - The price is under a tenth of a step, measured.
