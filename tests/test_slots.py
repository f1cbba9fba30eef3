"Arena, cache, stage and hot set: what may be evicted, what is counted, what survives an error."
import gc, threading

import edge0_lab
import mlx.core as mx
import numpy as np
import pytest

from edge0_lab.slots import FILLS, Arena, HotSet, Load, LruCache, ReadError, Stage, open_caches, shared_view, slots_of
from edge0_lab.store import Checkpoint, ExpertStore, synth_experts

L, E = 3, 12

@pytest.fixture(scope='module')
def store(tmp_path_factory):
    folder = tmp_path_factory.mktemp('experts')
    synth_experts(folder, L=L, E=E, D=64, F=64)
    with Checkpoint.open(folder) as ck:
        store = ExpertStore(ck, threads=2)
        yield store
        store.close()

@pytest.fixture(scope='module')
def first_bytes(store):
    "Packed gate words of every expert, to recognise it by."
    return {(l, e): store.arrays(l, e)['gate.weight'].tobytes() for l in range(L) for e in range(E)}

def cache_of(store, S, threads=2, **kw):
    switches = {n: kw.pop(n) for n in ('fill', 'fill_thread', 'hold') if n in kw}
    return LruCache(store, Arena(store.spec(0), S, **switches), threads=threads, **kw)

def holds(cache, slot):
    a = cache.arena
    return a.rows(slot)[0].tobytes() if a.fill == 'inplace' else np.array(a.parts[0][slot] if a.fill == 'patch' else a.bundles[slot][0]).tobytes()

# ---- arena

@pytest.mark.parametrize('name, kw', [('S', dict(S=0)), ('S', dict(S=True)), ('fill', dict(fill='fast')), ('fill_thread', dict(fill_thread='gpu')), ('hold', dict(hold='triple'))])
def test_arena_names_what_is_wrong(store, name, kw):
    with pytest.raises(ValueError, match=f'^{name}: '): Arena(store.spec(0), **{'S': 2, **kw})

def test_self_check_falls_back_to_patch(store):
    with pytest.warns(UserWarning, match='falling back to fill="patch"'): a = Arena(store.spec(0), 2, view=lambda a: np.array(a))
    assert a.fill == 'patch'
    frozen = lambda a: (v := shared_view(a), v.setflags(write=False))[0]
    with pytest.warns(UserWarning, match='read-only'): assert Arena(store.spec(0), 2, view=frozen).fill == 'patch'

def test_held_memory_is_the_experts_bytes(store):
    gc.collect(); mx.clear_cache()
    before = mx.get_active_memory()
    a = Arena(store.spec(0), 64)
    used = mx.get_active_memory() - before
    assert abs(used/(64*store.spec(0).total) - 1) < 0.02
    stack = a.stack
    assert mx.get_active_memory() - before == used
    del stack
    a.close()
    gc.collect()
    assert mx.get_active_memory() - before < store.spec(0).total

@pytest.mark.case(15)
def test_lazy_readers_never_see_a_later_expert(store, first_bytes):
    # CASE 15: a slot written before its reader has run
    cache, rng, seen = cache_of(store, 5), np.random.default_rng(0), []
    for t in range(60):
        layer, ids = int(rng.integers(L)), rng.permutation(E)[:3].tolist()
        lease = cache.acquire(layer, ids)
        w = cache.arena.stack.gate.weight
        y = [w[lease.place[e]] + 0 for e in ids]
        for one in y: cache.arena.reading(one, lease.slots)
        seen.append((layer, ids, y))
        cache.release(lease)
    for layer, ids, y in seen:
        for e, one in zip(ids, y): assert np.array(one).tobytes() == first_bytes[layer, e]

# ---- cache

@pytest.mark.case(14)
def test_cache_smaller_than_a_step_never_hits(store):
    # CASE 14: cyclic need of 12 experts, 8 slots, LRU
    cache = cache_of(store, 8)
    for _ in range(5):
        for layer in range(L): cache.release(cache.acquire(layer, [0, 1, 2, 3]))
    assert cache.counters.hits == 0 and cache.counters.loads == 60
    cache.counters.check(store.spec(0).total)

@pytest.mark.case(14)
def test_more_experts_than_slots_is_refused(store):
    cache = cache_of(store, 3)
    with pytest.raises(ValueError, match='ids: 4 experts of layer 0 do not fit; room for 3 of 3'): cache.acquire(0, [0, 1, 2, 3])
    cache.check()
    assert len(cache.acquire(0, [0, 1, 2]).slots) == 3

@pytest.mark.case(16)
def test_a_prefetch_is_not_a_hit(store):
    # CASE 16: found only because a fill brought it
    cache = cache_of(store, 8)
    stage = Stage(cache)
    stage.fill(0, [1, 2])
    cache.release(cache.acquire(0, [1, 2, 3]))
    c = cache.counters
    assert (c.hits, c.covered, c.misses) == (0, 2, 3)
    cache.release(cache.acquire(0, [1, 2, 3]))
    assert (c.hits, c.covered) == (3, 2)
    c.check(store.spec(0).total)

@pytest.mark.case(16)
def test_pinned_and_held_slots_survive_pressure(store, first_bytes):
    cache = cache_of(store, 6)
    cache.pin(2, 7)
    held = cache.acquire(1, [3])
    rng = np.random.default_rng(1)
    for _ in range(100):
        layer = int(rng.integers(L))
        cache.release(cache.acquire(layer, rng.permutation(E)[:4].tolist()))
    assert holds(cache, cache.resident(2, 7)) == first_bytes[2, 7] and holds(cache, held.place[3]) == first_bytes[1, 3]
    cache.release(held)
    cache.unpin(2, 7)
    with pytest.raises(ValueError, match='not pinned'): cache.unpin(2, 7)
    cache.check()

@pytest.mark.case(19)
@pytest.mark.parametrize('fill', FILLS)
def test_every_expert_is_read_once(store, fill):
    # CASE 19: bytes read against distinct bytes
    cache, rng, asked = cache_of(store, L*E, fill=fill), np.random.default_rng(2), set()
    for _ in range(40):
        layer, ids = int(rng.integers(L)), rng.permutation(E)[:5].tolist()
        asked |= {(layer, e) for e in ids}
        cache.release(cache.acquire(layer, ids))
    assert cache.counters.bytes_read == len(asked)*store.spec(0).total
    assert cache.arena.nbytes == (len(asked) if fill == 'stack' else L*E)*store.spec(0).total

class Brute:
    "The obvious model of an LRU with immediate release."
    def __init__(self, S): self.S, self.order = S, []
    def use(self, keys):
        loads = 0
        for key in keys: # hits are held first
            if key in self.order: self.order.remove(key)
            else: loads += 1
        room = self.S - len(keys)
        self.order = (self.order[-room:] if room else []) + self.sort(keys)
        return loads
    def sort(self, keys): return keys

@pytest.mark.parametrize('S', [4, 7, 13, 25])
def test_lru_against_the_obvious_model(store, S):
    cache, brute, rng = cache_of(store, S), Brute(S), np.random.default_rng(S)
    for _ in range(120):
        layer, ids = int(rng.integers(L)), rng.permutation(E)[:4].tolist()
        before = cache.counters.loads
        lease = cache.acquire(layer, ids)
        order = [cache.owner[s] for s in lease.slots]
        brute.sort = lambda keys: order
        assert cache.counters.loads - before == brute.use([(layer, e) for e in ids])
        cache.release(lease)
        cache.check()
    cache.counters.check(store.spec(0).total)

def test_lfu_and_a_policy_of_the_users(store):
    lfu = cache_of(store, 2, policy='lfu')
    for e in (0, 0, 0, 1, 2): lfu.release(lfu.acquire(0, [e]))
    assert lfu.resident(0, 0) is not None and lfu.resident(0, 1) is None
    class HighestId:
        def touch(self, key): pass
        def victim(self, keys): return max(keys)
    mine = cache_of(store, 2, policy=HighestId())
    for e in (9, 1, 2): mine.release(mine.acquire(0, [e]))
    assert mine.resident(0, 9) is None and mine.resident(0, 1) is not None
    with pytest.raises(ValueError, match='^policy: '): cache_of(store, 2, policy='mru')
    with pytest.raises(ValueError, match='^policy: '): cache_of(store, 2, policy=object())

def test_capacity_in_bundles_and_bytes(store):
    total = store.spec(0).total
    assert slots_of(store.spec(0), f'{7*total/2**20 + 1e-6} MiB') == 7
    assert cache_of(store, 9, capacity=4).capacity == 4
    cache = cache_of(store, 9, capacity=4)
    with pytest.raises(ValueError, match='room for 4 of 4'): cache.acquire(0, range(5))
    for bad in (0, -1, True, '5', '5 MB', 'MiB'):
        with pytest.raises(ValueError, match='^capacity: '): slots_of(store.spec(0), bad)

@pytest.mark.case(18)
def test_uniform_routing_pins_the_hit_rate(store):
    # CASE 18: uniform choice hits S / (experts in all); favourites hit more, and lose it when shuffled over experts
    rng, S, steps = np.random.default_rng(3), 18, 250
    def rate(routing):
        cache = cache_of(store, S)
        for t, step in enumerate(routing):
            if t == 30: cache.counters.begin_steady()
            for layer, ids in enumerate(step): cache.release(cache.acquire(layer, ids))
        assert cache.counters.steady.requests < cache.counters.requests
        return cache.counters.steady.hit_rate
    p = 1/np.arange(1, E + 1)**1.2
    famous = [[rng.choice(E, 2, replace=False, p=p/p.sum()).tolist() for _ in range(L)] for _ in range(steps)]
    shuffled = [[rng.permutation(E)[ids].tolist() for ids in step] for step in famous]
    # between two uses of a layer the 4 others' experts come in: LRU keeps a little less than S/(L*E) of uniform need
    assert abs(rate(shuffled) - S/(L*E)) < 0.06
    assert rate(famous) > rate(shuffled) + 0.15

class Bad:
    "A store with bad sectors: each named expert fails n times."
    def __init__(self, store, bad): self.store, self.bad = store, dict(bad)
    def __getattr__(self, name): return getattr(self.store, name)
    def read_into(self, layer, e, rows):
        if self.bad.get((layer, e), 0):
            self.bad[layer, e] -= 1
            rows[0][:] = 0xAB # half written
            raise OSError('bad sector')
        return self.store.read_into(layer, e, rows)

@pytest.mark.parametrize('fill', FILLS)
@pytest.mark.parametrize('thread', ['worker', 'main'])
def test_read_errors_name_the_expert_and_pass(store, first_bytes, fill, thread):
    cache = LruCache(Bad(store, {(1, 4): 2}), Arena(store.spec(0), 6, fill, thread), threads=2)
    for _ in range(2):
        with pytest.raises(ReadError, match='layer 1 expert 4: OSError: bad sector') as e: cache.acquire(1, [2, 4, 5])
        assert (e.value.layer, e.value.expert) == (1, 4)
        cache.check()
        assert cache.resident(1, 4) is None
    lease = cache.acquire(1, [2, 4, 5])
    for e in (2, 4, 5): assert holds(cache, lease.place[e]) == first_bytes[1, e]
    cache.release(lease)
    cache.check()
    cache.counters.check(store.spec(0).total)
    assert cache.counters.failed == 2 and cache.counters.hits == 4

def test_a_short_read_is_an_error(store):
    class Short(Bad):
        def read_into(self, layer, e, rows): return self.store.read_into(layer, e, rows) - 1
    with pytest.raises(ReadError, match='bytes read'): LruCache(Short(store, {}), Arena(store.spec(0), 2), threads=1).acquire(0, [0])

def test_an_error_nobody_waits_for_is_forgotten(store):
    cache = LruCache(Bad(store, {(0, 3): 1}), Arena(store.spec(0), 4), threads=1)
    stage = Stage(cache)
    stage.fill(0, [3])
    cache.loading[next(iter(cache.loading))].wait()
    stage.reset()
    lease = cache.acquire(0, [3])
    assert (cache.counters.failed, cache.counters.loads) == (1, 1)
    cache.release(lease)
    cache.check()

@pytest.mark.case(31)
def test_workers_touch_bytes_only(store):
    # CASE 31: reads on worker threads, arrays on the main thread
    seen = dict(read=set(), array=set())
    class Watch(Bad):
        def read_into(self, *a):
            seen['read'].add(threading.current_thread().name)
            return self.store.read_into(*a)
    class Watched(Arena):
        def commit(self, filled):
            seen['array'].add(threading.current_thread().name)
            return super().commit(filled)
    for fill in FILLS:
        cache = LruCache(Watch(store, {}), Watched(store.spec(0), 8, fill), threads=2)
        cache.release(cache.acquire(0, range(6)))
        cache.close()
    assert seen['array'] == {threading.current_thread().name} and all(n.startswith('edge0-fill') for n in seen['read'])

@pytest.mark.case(39)
@pytest.mark.parametrize('fill', FILLS)
def test_live_bytes_stay_flat(store, fill):
    # CASE 39: 200 streamed steps
    cache, rng, live = cache_of(store, 10, fill=fill), np.random.default_rng(4), []
    stage = Stage(cache)
    for t in range(200):
        for layer in range(L):
            stage.fill(layer, rng.permutation(E)[:3].tolist())
            lease, _ = stage.take(layer)
            if not lease.missing: stage.ready(lease)
        if t in (20, 199):
            gc.collect(); mx.clear_cache()
            live.append(mx.get_active_memory())
    assert live[1] - live[0] < store.spec(0).total
    cache.close()

def test_random_use_keeps_the_tables_consistent(store, first_bytes):
    "Fills, demands, pins, hot sets, resets and errors in any order."
    rng = np.random.default_rng(5)
    for S in (6, 11, 30):
        bad = Bad(store, {})
        cache = LruCache(bad, Arena(store.spec(0), S), threads=2)
        stage, hot, pins, leases, told = Stage(cache), HotSet(cache, 1, 'decay'), [], [], 0
        for _ in range(400):
            layer, n = int(rng.integers(L)), int(rng.integers(1, 4))
            ids, what = rng.permutation(E)[:n].tolist(), int(rng.integers(8))
            if rng.random() < 0.05: bad.bad[layer, ids[0]] = 1
            try:
                if what == 0: stage.fill(layer, ids)
                elif what == 1:
                    lease, _ = stage.take(layer)
                    if lease is not None and not lease.missing:
                        _, place = stage.ready(lease)
                        for e, s in place.items(): assert holds(cache, s) == first_bytes[layer, e]
                elif what == 2:
                    lease = cache.request(layer, ids)
                    try:
                        cache.wait(lease)
                        for e, s in lease.place.items(): assert holds(cache, s) == first_bytes[layer, e]
                        hot.observe(layer, lease)
                    finally: cache.release(lease)
                elif what == 3 and len(pins) < 2 and (layer, ids[0]) not in pins:
                    cache.pin(layer, ids[0]); pins.append((layer, ids[0]))
                elif what == 4 and pins: cache.unpin(*pins.pop())
                elif what == 5 and rng.random() < 0.1: stage.reset()
                elif what == 6 and len(leases) < 1: leases.append(cache.request(layer, ids[:1]))
                elif what == 7 and leases:
                    lease = leases.pop()
                    try: cache.wait(lease)
                    finally: cache.release(lease)
            except ReadError: told += 1 # injected above
            except ValueError as e: assert 'do not fit' in str(e)
            cache.check()
        stage.reset(); hot.reset()
        for lease in leases: cache.release(lease)
        for load in list(cache.loading.values()): load.wait()
        cache.check()
        cache.counters.check(store.spec(0).total)
        assert 0 < told <= cache.counters.failed and cache.counters.loads > 40
        cache.close()

# ---- stage

def test_fill_reads_only_what_is_nowhere(store):
    cache = cache_of(store, 12)
    stage = Stage(cache)
    cache.release(cache.acquire(0, [5, 6]))               # resident through the cache
    assert len(stage.fill(0, [5, 6, 7]).loads) == 1        # the stage takes them where they lie
    lease, _ = stage.take(0)
    stage.ready(lease)
    assert cache.counters.loads == 3
    assert stage.fill(0, [7, 5, 6]) is lease               # unchanged: the same object
    stage.take(0)
    stage.fill(0, [5, 6, 8])
    assert cache.counters.misses == 4
    lease, _ = stage.take(0)
    stage.ready(lease)
    cache.counters.check(store.spec(0).total)

def test_two_promises_are_taken_in_order(store):
    stage = Stage(cache_of(store, 12))
    a, b = stage.fill(1, [0, 1]), stage.fill(1, [2, 3])
    assert stage.take(1)[0] is a and stage.take(1)[0] is b and stage.take(1) == (None, None)

def test_promises_nobody_takes_do_not_pile_up(store):
    cache = cache_of(store, 12)
    stage = Stage(cache)
    for t in range(20): stage.fill(0, [t%E, (t + 1)%E])
    assert len(stage.rows[0].queue) == 2
    stage.reset()
    cache.check()
    assert not any(cache.held)

def test_double_holding_holds_twice(store, first_bytes):
    cache = cache_of(store, 12, hold='double')
    stage = Stage(cache)
    stage.fill(0, [1, 2, 3])
    lease, _ = stage.take(0)
    _, place = stage.ready(lease)
    assert sum(map(bool, cache.held)) == 6
    for e, s in place.items(): assert s != lease.place[e] and holds(cache, s) == first_bytes[0, e]
    stage.reset()
    cache.check()
    assert cache.counters.loads == 3 and not any(cache.held)

def test_layers_of_another_kind_get_another_arena(tmp_path, store):
    synth_experts(tmp_path, L=2, E=4, D=64, F=64, bits=8)
    class Mixed(Bad):
        layers = (0, 1, 2)
        def spec(self, layer): return self.bad['other'] if layer == 2 else self.store.spec(layer)
    with Checkpoint.open(tmp_path) as ck:
        other = ExpertStore(ck, threads=1)
        caches = open_caches(Mixed(store, {'other': other.spec(0)}), 9)
        assert len(caches.each()) == 2 and caches[0] is caches[1] and caches[2].arena.spec.bits == (8, 8, 8)
        assert caches[0].capacity == 6 and caches[2].capacity == 3
        assert caches[0].counters is caches[2].counters
        other.close()

# ---- Ctrl-C, and an expert said twice

def test_ctrl_c_in_a_wait_leaves_no_lease_that_only_looks_filled(store, first_bytes, monkeypatch):
    cache, real, gate = cache_of(store, 4), store.read_into, threading.Event()
    stage = Stage(cache)
    def slow(layer, e, rows):
        gate.wait()
        return real(layer, e, rows)
    def interrupted(load): raise KeyboardInterrupt
    with monkeypatch.context() as m:
        m.setattr(store, 'read_into', slow)
        stage.fill(0, [1, 2])
        lease, _ = stage.take(0)
        m.setattr(Load, 'wait', interrupted)
        with pytest.raises(KeyboardInterrupt): stage.ready(lease)
        assert len(lease.loads) == 2
        gate.set()
    stage.ready(lease)
    assert all(holds(cache, s) == first_bytes[0, e] for e, s in lease.place.items())
    stage.reset()
    cache.check()
    cache.close()

def test_ctrl_c_in_a_read_on_the_main_thread_frees_the_slot(store, first_bytes, monkeypatch):
    cache = cache_of(store, 4, fill_thread='main')
    def interrupted(layer, e, rows): raise KeyboardInterrupt
    with monkeypatch.context() as m:
        m.setattr(store, 'read_into', interrupted)
        with pytest.raises(KeyboardInterrupt): cache.acquire(0, [1, 2])
    lease = cache.acquire(0, [1, 2, 3, 4])
    assert all(holds(cache, s) == first_bytes[0, e] for e, s in lease.place.items())
    cache.release(lease)
    cache.check()
    cache.counters.check(store.spec(0).total)
    cache.close()

def test_an_expert_said_twice_has_one_slot(store):
    cache = cache_of(store, 4)
    for e in range(6):
        lease = cache.acquire(0, [e, e, e])
        assert len(set(lease.slots)) == 1
        cache.release(lease)
        cache.check()
    cache.close()

# ---- what was attacked in session 2

def test_pins_survive_lfu_and_come_back(store, first_bytes):
    rng, cache = np.random.default_rng(0), cache_of(store, 5, policy='lfu')
    cache.pin(0, 1); cache.pin(2, 3); cache.pin(2, 3)
    for _ in range(120):
        layer = int(rng.integers(L))
        cache.release(cache.acquire(layer, rng.permutation(E)[:int(rng.integers(1, 4))].tolist()))
        for key in ((0, 1), (2, 3)): assert holds(cache, cache.resident(*key)) == first_bytes[key]
        cache.check()
    cache.unpin(0, 1); cache.unpin(2, 3)
    with pytest.raises(ValueError, match='expert: 1 of layer 0 is not pinned'): cache.unpin(0, 1)
    for _ in range(6): cache.release(cache.acquire(1, [int(e) for e in rng.permutation(E)[:5]]))
    assert cache.resident(0, 1) is None and cache.resident(2, 3) is None
    for e in range(5): cache.pin(1, e)
    with pytest.raises(ValueError, match='do not fit; room for 0 of 5'): cache.acquire(0, [0])
    cache.close()

def test_least_frequently_used_against_the_obvious_model(store):
    rng, S, cache = np.random.default_rng(1), 6, cache_of(store, 6, policy='lfu')
    count, order = {}, []                       # order: least recent first
    for _ in range(200):
        key = int(rng.integers(L)), int(rng.integers(E)**2//E)
        count[key] = count.get(key, 0) + 1
        assert (cache.resident(*key) is not None) == (key in order)
        cache.release(cache.acquire(key[0], [key[1]]))
        if key in order: order.remove(key)
        elif len(order) == S: order.remove(min(order, key=count.__getitem__))
        order.append(key)
    assert {k for k in cache.owner if k is not None} == set(order)
    cache.close()

def test_a_policy_that_names_a_stranger_is_refused(store):
    class Wrong:
        def touch(self, key): pass
        def victim(self, keys): return 'nobody'
    cache = cache_of(store, 2, policy=Wrong())
    cache.release(cache.acquire(0, [0, 1]))
    with pytest.raises(ValueError, match="policy: victim\\(keys\\) gave 'nobody'; allowed: one of the 2 keys"): cache.acquire(0, [2])
    cache.check()
    cache.close()

@pytest.mark.parametrize('fill', FILLS)
def test_use_after_close_is_refused_and_starts_no_thread(store, fill):
    cache = cache_of(store, 6, fill=fill)
    stage = Stage(cache)
    stage.fill(0, [1, 2]); stage.ready(stage.take(0)[0])
    cache.pin(1, 1)
    before = {t for t in threading.enumerate() if t.name.startswith('edge0-fill')}
    cache.close()
    cache.close()
    for call in (lambda: cache.acquire(0, [1]), lambda: cache.acquire(0, [5]), lambda: stage.fill(0, [4, 5]), lambda: cache.pin(0, 3)):
        with pytest.raises(RuntimeError, match='the cache is closed'): call()
    with pytest.raises(RuntimeError, match='the arena is closed'): cache.arena.stack if fill != 'stack' else cache.arena.select([0])
    with pytest.raises(RuntimeError, match='the arena is closed'): cache.arena.rows(0)
    assert not {t for t in threading.enumerate() if t.name.startswith('edge0-fill')} - before and cache.resident(0, 1) is None
    assert not any(t.is_alive() for t in cache.readers.crew)

def test_pressure_in_one_arena_costs_the_other_nothing(tmp_path, store):
    # two specs, one stage: 4-bit layers 0 and 1, an 8-bit layer 2
    for name, bits in (('four', 4), ('eight', 8)): synth_experts(tmp_path/name, 3, E, 64, 64, bits=bits)
    a, b = (ExpertStore(Checkpoint.open(tmp_path/n), threads=1) for n in ('four', 'eight'))
    four, eight = LruCache(a, Arena(a.spec(0), 8)), LruCache(b, Arena(b.spec(0), 3))
    assert a.spec(0) != b.spec(0)
    stage = Stage({0: four, 1: four, 2: eight})
    hot = HotSet({0: four, 1: four, 2: eight}, 4)
    for layer in (0, 1): stage.fill(layer, [0, 1]); stage.ready(stage.take(layer)[0])
    held = stage.rows[0].now, stage.rows[1].now
    lease = four.acquire(0, [7]); hot.observe(0, lease); four.release(lease)
    stage.fill(2, [0, 1]); stage.ready(stage.take(2)[0])
    for t in range(6): eight.release(eight.acquire(2, [3 + t, 4 + t, 5 + t])) # needs every slot: layer 2's own set has to go
    assert (stage.rows[0].now, stage.rows[1].now) == held and stage.rows[2].now is None and list(hot.hot[0]) == [7]
    for cache in (four, eight): cache.check(); cache.close()
    for s in (a, b): s.close(); s.ck.close()

def test_slots_begin_on_a_cache_line(store):
    from edge0_lab.pool import address
    for S in (1, 3, 64):
        a = Arena(store.spec(0), S)
        assert a.fill == 'inplace' and all(address(r)%64 == 0 for r in a.rows(0))
        a.close()
