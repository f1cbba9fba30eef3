"""README.md from nbs/index.ipynb: markdown as it is, code fenced, text outputs indented, hidden cells left out.

    python tools/readme.py           write README.md
    python tools/readme.py --check   exit 1 if README.md differs from the page
"""
import os, re, sys
from pathlib import Path

import nbformat

ROOT = Path(__file__).resolve().parents[1]


def text_of(output):
    if output.output_type == 'stream': return output.text
    data = output.get('data', {})
    return data.get('text/markdown', data.get('text/plain', ''))


def cell_md(cell):
    if cell.cell_type == 'markdown': return cell.source
    if cell.cell_type != 'code' or cell.source.startswith(('#| hide', '#| default_exp', '#| exporti')): return ''
    if cell.source.startswith('#| echo: false'): return '\n'.join(text_of(o) for o in cell.outputs)
    source = '\n'.join(l for l in cell.source.splitlines() if not l.startswith('#|'))
    outputs = ''.join(text_of(o) for o in cell.outputs).rstrip()
    fenced = f'```python\n{source}\n```'
    return fenced + ('\n\n' + '\n'.join('    ' + l for l in outputs.splitlines()) if outputs else '')


def readme():
    page = nbformat.read(ROOT/'nbs'/'index.ipynb', 4)
    head = '<!-- made from nbs/index.ipynb by tools/readme.py; edit the page -->'
    text = '\n\n'.join([head] + [m for m in map(cell_md, page.cells) if m]) + '\n'
    return re.sub(r'\]\((?=(?:images|chapters)/|\d\d\w*\.ipynb)', '](nbs/', text)   # what lies beside the page lies in nbs for the README


def main(check=False):
    dest, text = ROOT/'README.md', readme()
    if check: return 0 if dest.exists() and dest.read_text(encoding='utf8') == text else 1
    part = dest.with_suffix('.md.part')
    part.write_text(text, encoding='utf8')
    os.replace(part, dest)
    return 0


if __name__ == '__main__':
    if main('--check' in sys.argv): sys.exit('README.md differs from nbs/index.ipynb: run python tools/readme.py')
