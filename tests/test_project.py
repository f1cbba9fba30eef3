"The project as a package: wheel and editable install carry what the lab reads; settings refuse by section and key; no stray addresses."
import json, os, re, subprocess, sys, zipfile
from pathlib import Path

import pytest

from edge0_lab.settings import lab_defaults, tier, tiers

ROOT = Path(__file__).resolve().parents[1]
tracked = lambda: subprocess.run(['git', 'ls-files'], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split('\n')[:-1]


def python(code, **kw): return subprocess.run([sys.executable, '-c', code], capture_output=True, text=True, **kw)


def test_wheel_works_from_any_folder(tmp_path):
    pip = [sys.executable, '-m', 'pip', '--disable-pip-version-check', '-q']
    subprocess.run([*pip, 'wheel', '--no-deps', '--no-build-isolation', '-w', str(tmp_path), str(ROOT)], check=True, capture_output=True)
    wheel = next(tmp_path.glob('*.whl'))
    inside = zipfile.ZipFile(wheel).namelist()
    assert 'edge0_lab/settings.ini' in inside
    assert sorted(n.removeprefix('edge0_lab/') for n in inside if n.startswith('edge0_lab/data/')) == sorted(n for n in tracked() if n.startswith('data/'))
    subprocess.run([*pip, 'install', '--no-deps', '--target', str(tmp_path/'site'), str(wheel)], check=True, capture_output=True)
    code = 'import edge0_lab, sys; from edge0_lab.settings import tiers, data_path; print(edge0_lab.__file__); print(data_path()); print(sorted(tiers()))'
    p = python(code, cwd=tmp_path, env=os.environ | dict(PYTHONPATH=str(tmp_path/'site')))
    where, data, names = p.stdout.splitlines()
    assert where.startswith(str(tmp_path)) and data.startswith(str(tmp_path)) and 'edge0-35b' in names, p.stderr


def test_editable_works_from_any_folder(tmp_path):
    p = python('from edge0_lab.settings import data_path; print(data_path())', cwd=tmp_path)
    assert Path(p.stdout.strip()) == ROOT/'data', p.stderr


def test_import_order_is_told():
    p = python('import mlx.core, edge0_lab')
    assert sys.platform != 'linux' or 'import edge0_lab first' in p.stderr


def test_overrides(monkeypatch, tmp_path):
    monkeypatch.setenv('EDGE0_35B', str(tmp_path))
    assert tier('edge0-35b').checkpoint == tmp_path
    monkeypatch.setenv('EDGE0_LAB_DATA', str(tmp_path/'d'))
    assert tier('tiny-softmax').checkpoint == tmp_path/'d'/'tiny-softmax'


SETTINGS = (ROOT/'settings.ini').read_text()


@pytest.mark.parametrize('old, new, section, key', [
    ('served_k = 8, 4, 2', 'served_k = 8; 4', 'tier tiny-softmax', 'served_k'),
    ('lora_alpha = 32', 'lora_alpha = 3.5', 'tier tiny-softmax', 'lora_alpha'),
    ('lora_alpha = 32', 'lora_alfa = 32', 'tier tiny-softmax', 'lora_alfa'),
    ('cache_slots = 64', 'cache_slots = 0', 'tier tiny-softmax', 'cache_slots'),
    ('owners = 6..38', 'owners = 38..6', 'tier edge0-35b', 'owners'),
    ('owners = 6..38', 'owners = 6, 6, 7..38', 'tier edge0-35b', 'owners'),
    ('start_layer = 7', 'start_layer = 9', 'tier edge0-35b', 'start_layer'),
    ('k = 4\n', 'k = 5\n', 'tier edge0-35b', 'k'),
    ('temperature = 0.0', 'temperature = warm', 'lab', 'temperature'),
    ('temperature = 0.0', 'temperature = nan', 'lab', 'temperature'),
    ('temperature = 0.0', 'temperature = inf', 'lab', 'temperature'),
    ('owners = 1..6\nconsumers = 2..7', 'owners = 6..1\nconsumers = 7..2', 'tier tiny-softmax', 'owners'),
    ('checkpoint = tiny-softmax', 'checkpoint =', 'tier tiny-softmax', 'checkpoint'),
    ('served_k = 8, 4, 2', 'served_k = 8, 8', 'tier tiny-softmax', 'served_k'),
    ('owners = 6..38', 'owners = 6..999999999999', 'tier edge0-35b', 'owners'),
    ('hold = single', 'hold = triple', 'lab', 'hold'),
    ('hold = single', 'holding = single', 'lab', 'holding'),
])
def test_wrong_settings_are_refused(old, new, section, key, tmp_path):
    assert old in SETTINGS
    p = tmp_path/'settings.ini'
    p.write_text(SETTINGS.replace(old, new, 1))
    with pytest.raises(ValueError, match=rf'\[{section}\] {key}\b'):
        tiers(p), lab_defaults(p)


@pytest.mark.parametrize('name', ['tier  tiny-softmax', 'tier '])
def test_a_tier_has_a_name_of_its_own(name, tmp_path):
    p = tmp_path/'settings.ini'
    p.write_text(SETTINGS.replace('[tier tiny-sigmoid]', f'[{name}]'))
    with pytest.raises(ValueError, match=rf'\[{name}\].*allowed'): tiers(p)


@pytest.mark.parametrize('text', ['', 'k = 3', '[tier a]\n[tier a]', '[lab]\nseed = 0\nseed = 1', '[oven]\nx = 1', '[DEFAULT]\nseed = 0'])
def test_unparsable_settings_are_refused(text, tmp_path):
    p = tmp_path/'settings.ini'
    p.write_text(text)
    with pytest.raises(ValueError, match='settings'): lab_defaults(p)


def test_a_settings_file_that_is_not_there_is_named(monkeypatch, tmp_path):
    with pytest.raises(FileNotFoundError, match=r'^settings: none\.ini is no file; allowed'): tiers(tmp_path/'none.ini')
    monkeypatch.setenv('EDGE0_LAB_SETTINGS', str(tmp_path/'none.ini'))
    with pytest.raises(FileNotFoundError, match=r'^EDGE0_LAB_SETTINGS: none\.ini is no file; allowed'): tiers()


def test_no_registry_address_and_no_machine_path():
    host = re.compile('|'.join(a + r'\.' + b for a, b in [('pypi', 'org'), ('pythonhosted', 'org'), ('npmjs', 'org'), ('debian', 'org')]))
    for name in tracked():
        p = ROOT/name
        if p.suffix in ('.safetensors', '.png', '.npz') or not p.is_file(): continue
        text = p.read_text(encoding='utf8', errors='ignore')
        assert not host.search(text), f'{name} names a registry host'
        if name != 'tests/test_pages.py': assert not re.search(r'/(?:work|root)/[a-z.]|/home/[a-z]+/|/tmp/[a-z]', text), f'{name} names a path of one machine'


def test_first_import_is_fast():
    "Only that nothing heavy is pulled in: seconds are for `bench`, modules are countable."
    p = python('import edge0_lab.settings, sys; print([m for m in ("mlx.core", "numba", "transformers", "torch", "mlx_lm") if m in sys.modules])')
    assert p.stdout.strip() == '[]', p.stderr
