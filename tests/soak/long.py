"Load that goes on: decode steps over random settings, requests A then B, faults by chance. Each job is a generator of small amounts of work, so that it can be stopped and taken up."
import errno, gc, os, threading, time
from dataclasses import replace
from pathlib import Path

import edge0_lab
import mlx.core as mx
import numpy as np
import psutil

from edge0_lab import reads
from edge0_lab.decode import Lab, RunConfig
from edge0_lab.headfiles import find_heads
from edge0_lab.slots import ReadError
from edge0_lab.store import CheckpointError

PREROUTERS = (False, False, True, 'previous', 'next-gate', 'same-token')


def vitals():
    "What must not grow: MLX's memory, the process's own pages, open files, threads."
    gc.collect()
    p = psutil.Process()
    m = p.memory_info()
    return dict(allocator=mx.get_active_memory(), rss=m.rss - getattr(m, 'shared', 0), files=p.num_fds() if hasattr(p, 'num_fds') else p.num_handles(), threads=threading.active_count())


def random_run(rng, lab, heads=()):
    "Settings that go together."
    pick = lambda *v: v[rng.integers(len(v))]
    k = int(pick(1, 2, 4, lab.k)) if lab.k >= 4 else int(rng.integers(1, lab.k + 1))
    prerouter = pick(*PREROUTERS)
    if prerouter is True and k not in heads: prerouter = 'next-gate'
    paths = {int(l): pick('staged', 'exact', 'hot', 'whole-layer') for l in lab.moe_layers if rng.random() < .5} if rng.random() < .4 else None
    return RunConfig(decode=pick('staged', 'staged', 'exact', 'hot', 'whole-layer'), prefill=pick('whole-layer', 'exact', 'hot'), k=k, prerouter=prerouter, paths=paths,
                     cache_slots=int(pick(0, 2, 8, 64)) if rng.random() < .7 else 'auto', stage_slots='auto' if rng.random() < .6 else int(rng.integers(1, 2*k*len(lab.moe_layers) + 1)), hot_slots=pick('auto', 1, 4),
                     policy=pick('lru', 'lru', 'lfu'), fill=pick('inplace', 'inplace', 'inplace', 'patch', 'stack'), fill_thread=pick('worker', 'worker', 'main'), hold=pick('single', 'single', 'double'),
                     temperature=float(pick(0., 0., .8)), seed=int(rng.integers(1 << 30)), trace=pick(True, False, False, 'logits') if prerouter is False else pick(True, False), prefill_chunk=int(pick(7, 512)))


def plain(run):
    "The same routing by the slow obvious way: everything on demand."
    return replace(run, decode='exact', prefill='exact', paths=None, cache_slots='auto', stage_slots='auto', hot_slots='auto', policy='lru', fill='inplace', fill_thread='worker', hold='single', trace=False)


def tried(lab, what, run, n):
    "(tokens, counters) or the refusal: some settings ask for more than their slots hold, and say so."
    try: out = lab.generate(what, n, run, stop=())
    except ValueError as e:
        assert 'do not fit' in str(e) or 'would have no slot' in str(e), e
        return None
    for phase, c in out.counters.items():
        assert c['drops'] == 0, (phase, c, run)
        assert c['requests'] == c['hits'] + c['covered'] + c['misses'] and c['misses'] == c['loads'] + c['failed'], (phase, c)
    return out


def decode_steps(open_lab, wanted, seed=0, done=0, sample=20, heads=()):
    """Requests over random settings on one lab, two of them taking turns now and then; every `sample`-th is repeated by the plain way on a fresh lab.

    Yields dict(done, requests, compared, refused, vitals) after each request; `done` counts decode steps.
    """
    rng, n, seen = np.random.default_rng((seed, done)), done, dict(requests=0, compared=0, refused=0)
    with open_lab() as lab:
        while n < wanted:
            run, prompt, length = random_run(rng, lab, heads), rng.integers(1, lab.vocab, int(rng.integers(1, 40))).tolist(), int(rng.integers(2, 60))
            if rng.random() < .3:                                     # two requests, step by step in turns: paths switch between the steps
                other = RunConfig(decode='exact' if run.decode == 'staged' else 'staged', trace=False)
                a, b = lab.stream(prompt, length, plain(run), stop=()), lab.stream(prompt[::-1], length, other, stop=())
                pairs = [(x.token, y.token) for x, y in zip(a, b)]
                a.close(); b.close()
                assert a.out.counters['decode']['drops'] == b.out.counters['decode']['drops'] == 0
                n += 2*len(pairs)
                del a, b
            out = tried(lab, prompt, run, length)
            seen['requests'] += 1
            if out is None: seen['refused'] += 1
            else:
                n += len(out.tokens)
                if seen['requests'] % sample == 0:
                    with open_lab() as fresh: want = fresh.generate(prompt, length, plain(run), stop=()).tokens
                    assert out.tokens == want, (run, prompt, out.tokens, want)
                    seen['compared'] += 1
            del out
            yield dict(seen, done=n, vitals=vitals() if seen['requests'] % 10 == 0 else None)


def a_then_b(open_lab, wanted, seed=0, done=0, heads=()):
    "A at random (finished, stopped early, refused or broken), then B: always B's tokens and first logits of a fresh lab."
    B, run = [5, 17, 3, 29, 42], RunConfig(trace=False)
    def first(lab):
        with lab.prefill(B, run) as s:
            t = [lab.step(s) for _ in range(2)]
            return t, np.array(s.logits.astype(mx.float32))
    with open_lab() as fresh: want = first(fresh)
    rng = np.random.default_rng((seed, done))
    with open_lab() as lab:
        for n in range(done, wanted):
            how, prompt, a = rng.integers(4), rng.integers(1, lab.vocab, int(rng.integers(1, 12))).tolist(), random_run(rng, lab, heads)
            if how < 2: tried(lab, prompt, a, int(rng.integers(0, 6)))
            elif how == 2:
                s = lab.stream(prompt, 9, replace(a, stage_slots='auto', cache_slots='auto'), stop=())
                for _ in range(int(rng.integers(0, 4))): next(s)
                s.close()
            else:
                s, at = lab.stream(prompt, 6, replace(a, stage_slots='auto', cache_slots='auto'), stop=()), rng.integers(1, 40)
                with chance(at, at):
                    try:
                        for _ in s: continue
                    except (ReadError, CheckpointError, OSError): s.close()
            s = None                                                  # an ended request's logits are its holder's, not the lab's
            got = first(lab)
            assert got[0] == want[0] and (got[1] == want[1]).all(), (n, a, prompt)
            yield dict(done=n + 1, vitals=vitals() if n % 25 == 0 else None)


class chance:
    "Reads below the store fail: each `every`-th with EIO, from the `first` on; other threads' too."
    def __init__(self, every, first=0): self.every, self.n, self.hits, self.lock = int(every), -int(first), 0, threading.Lock()
    def __enter__(self):
        self.real = reads._preadv
        def faulty(fd, rows, offset, *flags):
            with self.lock:
                self.n += 1
                now = self.n > 0 and self.n % self.every == 0
                self.hits += now
            if now: raise OSError(errno.EIO, os.strerror(errno.EIO))
            return self.real(fd, rows, offset, *flags)
        reads._preadv = faulty
        return self
    def __exit__(self, *_): reads._preadv = self.real


def faults(open_lab, wanted, seed=0, done=0, heads=()):
    "Requests while reads fail by chance: each ends whole or with an error by name; then, without faults, the tokens of a fresh lab."
    rng, seen = np.random.default_rng((seed, done)), dict(injected=0, errors=0)
    prompt = [5, 17, 3, 29, 42]
    with open_lab() as lab:
        n = done
        while n < wanted:
            run = replace(random_run(rng, lab, heads), cache_slots=4, stage_slots='auto', temperature=0.)
            with chance(int(rng.integers(2, 60)), int(rng.integers(0, 200))) as c:
                try: tried(lab, prompt, run, 8)
                except (ReadError, CheckpointError, OSError) as e:
                    assert 'Input/output' in str(e), e
                    seen['errors'] += 1
            n, seen['injected'] = n + c.hits, seen['injected'] + c.hits
            if c.hits:
                with open_lab() as fresh: want = fresh.generate(prompt, 4, plain(run), stop=()).tokens
                assert lab.generate(prompt, 4, run, stop=()).tokens == want, run
            assert lab.loaded.__dict__.get('serving') is None
            yield dict(seen, done=n, vitals=vitals())


def flat(first, last, allocator=1 << 16, rss=24 << 20, files=0, threads=0):
    "What has grown between two vitals, beyond what is allowed; {} if nothing."
    room = dict(allocator=allocator, rss=rss, files=files, threads=threads)
    return {n: (first[n], last[n]) for n in room if last[n] - first[n] > room[n]}


def tier_lab(name):
    "open_lab and the k its heads are for."
    from edge0_lab.settings import tier
    t = tier(name)
    def has(k):
        try: return bool(find_heads(t.checkpoint, k))
        except CheckpointError: return False
    return (lambda: Lab.open(name)), tuple(k for k in t.served_k if has(k))


JOBS = dict(steps=(decode_steps, 100_000), requests=(a_then_b, 10_000), faults=(faults, 10_000))
