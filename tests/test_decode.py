"Decode on small random models made here: every path gives the same bits."
import mlx.core as mx
import numpy as np
import pytest

from edge0_lab.decode import RunConfig

PROMPT = [5, 17, 3, 29, 42]


def first_logits(lab, run, prompt=PROMPT, n=1):
    with lab.prefill(prompt, run) as s:
        out = []
        for _ in range(n):
            lab.step(s)
            out.append(np.array(s.logits.astype(mx.float32)))
        return s.tokens, np.stack(out)


def test_paths_and_resident_give_the_same_64_tokens(lab):
    want = lab.generate(PROMPT, 64, RunConfig(decode='resident'), stop=())
    assert len(want.tokens) == 64 and want.trace.layers == ()
    for decode, prefill in (('staged', 'whole-layer'), ('exact', 'exact'), ('hot', 'hot'), ('whole-layer', 'whole-layer')):
        out = lab.generate(PROMPT, 64, RunConfig(decode=decode, prefill=prefill), stop=())
        assert out.tokens == want.tokens, decode
        assert out.trace.total('drops') == 0 and set(out.trace.path[:, lab.moe_layers].ravel()) == {decode}
        assert (out.trace.ids[:, lab.moe_layers] >= 0).all() and (out.trace.predicted_ids == -1).all()


@pytest.mark.case(9)
def test_paths_give_the_same_bits(lab):
    "One kernel, any path, any fill, any mix: bit-equal logits. The hot set is smaller than what the prompt uses."
    tokens, want = first_logits(lab, RunConfig(decode='exact'), n=12)
    mixed = dict(zip(lab.moe_layers, ('hot', 'whole-layer', 'exact', 'staged')))
    for run in (RunConfig(), RunConfig(decode='hot', hot_slots=2), RunConfig(decode='whole-layer'), RunConfig(paths=mixed), RunConfig(prefill='exact'), RunConfig(prefill='hot', hot_slots=1),
                RunConfig(fill='patch'), RunConfig(fill='stack'), RunConfig(fill_thread='main'), RunConfig(hold='double'), RunConfig(policy='lfu'), RunConfig(throttle=(1e-4, 1e9))):
        got = first_logits(lab, run, n=12)
        assert got[0] == tokens and (got[1] == want).all(), run
    chunked = first_logits(lab, RunConfig(prefill_chunk=2), n=12)      # other shapes in attention: close, not equal
    assert chunked[0] == tokens and np.linalg.norm(chunked[1] - want)/np.linalg.norm(want) < 1e-4


def test_resident_logits_are_close(lab):
    want = np.array(lab.logits(PROMPT, RunConfig(decode='resident')))
    got = np.array(lab.logits(PROMPT, RunConfig()))
    assert got.shape == (len(PROMPT), lab.vocab)
    assert np.linalg.norm(got - want)/np.linalg.norm(want) < 0.01


@pytest.mark.case(14)
def test_more_experts_than_slots(lab):
    tokens, want = first_logits(lab, RunConfig(decode='exact'), n=6)
    for run in (RunConfig(decode='exact', cache_slots=1, prefill='exact'), RunConfig(stage_slots=1, cache_slots=0), RunConfig(decode='hot', hot_slots=1, cache_slots=0)):
        with lab.prefill(PROMPT, run) as s:
            got = [(lab.step(s), np.array(s.logits))[1] for _ in range(6)]
            assert s.tokens == tokens and (np.stack(got) == want).all() and s.counters.drops == 0
    with pytest.raises(ValueError, match='k: 99'): lab.generate(PROMPT, 1, RunConfig(k=99))


@pytest.mark.case(8)
def test_k_is_of_the_run(lab):
    native = lab.native_k
    one, every = lab.generate(PROMPT, 4, RunConfig(k=1), stop=()), lab.generate(PROMPT, 4, RunConfig(k=native), stop=())
    assert one.trace.ids.shape[-1] == 1 and every.trace.ids.shape[-1] == native
    assert all(b.k == native for b in lab.loaded.blocks.values())
    with pytest.raises(ValueError, match="k: 1; allowed: None"): lab.generate(PROMPT, 1, RunConfig(k=1, decode='resident'))


@pytest.mark.case(12)
@pytest.mark.case(32)
@pytest.mark.parametrize('prompt', [[7], [7, 7], [7, 7, 7], [1, 2, 3, 4], PROMPT])
def test_first_steps_after_any_short_prompt(lab, prompt):
    for prerouter in (False, 'next-gate', 'previous'):
        a, b = (first_logits(lab, RunConfig(decode=d, prerouter=prerouter), prompt, 4) for d in ('exact', 'staged'))
        assert a[0] == b[0] and (a[1] == b[1]).all(), prerouter
