"""The full soak: every parser 30 minutes of processor time under the fuzzer, 100,000 decode steps, 10,000 requests A then B, 10,000 injected read faults, and the fault tests. Can be stopped and goes on.

    python tests/soak/run.py [--out out/soak] [--minutes N] [--only steps requests faults fuzz tests] [--fuzz-seconds 1800] [--jobs N]

`make soak` runs it to the end. Progress is in OUT/state.json, the summary in OUT/summary.txt (rewritten after each slice of work); exit code 1 if anything was found.
"""
import argparse, json, os, subprocess, sys, threading, time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(HERE), str(ROOT/'tests')]
TIERS = ('tiny-softmax', 'tiny-sigmoid')
TESTS = ('test_faults.py', 'test_faults_writes.py', 'test_fuzz.py', 'test_soak.py', 'test_doctor.py')


def put(path, text):
    part = path.with_name(path.name + '.part')
    part.write_text(text)
    os.replace(part, path)


class State(dict):
    "What was done so far; saved after every slice."
    def __init__(self, folder):
        self.file = folder/'state.json'
        folder.mkdir(parents=True, exist_ok=True)
        super().__init__(json.loads(self.file.read_text()) if self.file.exists() else {})
        self.lock = threading.Lock()
    def save(self):
        with self.lock:
            put(self.file, json.dumps(self, indent=1))
            put(self.file.with_name('summary.txt'), summary(self))


def summary(s):
    "Load held, faults survived, inputs tried, nothing lost."
    from long import JOBS
    load = {n: [v for k, v in s.items() if k.startswith(n + ' ')] for n in JOBS}
    lines, bad = [], [f'{k}: {v["failed"]}' for k, v in s.items() if isinstance(v, dict) and v.get('failed')]
    for name, (_, wanted) in JOBS.items():
        for k, v in s.items():
            if not k.startswith(name + ' '): continue
            grown = v.get('grown') or {}
            a, b = v.get('first'), v.get('last')
            held = f"; allocator {a['allocator']/2**20:.1f} to {b['allocator']/2**20:.1f} MiB, own pages {a['rss']/2**20:.0f} to {b['rss']/2**20:.0f} MiB, files {a['files']} to {b['files']}, threads {a['threads']} to {b['threads']}" if a and b else ''
            more = ', '.join(f'{n} {v[n]:,}' for n in ('requests', 'compared', 'refused', 'injected', 'errors') if n in v)
            lines.append(f"{k:22} {v['done']:>9,} of {wanted//len(TIERS):,}" + (f'; {more}' if more else '') + held + (f'; GREW {grown}' if grown else ''))
            if grown: bad.append(f'{k}: grew {grown}')
    for k, v in s.items():
        if k.startswith('fuzz '):
            lines.append(f"{k:22} {v['executions']:>9,} inputs in {v['seconds']/60:.1f} processor minutes, {v['how']}" + (f"; FOUND {', '.join(v['findings'])}" if v['findings'] else '; nothing found'))
            bad += [f'{k}: {f}' for f in v['findings']]
    for k, v in s.items():
        if k.startswith('tests '): lines.append(f"{k:22} {v['said']}")
    total = lambda name, key='done': sum(v.get(key, 0) for v in load[name])
    inputs = sum(v['executions'] for k, v in s.items() if k.startswith('fuzz '))
    head = [f"load held: {total('steps'):,} decode steps, {total('requests'):,} requests A then B, {total('steps', 'compared'):,} compared with a fresh lab",
            f"faults survived: {total('faults'):,} injected read errors, {total('faults', 'errors'):,} of them ended a request by name",
            f'inputs tried: {inputs:,} over {sum(k.startswith("fuzz ") for k in s)} parsers', 'lost: ' + ('nothing' if not bad else '; '.join(bad))]
    return '\n'.join(head) + '\n\n' + '\n'.join(lines) + '\n'


def slice_of(name, tier, state, until):
    "One job on one tier, until it is done or the time is up."
    import long
    job, wanted = long.JOBS[name]
    key, wanted = f'{name} {tier}', wanted//len(TIERS)
    mine = state.setdefault(key, dict(done=0))
    if mine['done'] >= wanted or mine.get('failed'): return
    open_lab, heads = long.tier_lab(tier)
    before, base, told = dict(mine), {n: mine.get(n, 0) for n in ('requests', 'compared', 'refused', 'injected', 'errors')}, time.time()
    first = None                                                     # vitals are compared within a process, after it has warmed up
    try:
        for i, got in enumerate(job(open_lab, wanted, seed=1, done=before['done'], heads=heads)):
            v = got.pop('vitals', None)
            mine.update({n: base.get(n, 0) + x if n in base else x for n, x in got.items()})
            if v is not None:
                if first is None and i >= 60: first = mine['first'] = v
                if first is not None:
                    mine['last'] = v
                    mine['grown'] = {**mine.get('grown', {}), **long.flat(first, v)}
            if time.time() - told > 10:
                state.save()
                told = time.time()
            if time.time() > until: break
    except Exception as e:
        import traceback
        mine['failed'] = f'{type(e).__name__}: {str(e)[:600]}'
        put(state.file.with_name(f'failed-{name}-{tier}.txt'), traceback.format_exc())
    state.save()


def fuzz(name, state, seconds, out):
    with state.lock: mine = state.setdefault(f'fuzz {name}', dict(executions=0, seconds=0., how='', findings=[]))
    left = seconds - mine['seconds']
    if left < 10: return
    from fuzz import WAIT
    work = out/'fuzz'/name
    p = subprocess.run([sys.executable, str(HERE/'fuzz.py'), name, '--seconds', str(left), '--work', str(work), '--seed', str(mine['executions'] % 1000)], capture_output=True, text=True, timeout=WAIT*left + 300)
    got = json.loads((work/'result.json').read_text()) if (work/'result.json').exists() else dict(executions=0, seconds=0., how='', findings=[])
    with state.lock:
        mine.update(executions=mine['executions'] + got['executions'], seconds=mine['seconds'] + got['seconds'], how=got['how'], findings=sorted({*mine['findings'], *got['findings']}))
        if not got['executions'] or p.returncode not in (0,): mine['failed'] = f'the fuzzer ended with {p.returncode}: {p.stderr[-300:]}'
    state.save()


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument('--out', type=Path, default=ROOT/'out'/'soak'); p.add_argument('--minutes', type=float, default=1e9); p.add_argument('--only', nargs='*', default=['tests', 'steps', 'requests', 'faults', 'fuzz'])
    p.add_argument('--jobs', type=int, default=os.cpu_count() or 1, help='fuzzers at once'); p.add_argument('--fuzz-seconds', type=float, default=1800); p.add_argument('--slice', type=float, default=300, help='seconds a job runs before the next has its turn')
    a = p.parse_args()
    import long, parsers
    state, end = State(a.out), time.time() + 60*a.minutes
    if 'tests' in a.only and 'tests all' not in state:
        r = subprocess.run([sys.executable, '-m', 'pytest', '-q', *[str(ROOT/'tests'/t) for t in TESTS]], cwd=ROOT, capture_output=True, text=True)
        state['tests all'] = dict(said=(r.stdout.strip().splitlines() or ['nothing'])[-1], **({} if r.returncode == 0 else dict(failed=r.stdout[-600:])))
        state.save()
    done = lambda n: all(state.get(f'{n} {t}', {}).get('done', 0) >= long.JOBS[n][1]//len(TIERS) or state.get(f'{n} {t}', {}).get('failed') for t in TIERS)
    while time.time() < end:
        left = [n for n in long.JOBS if n in a.only and not done(n)]
        for n in left:
            for t in TIERS:
                if time.time() < end: slice_in_process(n, t, min(end, time.time() + a.slice), a.out)
                state = State(a.out)
        more = [n for n in parsers.PARSERS if 'fuzz' in a.only and state.get(f'fuzz {n}', {}).get('seconds', 0) < a.fuzz_seconds - 10 and not state.get(f'fuzz {n}', {}).get('failed')]
        until = lambda n: min(a.fuzz_seconds, state.get(f'fuzz {n}', {}).get('seconds', 0) + min(a.slice, end - time.time()))
        with ThreadPoolExecutor(a.jobs) as pool: list(pool.map(lambda n: fuzz(n, state, until(n), a.out) if time.time() < end else None, more))
        if not left and not more: break
    state.save()
    print(summary(state), end='')
    return int('lost: nothing' not in summary(state))


def slice_in_process(name, tier, until, out):
    "A process of its own: what it leaves behind is its own, and a crash is seen."
    code = f'import sys; sys.path[:0] = {[str(HERE), str(ROOT/"tests")]!r}; import run; run.slice_of({name!r}, {tier!r}, run.State(run.Path({str(out)!r})), {until!r})'
    r = subprocess.run([sys.executable, '-c', code], cwd=ROOT, capture_output=True, text=True)
    if r.returncode:
        state = State(out)
        state.setdefault(f'{name} {tier}', dict(done=0))['failed'] = f'the process ended with {r.returncode}: {r.stderr[-400:]}'
        state.save()


if __name__ == '__main__': sys.exit(main())
