"The soak in a short form: the same jobs as `make soak`, a few hundred steps of each."
import json, subprocess, sys
from pathlib import Path

import edge0_lab
import pytest

SOAK = Path(__file__).parent/'soak'
sys.path.insert(0, str(SOAK))
import long  # noqa: E402

from edge0_lab.decode import Lab  # noqa: E402
from edge0_lab.synth import synth_family  # noqa: E402


@pytest.fixture(scope='module')
def small(tmp_path_factory):
    d = tmp_path_factory.mktemp('soak')/'m'
    synth_family('qwen3_5_moe', d, num_hidden_layers=4, num_experts=16, num_experts_per_tok=4)
    return lambda: Lab.open(d)


def last(work, warm=0):
    "The last report, and the vitals after warming up and at the end."
    first = v = None
    for i, got in enumerate(work):
        v = got.pop('vitals') or v
        if i == warm: first = v
    return got, first, v


def test_decode_steps_over_random_settings(small):
    got, *_ = last(long.decode_steps(small, 700, seed=3, sample=4))
    assert got['done'] >= 700 and got['compared'] >= 3 and got['refused'] < got['requests']


def test_a_then_b_at_random(small):
    got, *_ = last(long.a_then_b(small, 25, seed=4))
    assert got['done'] == 25


def test_read_faults_at_random(small):
    got, *_ = last(long.faults(small, 20, seed=5))
    assert got['injected'] >= 20 and got['errors'] >= 3


def test_nothing_grows(small):
    "Forty equal requests: allocator, files and threads to the byte and number; own pages within the noise of an allocator."
    from edge0_lab.decode import RunConfig
    with small() as lab:
        seen = []
        for i in range(40):
            lab.generate([5, 17, 3], 6, RunConfig(decode=('staged', 'exact', 'hot', 'whole-layer')[i % 4], fill=('inplace', 'patch')[i//4 % 2], cache_slots=4), stop=())
            if i % 8 == 7: seen.append(long.vitals())
        assert not long.flat(seen[1], seen[-1], allocator=4096), seen


def test_a_leak_is_seen():
    a = dict(allocator=100, rss=1 << 30, files=9, threads=3)
    assert not long.flat(a, dict(a))
    for n, more in dict(allocator=1 << 20, rss=1 << 26, files=1, threads=1).items(): assert list(long.flat(a, {**a, n: a[n] + more})) == [n]


def test_the_summary_says_what_was_lost():
    import run
    v = dict(allocator=1 << 20, rss=1 << 27, files=5, threads=3)
    s = {'steps tiny-softmax': dict(done=50_000, requests=1600, compared=80, refused=9, first=v, last=v, grown={}), 'requests tiny-softmax': dict(done=5000), 'faults tiny-softmax': dict(done=5000, injected=5000, errors=900),
         'fuzz header': dict(executions=10_000, seconds=1800, how='coverage-guided', findings=[]), 'tests all': dict(said='99 passed')}
    text = run.summary(s)
    assert 'load held: 50,000 decode steps, 5,000 requests' in text and 'faults survived: 5,000' in text and 'inputs tried: 10,000' in text and 'lost: nothing' in text
    s['fuzz header']['findings'] = ['KeyError-checkpoint-50']
    assert 'lost: fuzz header: KeyError' in run.summary(s)
    assert 'lost: steps tiny-softmax' in run.summary({'steps tiny-softmax': dict(done=1, grown=dict(files=(5, 9)))})
    assert 'lost: steps tiny-softmax: boom' in run.summary({'steps tiny-softmax': dict(done=1, failed='boom')})


def test_a_soak_goes_on_where_it_was(tmp_path):
    import run
    s = run.State(tmp_path)
    s['fuzz header'] = dict(executions=3, seconds=1., how='', findings=[])
    s.save()
    assert run.State(tmp_path) == s and 'inputs tried: 3' in (tmp_path/'summary.txt').read_text()
