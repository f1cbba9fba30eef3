"""Ctrl-C at every instruction at which Python can deliver it, one run each.

    python tests/every_point.py FOLDER WORK [WORK ...]

A first run, traced by instruction, lists the points: after a call has returned, where a function begins, where a loop jumps back, in the modules between a person and the pass.
Then the work is done once for each, with a SIGINT at the first and at the last time the point is reached. After it the lab must answer, with the same tokens, within a few seconds.
Prints `N points`, a line for each that went wrong, and `wrong: 0`.
"""
import collections, dis, functools, os, signal, sys, traceback
from pathlib import Path

import edge0_lab
from edge0_lab.decode import Lab, RunConfig

FILES = {f'{n}.py' for n in ('walk', 'stream', 'limits', 'interrupts', 'decode')}
PROMPT, RUN, SECONDS = [1, 2, 3], RunConfig(decode='exact', trace=False, cache_slots=4), 20
UNGUARDED = {('walk.py', '__exit__')} # its first instruction: no Python code can stand before it


def tokens(lab): return lab.generate(PROMPT, 3, RUN, stop=()).tokens

def walk(lab):
    with lab.walk(PROMPT, 3, RUN) as w: w.finish()

def steps(lab):
    "Left in the middle."
    with lab.walk(PROMPT, 1, RUN) as w: w.step(), w.step()

def stream(lab):
    for _ in lab.stream(PROMPT, 3, RUN, stop=()): pass

def dropped(lab):
    s = lab.stream(PROMPT, 3, RUN, stop=())
    next(s)

WORKS = dict(walk=walk, steps=steps, stream=stream, dropped=dropped)


@functools.cache
def points_of(code):
    "Offsets before which Python looks for signals."
    out, before = set(), ''
    for i in dis.get_instructions(code):
        if before.startswith('CALL') or before == 'RESUME' or 'BACKWARD' in before: out.add(i.offset)
        if i.opname != 'CACHE': before = i.opname
    return out


def traced(work, reached):
    "Do the work; `reached(file, function, offset)` at every point."
    def tracer(frame, event, _):
        code = frame.f_code
        if Path(code.co_filename).name not in FILES: return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        if event == 'opcode' and frame.f_lasti in points_of(code): reached((Path(code.co_filename).name, code.co_name, frame.f_lasti, frame.f_lineno))
        return tracer
    sys.settrace(tracer)
    try: work()
    finally: sys.settrace(None)


def interrupted(work, point, n):
    "The work, with Ctrl-C when the point is reached for the n-th time."
    seen = collections.Counter()
    def reached(at):
        seen[at] += 1
        if at == point and seen[at] == n:
            sys.settrace(None)
            signal.raise_signal(signal.SIGINT)
    try: traced(work, reached)
    except KeyboardInterrupt: pass


class Hangs(BaseException): pass

def hangs(*_): raise Hangs(f'for {SECONDS} s')


def main(folder, names):
    signal.signal(signal.SIGALRM, hangs)
    sys.unraisablehook = lambda u: None if u.exc_type is KeyboardInterrupt else sys.__unraisablehook__(u)   # a Ctrl-C in __del__ is said and gone
    wrong, lab = 0, Lab.open(folder)
    for name in names:
        work, seen = WORKS[name], collections.Counter()
        want = tokens(lab)
        work(lab)
        traced(lambda: work(lab), lambda at: seen.update([at]))
        first = {f: min(o for g, h, o, _ in seen if (g, h) == f) for f in UNGUARDED if any((g, h) == f for g, h, *_ in seen)}
        points = [(p, n) for p, t in seen.items() if first.get(p[:2]) != p[2] for n in sorted({1, t})]
        print(name, len(points), 'points', flush=True)
        for point, n in points:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            signal.alarm(SECONDS)
            try:
                interrupted(lambda: work(lab), point, n)
                assert tokens(lab) == want, 'other tokens'
                assert signal.getsignal(signal.SIGINT) is signal.default_int_handler, 'another handler'
            except BaseException as e:
                wrong += 1
                print(name, point, n, repr(e), ' < '.join(f'{f.name}:{f.lineno}' for f in traceback.extract_tb(e.__traceback__)[-4:]), flush=True)
                signal.alarm(0)
                lab = Lab.open(folder)
            signal.alarm(0)
    print('wrong:', wrong, flush=True)
    os._exit(bool(wrong))                                              # a lab that hangs must not hang the end


if __name__ == '__main__': main(sys.argv[1], sys.argv[2:] or list(WORKS))
