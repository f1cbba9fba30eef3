"The torch part of the tiny tiers' recipe: equal to transformers, resumable to the same losses, convertible. Needs the `train` extra."
import json, os, signal, subprocess, time
from pathlib import Path

import numpy as np
import pytest

import edge0_lab
from edge0_lab.tiny import train_python

ROOT = Path(__file__).resolve().parents[1]
SMALL = {'tiny-softmax': dict(vocab=256, hidden_size=64, num_hidden_layers=4, moe_intermediate_size=64, shared_expert_intermediate_size=64, num_experts=8, num_experts_per_tok=2),
         'tiny-sigmoid': dict(vocab=256, hidden_size=64, intermediate_size=128, num_hidden_layers=3, moe_intermediate_size=64, num_local_experts=16, num_experts_per_tok=2, n_group=4, topk_group=2)}
try: PYTHON, WHY = train_python(), ''
except RuntimeError as e: PYTHON, WHY = None, str(e)
pytestmark = pytest.mark.skipif(PYTHON is None, reason=WHY)
ENV = os.environ | dict(EDGE0_BLAS='off', PYTHONPATH=str(ROOT), OMP_NUM_THREADS='1', TRANSFORMERS_VERBOSITY='error')


@pytest.fixture(scope='module')
def tokens(tmp_path_factory):
    r, out = np.random.default_rng(0), {}
    for i, d in enumerate(('english', 'code', 'task')):
        for s, n in (('train', 6000), ('heldout', 600)): out[f'{s}/{d}'] = ((np.cumsum(r.integers(0, 3, n)) + 80*i) % 256).astype(np.uint16)
    path = tmp_path_factory.mktemp('tokens')/'tokens.npz'
    np.savez(path, **out)
    return path


def command(tier, run, tokens, *more):
    return [PYTHON, '-m', 'edge0_lab.tiny_train', '--tier', tier, '--run', str(run), '--tokens', str(tokens), '--config', json.dumps(SMALL[tier]), '--no-compile', '--every-loss',
            '--B', '4', '--T', '32', '--steps', '50', '--decay', '20', '--warmup', '5', '--save-every', '10', '--log-every', '1000', '--eval-every', '25', '--eval-rows', '2', *more]


def log(run): return [json.loads(l) for l in (run/'log.jsonl').read_text().splitlines()]


def losses(run): return {l['step']: l['loss'] for l in log(run) if 'loss' in l}


@pytest.mark.parametrize('tier, how', [('tiny-softmax', signal.SIGKILL), ('tiny-sigmoid', signal.SIGTERM)])
def test_killed_and_resumed_equals_uninterrupted(tier, how, tokens, tmp_path):
    subprocess.run(command(tier, tmp_path/'whole', tokens), env=ENV, check=True, capture_output=True)
    whole = losses(tmp_path/'whole')
    assert sorted(whole) == list(range(1, 51)) and whole[50] < whole[1] - 0.5
    held = [l for l in log(tmp_path/'whole') if 'heldout' in l]
    assert [l['step'] for l in held] == [25, 50] and held[1]['heldout']['all'] < held[0]['heldout']['all']
    p = subprocess.Popen(command(tier, tmp_path/'cut', tokens), env=ENV, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while not (tmp_path/'cut'/'state.pt').exists() or max(losses(tmp_path/'cut'), default=0) < 13:
        assert p.poll() is None, 'ended before it could be killed'
        time.sleep(0.01)
    p.send_signal(how); p.wait()
    first = losses(tmp_path/'cut')
    assert max(first) < 50, 'nothing was left to resume'
    subprocess.run(command(tier, tmp_path/'cut', tokens), env=ENV, check=True, capture_output=True)
    starts = [l['step'] for l in log(tmp_path/'cut') if l.get('event') == 'start']
    assert starts[0] == 0 and starts[1] >= 10
    assert losses(tmp_path/'cut') == whole


PARITY = '''
import json, sys, torch
from edge0_lab.tiny_models import FastForward, tiny_model
tier, over, out = sys.argv[1], json.loads(sys.argv[2]), {}
m = tiny_model(tier, **over).eval()
with torch.no_grad():
    for n, p in m.named_parameters():
        if p.ndim == 1 and 'norm' in n: p.add_(torch.randn_like(p)*0.1)
        if 'mlp.gate.weight' in n: p.mul_(5)
    for l in m.model.layers:
        if hasattr(getattr(l.mlp, 'gate', None), 'e_score_correction_bias'): l.mlp.gate.e_score_correction_bias.normal_(0, 0.05)
ids, y = torch.randint(0, 256, (2, 2, 64))
ref = m(ids).logits
torch.nn.functional.cross_entropy(ref.reshape(-1, 256), y.reshape(-1)).backward()
want = {n: p.grad.clone() for n, p in m.named_parameters()}
for c in (True, False):
    m.zero_grad()
    f = FastForward(m, tier, compile=False, c=c)
    ce, aux, z = f.loss(ids, y); ce.backward()
    out[str(c)] = dict(chunk=f.chunk, logits=(f.logits(ids) - ref).abs().max().item(), spread=ref.std().item(), aux=float(aux),
                       grads=max(((p.grad - want[n]).norm()/(want[n].norm() + 1e-6)).item() for n, p in m.named_parameters()))
print(json.dumps(out))
'''


@pytest.mark.parametrize('tier', list(SMALL))
def test_fast_forward_equals_transformers(tier):
    p = subprocess.run([PYTHON, '-c', PARITY, tier, json.dumps(SMALL[tier])], env=ENV, capture_output=True, text=True)
    assert p.returncode == 0, p.stderr[-3000:]
    for how, got in json.loads(p.stdout.splitlines()[-1]).items():
        assert got['logits'] < 1e-4 < got['spread'], (how, got)
        assert got['grads'] < 5e-3 and got['aux'] > 0.9, (how, got)


@pytest.mark.parametrize('tier', list(SMALL))
def test_export_converts_and_agrees(tier, tokens, tmp_path):
    from tokenizers import Tokenizer, models
    from edge0_lab.tiny_convert import convert_tiny, parity
    subprocess.run(command(tier, tmp_path/'run', tokens, '--steps', '5'), env=ENV, check=True, capture_output=True)
    subprocess.run(command(tier, tmp_path/'run', tokens, '--export', str(tmp_path/'export')), env=ENV, check=True, capture_output=True)
    Tokenizer(models.BPE()).save(str(tmp_path/'tokenizer.json'))
    convert_tiny(tier, tmp_path/'export', tmp_path/'out', tmp_path/'tokenizer.json')
    worst, spread = parity(tmp_path/'out')
    assert worst < 1e-4 < spread
    about = json.loads((tmp_path/'export'/'training.json').read_text())
    held = 3*2*32*SMALL[tier]['num_experts_per_tok']      # domains x rows x tokens x k: padding is not counted
    assert all(sum(l) == held for l in about['load'])
    assert about['step'] == 5 and set(about['heldout']) == {'english', 'code', 'task', 'all'}
