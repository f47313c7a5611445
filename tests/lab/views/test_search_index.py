"""The index of the site's search has each word of the prose, with the parts of the page that have it."""

from lab.views.search_index import index

VIEWS = [
  '<section id="a" class="view"><h2>Memory</h2><p>Sharded_state, of a <code>mesh</code>.</p></section>',
  '<section id="b" class="view"><h2>Speed &amp; more</h2><pre>hidden</pre><h3 id="b--x">A mesh</h3>'
  '<p>7 meshes: 1f1b</p><p id="b---y"><strong>Memory.</strong> Of a mesh</p>'
  '<figure id="z"><p>drawn</p></figure></section>',
]


def test_words_have_their_parts(monkeypatch):
  monkeypatch.setattr("lab.views.search_index.COMMON", 1.0)
  assert index(VIEWS).splitlines() == [
    "1f1b 2", "memory 0 3", "mesh 0 2 1", "meshes 2", "more 1", "of 0 3", "sharded 0", "speed 1", "state 0",
  ]  # fmt: skip


def test_words_of_many_parts_are_left_out(monkeypatch):
  monkeypatch.setattr("lab.views.search_index.COMMON", 0.5)
  assert {line.split()[0] for line in index(VIEWS).splitlines()} & {"mesh", "of"} == {"of"}


def test_numbers_are_differences_to_base_36(monkeypatch):
  monkeypatch.setattr("lab.views.search_index.COMMON", 1.0)
  views = [
    f'<section id="v{i}" class="view"><p>{"here" if i in (0, 35, 75) else "other"}</p></section>' for i in range(76)
  ]
  assert index(views).splitlines()[0] == "here 0 z 14"
