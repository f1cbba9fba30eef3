"""Makes the small traces in data/traces that the pages of room 14 show.

    python tools/traces.py [TIER ...]     default: tiny-softmax

Three runs of one prompt, greedy, on a simulated disk (2 ms a read, 500 MB/s), 8 experts a token:
    TIER-exact.npz      on demand, least recently used
    TIER-staged.npz     sticky sets without prediction; with router logits
    TIER-next-gate.npz  sets filled a token ahead, predicted by the next layer's gate on this layer's state
"""
import sys

import edge0_lab  # noqa: F401  loads the BLAS before MLX
from edge0_lab.decode import Lab, RunConfig
from edge0_lab.settings import data_path

PROMPT = 'The city of Paris is the capital of France and '
DISK = dict(throttle=(2e-3, 5e8), k=8, read_threads=4)
RUNS = {'exact': RunConfig(decode='exact', **DISK), 'staged': RunConfig(decode='staged', trace='logits', **DISK),
        'next-gate': RunConfig(decode='staged', prerouter='next-gate', **DISK)}


def main(names):
    data_path('traces').mkdir(exist_ok=True)
    for name in names:
        with Lab.open(name) as lab:
            lab.generate(PROMPT, 4, RUNS['staged'])           # the first run in a process is another (FACTS section 8)
            for what, run in RUNS.items():
                out = lab.generate(PROMPT, 48, run, stop=())
                path = out.trace.save(data_path('traces', f'{name}-{what}.npz'))
                print(path.name, path.stat().st_size, out)


if __name__ == '__main__': main(sys.argv[1:] or ['tiny-softmax'])
