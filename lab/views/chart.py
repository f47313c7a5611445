"""Draws a flow chart of questions as nested lists: a box for each question, its answers below it, and lines between.

The source is Mermaid's `flowchart`, which GitHub draws too. A node is `name` or `name{"question"}`, an arrow
`node -- "answer" --> node`. Every node but the first has one arrow to it.
"""

import re
from collections.abc import Mapping
from html import escape

from reporting.pages.element import tag

_NODE = r'(\w+)(?:\{"(.*?)"\})?'
_LINE = re.compile(rf'{_NODE}(?: (?:-- "(.*?)" )?--> {_NODE})?')


def chart(source: str, links: Mapping[str, str]) -> str:
  """The chart as HTML.

  Args:
    source: Mermaid's text; its first line is the kind of chart.
    links: the address of each node that has one.

  Raises ValueError for a line of another form, and for a second arrow to a node.
  """
  questions: dict[str, str] = {}
  children: dict[str, list[tuple[str, str]]] = {}  # the answers of each node, in order, with where they lead
  parents: dict[str, str] = {}
  for line in filter(None, map(str.strip, source.splitlines()[1:])):
    if not (found := _LINE.fullmatch(line)):
      raise ValueError(f"the line {line!r} of a chart is not a node or an arrow")
    start, asks, answer, end, then_asks = found.groups()
    questions |= {name: text for name, text in ((start, asks), (end, then_asks)) if text}
    children.setdefault(start, [])
    if end:
      if end in parents:
        raise ValueError(f"the node {end!r} of a chart has arrows from {parents[end]!r} and from {start!r}; leave one")
      parents[end] = start
      children[start].append((answer or "", end))

  def drawn(name: str, answer: str = "") -> str:
    said = tag("span", escape(answer), class_="answer") if answer else ""
    named = tag("a", escape(name), href=links[name]) if name in links else escape(questions.get(name, name))
    box = tag("span", named, class_="question" if name in questions else "result")
    below = "".join(drawn(end, answer) for answer, end in children.get(name, []))
    return tag("li", said, box, tag("ul", below) if below else "")

  return tag("ul", *(drawn(name) for name in children if name not in parents), class_="chart")
