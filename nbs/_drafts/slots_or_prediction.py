# %% [markdown]
# # Slots or prediction?
#
# > Two ways to spend memory and effort on the same stall, priced against each other on disks from fast to slow.
#
# The paper reports that raising the cache from 64 to 900 slots gave 35 %, that the prerouter gave 80 % on one machine, and next to nothing on another. These are not contradictions but points of one surface: slots remove reads, prediction hides them. This page draws the surface for the softmax tier, with its own routing, from measured runs where there are some and from the step-time model elsewhere.

# %%
import json
import edge0_lab
import numpy as np, plotly.graph_objects as go
from dataclasses import replace
from fastcore.test import *
from edge0_lab.replay import Machine, shipped_routes, step_times
from edge0_lab.settings import COLORS, DIVERGING, data_path, figure
from edge0_lab.steptime import reads_of

# %% [markdown]
# ## Measured
#
# Twelve steps at K = 8 on four disks (`memory` is real, the others simulated by a throttle), from the report of `edge0-lab bench steptime`. Both columns are against the same starting point, 16 slots on demand: one spends 240 more slots, the other predicts with the next layer's gate and keeps 64 slots beside its sets.

# %%
path = data_path('bench', 'steptime.json')
report = json.loads(path.read_text()) if path.exists() else None
ratio = {(s['k'], s['disk_name'], s['way']): s['ratio'] for s in report['settings']} if report else {}
disks = list(dict.fromkeys(d for _, d, _ in ratio))
print(report['command'] if report else 'not measured yet: edge0-lab bench steptime --out data/bench/steptime.json; what follows uses an assumed machine')
for k in (2, 4, 8):
    for d in disks: print(f"K = {k}, {d:16} 256 slots: x {ratio[k, d, 'on demand, 16 slots']/ratio[k, d, 'on demand, 256 slots']:.2f}   prediction: x {ratio[k, d, 'on demand, 16 slots']/ratio[k, d, 'a token ahead']:.2f}")

# %%
gain = {w: [ratio[8, d, 'on demand, 16 slots']/ratio[8, d, w] for d in disks] for w in ('on demand, 128 slots', 'on demand, 256 slots', 'a token ahead')}
if report: figure(*(go.Bar(x=disks, y=v, name=n, marker_color=COLORS[c]) for (n, v), c in zip(gain.items(), ('hit', 'ours', 'head'))), go.Scatter(x=disks, y=[1]*len(disks), mode='lines', showlegend=False, line=dict(color=COLORS['paper'], dash='dash')),
       title='Measured: what slots and prediction buy depends on the disk', x='disk, K = 8', y='times faster than 16 slots on demand', barmode='group', width=720).show()

# %% [markdown]
# ## The surface
#
# The fitted machine (an assumed one while there is no report, see above), the tier's own text, slots from one token's need to all experts, and disks from 0.1 to 10 ms. In each cell the step on demand is divided by the step with every set announced a token ahead, with the *same* slots: blue means prediction wins, orange that the slots spent on promises cost more than they hide.

# %%
m = Machine(**report['machine_fitted']) if report else Machine('assumed')
text = shipped_routes('tiny-softmax')
text = text.of((np.arange(text.T) >= 0) & (np.arange(text.T) < 40))
nbytes, sizes, latencies = (report['anchor']['nbytes'] if report else 13_824), (80, 128, 192, 256, 384, 512), (1e-4, 3e-4, 1e-3, 3e-3, 1e-2)
loads = {(S, a): reads_of(text, S, nbytes, a) for S in sizes for a in (False, True)}
def step(S, a, latency, rate=2e8): return float(step_times(replace(m, latency=latency, rate=rate), loads[S, a])[8:].mean())
grid = np.array([[step(S, False, x)/step(S, True, x) for S in sizes] for x in latencies])
top = float(np.abs(np.log(grid)).max())
figure(go.Heatmap(z=np.log(grid), x=[str(S) for S in sizes], y=[f'{1e3*x:g} ms' for x in latencies], colorscale=DIVERGING, zmid=0, zmin=-top, zmax=top, text=[[f'{v:.2f}' for v in row] for row in grid], texttemplate='%{text}', showscale=False),
       title='Simulated: prediction pays where reads are many and slow, and nowhere else', x='slots of 512 (one token uses 64)', y='latency of a read').show()

# %%
test_eq(bool(grid[-1, 1] > grid[0, 1]), True)
test_eq(bool(abs(grid[0, -1] - 1) < 0.35), True)
grid.round(2)

# %% [markdown]
# ## At what price?
#
# Slots cost memory; prediction costs memory too (two sets per layer are held, and the heads), host work per step, and it changes the routing. Below: how many slots *on demand* reach the same step as 192 slots with prediction.

# %%
def equal_slots(latency, want):
    "The fewest slots on demand that are as fast."
    return next((S for S in sizes if step(S, False, latency) <= want), None)
for x in latencies: print(f'{1e3*x:5.1f} ms: 192 slots predicted = {equal_slots(x, step(192, True, x)) or "more than 512"} slots on demand')

# %%
figure(*(go.Scatter(x=sizes, y=[1e3*step(S, a, x) for S in sizes], name=f'{"a token ahead" if a else "on demand"}, {1e3*x:g} ms', mode='lines+markers', line=dict(color=COLORS['staged' if a else 'exact'], dash=d)) for x, d in ((3e-4, 'dot'), (3e-3, 'solid')) for a in (False, True)),
       title='Simulated: on a fast disk slots do it alone; on a slow one they do not', x='slots of 512', y='step, ms', yaxis_type='log', width=720).show()

# %% [markdown]
# ## What to keep
#
# - Slots remove reads, prediction hides what is left. Each takes away the other's reason: with most experts resident there is nothing to hide.
# - The paper's three figures (35 % from slots, 80 % and nothing from prediction) are places on this surface, not a dispute.
# - Prediction changes which experts compute. Slots do not: with equal speed, choose slots.
