"The site's own steps on small pages: formulas, links of pages, figures, and a link checker that fails when it should."
import docs


def test_formulas_become_mathml_outside_code():
    said = docs.formulas('a $x^2$ b `$y$` c\n```\n$z$\n```\n$$\\frac{1}{k}$$ and 3 $ or 4 $')
    assert said.count('<math') == 2 and '`$y$`' in said and '$z$' in said and 'display="block"' in said and said.endswith('3 $ or 4 $')


def test_names_of_pages_become_links():
    from pathlib import Path
    known = {'02_int4': '02_int4.ipynb', 'one_token': 'chapters/one_token.ipynb'}
    assert docs.linked('see `02_int4` and `x`', Path('01_routing.ipynb'), known) == 'see [`02_int4`](02_int4.ipynb) and `x`'
    assert docs.linked('`one_token`, `02_int4`', Path('chapters/a.ipynb'), known) == '[`one_token`](../chapters/one_token.ipynb), [`02_int4`](../02_int4.ipynb)'
    assert docs.linked('`02_int4`', Path('02_int4.ipynb'), known) == '`02_int4`'


def test_a_figure_cannot_end_its_own_script():
    said = docs.figure(dict(data=[dict(name='</script>')], layout=dict(width=500)), '../', True)
    assert said.count('</script>') == 2 and 'src="../plotly.min.js"' in said and 'width:500px' in said


def test_broken_links_and_foreign_scripts_are_found(tmp_path):
    (tmp_path/'sub').mkdir()
    (tmp_path/'a.html').write_text('<p id="here"></p><a href="sub/b.html#there">x</a><a href="#here">y</a><a href="https://example.com">z</a>')
    (tmp_path/'sub'/'b.html').write_text('<p id="there"></p><a href="../a.html">x</a>')
    assert docs.check(tmp_path) == []
    (tmp_path/'sub'/'b.html').write_text('<a href="../c.html">x</a><script src="https://example.com/x.js"></script><img src="no.png">')
    wrong = docs.check(tmp_path)
    assert sum('leads nowhere' in w for w in wrong) == 2 and sum('not offline' in w for w in wrong) == 1 and sum('no such place' in w for w in wrong) == 1
    assert docs.check(tmp_path/'nothing')


def test_every_relative_link_of_the_readme_leads_somewhere(root):
    import re
    to = re.findall(r'\]\(([^)#]+)', (root/'README.md').read_text(encoding='utf8'))
    inside = [t for t in to if '://' not in t]
    assert len(inside) >= 10 and [t for t in inside if not (root/t).exists()] == []
