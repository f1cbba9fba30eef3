import os, sys
from pathlib import Path

import pytest

import edge0_lab  # noqa: F401  loads the BLAS before MLX

os.environ.setdefault('IN_TEST', '1')
ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT/'tools'))


@pytest.fixture(scope='session')
def root(): return ROOT


def pytest_terminal_summary(terminalreporter):
    "A skip without a reason must not pass unseen: the reasons are printed by -ra, and a bare one fails the run."
    for report in terminalreporter.stats.get('skipped', []):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        assert reason.strip() not in ('', 'Skipped', 'Skipped: unconditional skip'), f'{report.nodeid}: skipped without a reason'
