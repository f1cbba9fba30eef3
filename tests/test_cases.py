"Every numbered case has a test, and the table of them is what the markers say. `python tests/test_cases.py` writes the table anew."
import ast, os
from pathlib import Path

import pytest

HERE = Path(__file__).parent
TABLE = HERE/'cases.md'
CASES = {
    1: 'order of argpartition differs between platforms', 2: 'ties, alone and batched', 3: 'masked groups win when a bias is negative', 4: 'impossible group topology', 5: 'no groups treated as groups',
    6: 'fp16 overflow becomes token 0 for ever', 7: 'NaN and -0.0 in router logits', 8: 'k changed at run time, 1, E, above E', 9: 'hot set without a home for misses', 10: 'slots used by a layer without a prediction',
    11: 'state leaks between requests', 12: 'first step after prefill uses the wrong slots', 13: '0 meant all and off', 14: 'k larger than the slots, cache smaller than a step', 15: 'slot table read before its write is evaluated',
    16: 'prefetch counted as a hit, protected expert evicted', 17: 'a feature was off while it was benchmarked', 18: 'uniform synthetic input pins the hit rate', 19: 'every miss reads the disk twice', 20: 'truncated shard read as zeros',
    21: 'headers: length, JSON, shapes that are not the byte range', 22: 'stacked, per expert, fused: equal outputs', 23: '3, 5, 6, 8 bits beside 4, overrides under another prefix', 24: 'config.json and shapes disagree', 25: 'mxfp4, nvfp4 scales without biases',
    26: 'quantised matmul at tiny and odd widths', 27: 'float32 reference at reduced precision', 28: 'works without a compiler, one notice', 29: 'wrong numerics with no error on one chip', 30: 'bf16 to NumPy',
    31: 'arrays made on worker threads', 32: 'one-token prompt has no previous token', 33: 'adapter that matches nothing', 34: 'same prompt twice with a cache', 35: 'tied embeddings, no lm_head', 36: 'metadata.widgets without state',
    37: 'figures blank outside JupyterLab', 38: 'passes in the open kernel, fails fresh', 39: 'setting attributes keeps old weights alive', 40: 'a bounded cache reported as a leak'}


def marked():
    "case -> sorted names of tests with its marker, from the source alone."
    out = {}
    for path in sorted(HERE.glob('test_*.py')):
        for f in ast.walk(ast.parse(path.read_text(encoding='utf8'))):
            if not isinstance(f, ast.FunctionDef) or not f.name.startswith('test_'): continue
            for d in f.decorator_list:
                if isinstance(d, ast.Call) and ast.unparse(d.func) == 'pytest.mark.case':
                    for n in d.args: out.setdefault(ast.literal_eval(n), []).append(f'{path.stem}.{f.name}')
    return {n: sorted(set(v)) for n, v in sorted(out.items())}


def table():
    got = marked()
    head = TABLE.read_text(encoding='utf8').split('| case |')[0].rstrip() + '\n\n'
    return head + '| case | what went wrong | tests |\n|---|---|---|\n' + ''.join(f"| {n} | {what} | {', '.join(got.get(n, ['MISSING']))} |\n" for n, what in CASES.items())


@pytest.mark.case(37)
@pytest.mark.parametrize('name', ['memory_split', 'slot_table', 'expert_map', 'hit_rates'])
def test_a_static_picture_can_stand_beside_a_figure(name, tmp_path):
    "Outside JupyterLab a plotly figure is blank: each kind of probe becomes a picture with something on it, and a table of text."
    import edge0_lab
    from PIL import Image
    from edge0_lab.columns import as_text, save_png
    from edge0_lab.probes import PROBES
    from edge0_lab.settings import data_path
    from edge0_lab.trace import Trace
    trace = Trace.load(data_path('traces', 'tiny-softmax-staged.npz'))
    with Image.open(save_png(PROBES[name](trace), tmp_path/'p.png')) as im: assert im.width >= 700 and len(im.convert('RGB').getcolors(1 << 20)) > 20
    assert len(as_text(PROBES[name].table(trace), 5).splitlines()) >= 3


def test_every_case_has_a_test():
    got = marked()
    assert sorted(CASES) == list(range(1, 41))
    assert not [n for n in CASES if n not in got], 'cases without a test'
    assert not [n for n in got if n not in CASES], 'markers that name no case'


def test_the_table_is_what_the_markers_say():
    assert TABLE.read_text(encoding='utf8') == table(), 'run: python tests/test_cases.py'


if __name__ == '__main__':
    part = TABLE.with_name('cases.md.part')
    part.write_text(table(), encoding='utf8')
    os.replace(part, TABLE)
    missing = set(CASES) - set(marked())
    print(sorted(missing) or 'every case has a test')
