"""The site, from the pages, offline: nbdev's processing, figures that move, formulas without a script, links checked.

    python tools/docs.py          build _docs
    python tools/docs.py --check  check the links of what was built

nbdev's `proc_nbs` documents what a page exports; smalldocs lays the pages out. Between the two: a plotly output becomes a figure
drawn by one shared plotly.min.js, a formula becomes MathML, the name of a page in the text becomes a link.
"""
import html, json, os, re, shutil, subprocess, sys
from functools import partialmethod
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urldefrag, urlparse

import nbformat

ROOT = Path(__file__).resolve().parents[1]
PROC, SITE = ROOT/'_proc', ROOT/'_docs'
PLOTLY = 'application/vnd.plotly.v1+json'
DRAW = "for (const s of document.querySelectorAll('script.edge0-figure')) { const f = JSON.parse(s.textContent); Plotly.newPlot(s.previousElementSibling, f.data, f.layout, {displaylogo: false}); }"


def pages():
    "Every page below _proc, in the order of the sidebar: index, chapters, rooms."
    found = [p.relative_to(PROC) for p in PROC.rglob('*.ipynb')]
    return sorted(found, key=lambda p: (p.name != 'index.ipynb', p.parent == Path('.'), str(p)))


def title(page):
    head = next((c.source for c in nbformat.read(PROC/page, 4).cells if c.cell_type in ('markdown', 'raw')), '')
    said = re.search(r'^(?:# |title: )\s*["\']?(.+?)["\']?\s*$', head, re.M)
    return said[1] if said else page.stem


def figure(data, up, first):
    "A plotly output as HTML; the library is named once a page."
    lay = data.get('layout', {})
    size = f"width:{lay.get('width', 640)}px;height:{lay.get('height', 320)}px"
    lib = f'<script src="{up}plotly.min.js"></script>' if first else ''
    text = json.dumps(dict(data=data['data'], layout=lay), separators=(',', ':')).replace('</', '<\\/')
    return f'{lib}<div style="{size}"></div><script type="application/json" class="edge0-figure">{text}</script>'


def formulas(text):
    "Dollar formulas as MathML, outside code."
    from latex2mathml.converter import convert
    def one(m): return convert(m[1] or m[2], display="block" if m[1] else "inline")
    parts = re.split(r'(```.*?```|`[^`\n]*`)', text, flags=re.S)
    return ''.join(p if i % 2 else re.sub(r'\$\$(.+?)\$\$|(?<![\\$])\$(?=\S)([^$\n]+?)(?<=\S)\$(?![\w$])', one, p, flags=re.S) for i, p in enumerate(parts))


def linked(text, page, known):
    "Names of pages in the text, such as `02_int4`, as links."
    up = '../'*(len(page.parts) - 1)
    def one(m):
        name = m[1].removeprefix('chapters/')
        return f'[{m[0]}]({up}{known[name]})' if name in known and known[name] != str(page) else m[0]
    return re.sub(r'(?<![\[`])`([\w/]+)`(?![`\]])', one, text)


def prepare(page, known):
    "What smalldocs does not do."
    nb, up, first = nbformat.read(PROC/page, 4), '../'*(len(page.parts) - 1), True
    for cell in nb.cells:
        if cell.cell_type == 'markdown': cell.source = linked(formulas(cell.source), page, known)
        for o in cell.get('outputs', []):
            if PLOTLY not in o.get('data', {}): continue
            o.data['text/html'] = figure(o.data.pop(PLOTLY), up, first)
            first = False
    if not first: nb.cells.append(nbformat.v4.new_raw_cell(f'```{{=html}}\n<script>{DRAW}</script>\n```'))
    nbformat.write(nb, PROC/page)
    return not first


def sidebar(known):
    "Contents of the sidebar: the start, the chapters, the rooms by number."
    groups = {'Start': [p for p in pages() if p.name == 'index.ipynb'], 'Chapters': [p for p in pages() if p.parts[0] == 'chapters']}
    groups['Rooms'] = [p for p in pages() if len(p.parts) == 1 and p.name != 'index.ipynb']
    return [dict(section=name, contents=[dict(text=f"{p.stem.split('_')[0]}  {title(p)}" if name == 'Rooms' else title(p), href=str(p)) for p in ps]) for name, ps in groups.items() if ps]


def _execute(self, cell, was=None):
    "nbdev's execution of exported cells, for the tables of arguments; a page whose exports need a package that is not here (torch lives in .venv-train) goes without, and that is said."
    if getattr(self, 'left', False): return
    try: was(self, cell)
    except Exception as e:
        if not isinstance(e.__cause__, ModuleNotFoundError): raise
        self.left = True
        print(f"docs: {self.nb.frontmatter_.get('title')}: no tables of arguments, {e.__cause__}")


def build():
    import plotly
    from nbdev import processors
    from nbdev.serve import proc_nbs
    shutil.rmtree(PROC, ignore_errors=True)
    os.chdir(ROOT/'nbs')                                     # where pages run
    processors._do_eval = lambda cell: cell.cell_type == 'code' and bool({'export', 'exporti'} & set(cell.directives_) or 'show_doc(' in cell.source)   # not a lesson's cell that happens to import: its outputs stand in the page
    processors.exec_show_docs.__call__ = partialmethod(_execute, was=processors.exec_show_docs.__call__)
    proc_nbs(n_workers=0)                                    # in this process, which knows the line above
    if (ROOT/'nbs'/'images').is_dir(): shutil.copytree(ROOT/'nbs'/'images', PROC/'images', dirs_exist_ok=True)
    known = {p.stem: str(p) for p in pages()}
    drawn = sum(prepare(p, known) for p in pages())
    shutil.copy(Path(plotly.__file__).parent/'package_data'/'plotly.min.js', PROC/'plotly.min.js')
    config = dict(project={'type': 'website', 'output-dir': str(SITE), 'resources': ['plotly.min.js', 'images/*']},
                  website=dict(title='edge0_lab', sidebar=dict(style='docked', contents=sidebar(known))), format=dict(html=dict(toc=True)))
    (PROC/'_smalldocs.yml').write_text(json.dumps(config, indent=1), encoding='utf8')        # JSON is YAML
    subprocess.run([str(Path(sys.executable).parent/'smalldocs'), 'render', '--quiet', str(PROC)], check=True, cwd=ROOT)
    print(f'docs: {len(known)} pages, {drawn} with figures, in {SITE.relative_to(ROOT)}')


class Links(HTMLParser):
    "Every address of a page, and every name in it."
    def __init__(self): super().__init__(); self.to, self.loads, self.ids = [], [], set()
    def handle_starttag(self, tag, attrs):
        a = dict(attrs)
        if a.get('id'): self.ids.add(a['id'])
        if tag == 'a' and a.get('href'): self.to.append(a['href'])
        if tag in ('img', 'script', 'iframe') and a.get('src'): self.loads.append(a['src'])
        if tag == 'link' and a.get('href') and a.get('rel') in ('stylesheet', 'icon', 'preload'): self.loads.append(a['href'])


def check(site=SITE):
    "What is wrong with the links of a site: a list of sentences. A page may name another site; it may not load from one."
    read, wrong = {}, []
    for p in site.rglob('*.html'):
        read[p.resolve()] = links = Links()
        links.feed(p.read_text(encoding='utf8'))
    for p, links in read.items():
        for to in links.to + links.loads:
            if urlparse(to).scheme or to.startswith('//'):
                if to in links.loads and not to.startswith('data:'): wrong.append(f'{p.name}: loads {to}, not offline')
                continue
            path, part = urldefrag(unquote(to).split('?')[0])
            dest = (p.parent/path).resolve() if path else p
            if dest.is_dir(): dest = dest/'index.html'
            if not dest.exists(): wrong.append(f'{p.name}: {to} leads nowhere')
            elif part and dest in read and part not in read[dest].ids: wrong.append(f'{p.name}: {to} has no such place')
    if not read: wrong.append(f'{site.name}: no page')
    return wrong


if __name__ == '__main__':
    if '--check' not in sys.argv: build()
    wrong = check()
    if wrong: sys.exit('docs: ' + '\n'.join(wrong))
    print('docs: every link leads somewhere, nothing is loaded from elsewhere')
