"""One parser under coverage-guided fuzzing (atheris), or plain mutation where atheris is not installed.

    python tests/soak/fuzz.py PARSER --seconds 1800 --work DIR

Writes DIR/result.json: executions, seconds of processor time, how, findings (files). The corpus stays in DIR/corpus, so that the next run goes on from it.
"""
import argparse, json, os, random, resource, signal, sys, time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
TIMEOUT, MEMORY = 20, 3 << 30                    # processor seconds an input may take (and WAIT times as many of the clock); address space beyond what is used at the start
WAIT = 30                                        # clock seconds a processor second may take on a machine with other work


def limits():
    "No unbounded allocation: more than MEMORY above the start is an error, which is a finding."
    used = int(open('/proc/self/statm').read().split()[0])*resource.getpagesize() if sys.platform.startswith('linux') else 0
    if used: resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, resource.RLIM_INFINITY))


class Count:
    "The parser, its executions counted and its findings saved."
    def __init__(self, f, work, limit=None, leave=lambda: None):
        self.f, self.work, self.limit, self.leave, self.n, self.start, self.found, self.told = f, work, limit, leave, 0, time.process_time(), [], 0.
        (work/'findings').mkdir(parents=True, exist_ok=True)
        for s in (signal.SIGALRM, signal.SIGPROF): signal.signal(s, self.late)

    def late(self, *_): raise TimeoutError(f'more than {TIMEOUT} s')

    def watch(self, on):
        signal.alarm(TIMEOUT*WAIT*on)
        signal.setitimer(signal.ITIMER_PROF, TIMEOUT*on)

    def __call__(self, data):
        self.n += 1
        self.watch(True)
        try: self.f(bytes(data))
        except BaseException as e:
            if isinstance(e, (KeyboardInterrupt, SystemExit)): raise
            self.watch(False)
            tb, last = e.__traceback__, None
            while tb is not None: last, tb = tb, tb.tb_next
            key = f'{type(e).__name__}-{Path(last.tb_frame.f_code.co_filename).stem}-{last.tb_lineno}'
            if key not in self.found:
                self.found.append(key)
                (self.work/'findings'/key).write_bytes(bytes(data))
                (self.work/'findings'/f'{key}.txt').write_text(f'{type(e).__name__}: {e}\n')
        finally: self.watch(False)
        if time.time() - self.told > 5: self.tell()
        if self.limit is not None and self.spent() > self.limit:
            self.tell()
            self.leave()
            os._exit(0)                                               # libFuzzer has no other way to be told

    def spent(self): return time.process_time() - self.start

    def tell(self, how=None):
        self.told = time.time()
        if how: self.how = how
        (self.work/'result.json.part').write_text(json.dumps(dict(executions=self.n, seconds=round(self.spent(), 1), how=self.how, findings=self.found)))
        os.replace(self.work/'result.json.part', self.work/'result.json')


def mutate(rng, pool):
    data = bytearray(rng.choice(pool))
    for _ in range(rng.randint(1, 6)):
        at = rng.randrange(len(data) + 1)
        how = rng.randrange(6)
        if how == 0 and data: data[at % len(data)] = rng.randrange(256)
        elif how == 1: data[at:at] = bytes(rng.randrange(256) for _ in range(rng.randint(1, 8)))
        elif how == 2: del data[at:at + rng.randint(1, 16)]
        elif how == 3:
            other = rng.choice(pool)
            cut = rng.randrange(len(other) + 1)
            data[at:] = other[cut:]
        elif how == 4: data[at:at] = rng.choice((b'-1', b'0', b'1e999', b'9'*25, b'null', b'true', b'[]', b'{}', b'""', b'\\ud800', b'NaN', b'"../x"', b'4096', b'[[[['))
        else: data[at:at] = data[at:at + rng.randint(1, 32)]
    return bytes(data[:1 << 16])


def main():
    p = argparse.ArgumentParser()
    p.add_argument('parser'); p.add_argument('--seconds', type=float, default=1800, help='of processor time'); p.add_argument('--work', type=Path, required=True); p.add_argument('--seed', type=int, default=0)
    p.add_argument('--plain', action='store_true', help='mutation without coverage even where atheris is installed')
    a = p.parse_args()
    try: atheris = None if a.plain else __import__('atheris')
    except ImportError: atheris = None
    import edge0_lab
    if atheris:
        with atheris.instrument_imports(include=['edge0_lab', 'parsers']): import parsers
    else: import parsers
    if a.parser not in parsers.PARSERS: p.error(f'parser: {a.parser!r}; allowed: {", ".join(parsers.PARSERS)}')
    corpus = a.work/'corpus'
    corpus.mkdir(parents=True, exist_ok=True)
    for i, s in enumerate(parsers.seeds(a.parser) + [k.read_bytes() for k in parsers.kept(a.parser)]): (corpus/f'seed-{i}').write_bytes(s)
    count = Count(parsers.PARSERS[a.parser], a.work, a.seconds, parsers._folder.cleanup)
    limits()
    if atheris:
        count.how = f'coverage-guided (atheris {getattr(atheris, "__version__", "")})'.replace(' )', ')')
        atheris.Setup([sys.argv[0], str(corpus), f'-max_total_time={int(WAIT*a.seconds)}', '-max_len=16384', '-rss_limit_mb=0', '-print_final_stats=1', '-verbosity=0', f'-seed={a.seed + 1}'], count)
        import atexit
        atexit.register(count.tell)
        count.tell()
        atheris.Fuzz()
    count.how = 'mutation without coverage (atheris is not installed)'
    rng, pool = random.Random(a.seed), [f.read_bytes() for f in sorted(corpus.iterdir())]
    while True: count(mutate(rng, pool))


if __name__ == '__main__': main()
