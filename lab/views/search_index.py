"""The words of each part of the site, for its search (reporting/pages/search.js).

A part is a view, or what follows an element with an id within it: a heading, or an entry that begins with its name.
"""

import collections
import re
from collections.abc import Iterable

PART = re.compile(r'<\w+ (?:[^<>]* )?id="[^<>]*>')  # search.js finds the same elements, in the same order
NO_PROSE = re.compile(r"(<(pre|figure|details|script)\b[^<>]*>).*?</\2>", re.DOTALL)  # its words are left out
WORD = re.compile(r"[^\W_]+")
COMMON = 0.2  # words of more than this share of all parts are left out


def index(views: Iterable[str]) -> str:
  """Each word with the parts that have it, from the views in their order.

  A line is a word, and the numbers of its parts to base 36: the first, and then the differences to the one before.
  """
  parts = [part for view in views for part in PART.split(NO_PROSE.sub(r"\1", view))[1:]]
  found: dict[str, list[int]] = collections.defaultdict(list)
  for number, part in enumerate(parts):
    for word in set(WORD.findall(re.sub(r"<[^>]*>|&\w+;", " ", part).lower())):
      if len(word) > 1 and not word.isdigit():
        found[word].append(number)
  kept = {word: numbers for word, numbers in sorted(found.items()) if len(numbers) <= COMMON * len(parts)}
  steps = lambda numbers: (b - a for a, b in zip([0, *numbers], numbers, strict=False))
  return "\n".join(f"{word} {' '.join(map(_base_36, steps(numbers)))}" for word, numbers in kept.items())


def _base_36(number: int) -> str:
  digits = ""
  while number or not digits:
    number, last = divmod(number, 36)
    digits = "0123456789abcdefghijklmnopqrstuvwxyz"[last] + digits
  return digits
