import os, sys
from pathlib import Path

import pytest

import edge0_lab  # noqa: F401  loads the BLAS before MLX

os.environ.setdefault('IN_TEST', '1')
ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT/'tools'))


@pytest.fixture(scope='session')
def root(): return ROOT


FAMILY_SIZES = dict(qwen3_5_moe=dict(num_hidden_layers=4, num_experts=16, num_experts_per_tok=3), bailing_moe_v3={})


@pytest.fixture(scope='session', params=list(FAMILY_SIZES))
def folder(request, tmp_path_factory):
    "A small random model of each family, made once for all files of tests."
    from edge0_lab.synth import synth_family
    d = tmp_path_factory.mktemp(request.param)
    synth_family(request.param, d, **FAMILY_SIZES[request.param])
    return d


@pytest.fixture(scope='session')
def lab(folder):
    "It, opened once; a test that changes the lab itself opens its own."
    from edge0_lab.decode import Lab
    with Lab.open(folder) as lab: yield lab


@pytest.fixture(scope='session')
def qwen(tmp_path_factory):
    from edge0_lab.synth import synth_family
    d = tmp_path_factory.mktemp('qwen')
    synth_family('qwen3_5_moe', d, **FAMILY_SIZES['qwen3_5_moe'])
    return d


def pytest_terminal_summary(terminalreporter):
    "A skip without a reason must not pass unseen: the reasons are printed by -ra, and a bare one fails the run."
    for report in terminalreporter.stats.get('skipped', []):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        assert reason.strip() not in ('', 'Skipped', 'Skipped: unconditional skip'), f'{report.nodeid}: skipped without a reason'
