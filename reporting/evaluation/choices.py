"""Questions with several choices, answered by likelihood: the model chooses what it finds most likely to follow.

The score of a choice is the sum of the log-likelihoods of its tokens after the question. `accuracy` takes the choice
with the highest score. `accuracy_per_byte` divides scores by the bytes of the choice first, because longer choices are
less likely. These are `acc` and `acc_norm` of lm-evaluation-harness (process_results in lm_eval/api/task.py). Its
acc_norm divides by characters, which is the same for ASCII.
"""

import dataclasses
import itertools
import json
import string
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from data.text.tokenizers import Tokenizer
from errors import ConfigError, first_line
from strategies import Strategy
from training.program import Params

EXAMPLE = '{"question": "2 + 2 =", "choices": ["3", "4"], "answer": 1}'


@dataclasses.dataclass(frozen=True)
class Question:
  """A question, its choices, and the number of the right one, from 0. `where` is its place in the file, for errors."""

  question: str
  choices: tuple[str, ...]
  answer: int
  where: str


@dataclasses.dataclass(frozen=True)
class Scores:
  """The scores of all choices, one array for each question, and what follows from them."""

  questions: list[Question]
  scores: list[np.ndarray]

  @property
  def accuracy(self) -> float:
    """The share of questions in which the right choice has the highest score. Of equal ones the first counts."""
    return self._share(self.scores)

  @property
  def accuracy_per_byte(self) -> float:
    """The same with each score divided by the bytes of the choice."""
    sizes = [np.array([len(choice.encode()) for choice in q.choices]) for q in self.questions]
    return self._share([scores / size for scores, size in zip(self.scores, sizes, strict=True)])

  def _share(self, scores: list[np.ndarray]) -> float:
    right = [int(s.argmax()) == q.answer for q, s in zip(self.questions, scores, strict=True)]
    return sum(right) / len(right)


def read(path: str) -> list[Question]:
  """The questions in a file of JSON lines. Raises ConfigError, naming line and field, for one that is not complete."""
  try:
    lines = Path(path).expanduser().read_text(encoding="utf-8").split("\n")
  except (OSError, UnicodeDecodeError) as error:
    raise ConfigError(f"choices={path!r} cannot be read ({first_line(error)}); name a file of JSON lines") from error
  numbered = [(f"line {number} of {path!r} in choices", line) for number, line in enumerate(lines, 1)]
  found = [_question(line, where) for where, line in numbered if line.strip()]
  if not found:
    raise ConfigError(f"choices={path!r} holds no question; write lines such as {EXAMPLE}")
  return found


def _question(line: str, where: str) -> Question:
  try:
    fields = json.loads(line)
  except (ValueError, RecursionError) as error:
    raise ConfigError(f"{where} is not valid JSON ({first_line(error)}); correct it") from error
  for name in ("question", "choices", "answer"):
    if not isinstance(fields, dict) or name not in fields:
      raise ConfigError(f"{where} has no field {name!r}; write it as {EXAMPLE}")
  question, choices = fields["question"], fields["choices"]
  if not isinstance(question, str):
    raise ConfigError(f"{where} has question={_short(question)}; use text")
  if not isinstance(choices, list) or len(choices) < 2:
    raise ConfigError(f"{where} has choices={_short(choices)}; use a list of at least two texts")
  for choice in choices:
    if not isinstance(choice, str) or not choice.strip():
      raise ConfigError(f"{where} has {_short(choice)} in choices; use text that is not empty")
  return Question(question, tuple(choices), _answer(fields["answer"], choices, where), where)


def _answer(answer: Any, choices: list[str], where: str) -> int:
  """The number of the right choice: given as such, as the choice's text, or as a letter."""
  letters = string.ascii_uppercase[: len(choices)]
  if isinstance(answer, int) and not isinstance(answer, bool) and 0 <= answer < len(choices):
    return answer
  if isinstance(answer, str) and answer in choices:
    return choices.index(answer)
  if isinstance(answer, str) and len(answer) == 1 and answer in letters:
    return letters.index(answer)
  raise ConfigError(
    f"{where} has answer={_short(answer)}; use the number of the right choice, 0 to {len(choices) - 1}, its letter, or "
    "its text"
  )


def _short(value: Any) -> str:
  return repr(value)[:50]


@dataclasses.dataclass(frozen=True)
class Answer:
  """A question and one choice as tokens, of which the first `before` are not the choice's."""

  tokens: list[int]
  before: int


def rows(questions: Sequence[Question], tokenizer: Tokenizer, *, between: str, longest: int) -> list[Answer]:
  """A row for each choice of each question, in order.

  `between` is put between question and choice, unless one of them has a space there. The two are encoded together,
  because a tokenizer may join characters of both. The choice begins where these tokens differ from those of the
  question alone. There the question is without spaces at its end, because many tokenizers begin a word with the space
  before it. Names of special tokens stand for these tokens, as in prompts. If nothing is before the choice, the END
  token is put there.

  Raises ConfigError for a row of more than `longest` tokens and one.
  """
  own = [q for q in questions for _ in q.choices]
  wholes = [_join(q.question, choice, between).encode() for q in questions for choice in q.choices]
  alone = tokenizer.encode_prompts([q.question.rstrip().encode() for q in own])
  found = []
  for question, whole in zip(alone, tokenizer.encode_prompts(wholes), strict=True):
    same = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(question.tolist(), whole.tolist(), strict=False))
    shared = min(sum(1 for _ in same), len(whole) - 1)  # a choice has at least one token
    before = [] if shared else [tokenizer.end]
    found.append(Answer([*before, *whole.tolist()], len(before) + shared))
  at, size = max(enumerate(len(row.tokens) for row in found), key=lambda each: each[1])
  if size > longest + 1:
    raise ConfigError(
      f"{own[at].where} has a choice that makes {size} tokens with its question, and seq-len={longest} allows "
      f"{longest + 1}; shorten it, or use --seq-len={size - 1}"
    )
  return found


def _join(question: str, choice: str, between: str) -> str:
  has_space = not question or question[-1].isspace() or choice[0].isspace()
  return question + choice if has_space else question + between + choice


def score(strategy: Strategy, params: Params, questions: list[Question], found: list[Answer], *, tokens: int) -> Scores:
  """Scores the rows of questions, in batches of about this many tokens."""
  scores = np.zeros(len(found))
  for numbers, length in _batches(found, strategy.program.sizes.seq_len, tokens, strategy.layout.shards("batch")):
    padded, counted = np.zeros((len(numbers), length + 1), np.int32), np.zeros((len(numbers), length + 1), bool)
    for place, number in enumerate(numbers):
      row = found[number]
      padded[place, : len(row.tokens)] = row.tokens
      counted[place, row.before : len(row.tokens)] = True
    scores[numbers] = np.asarray(strategy.writing.log_likelihoods(params, padded, counted))
  ends = np.cumsum([len(q.choices) for q in questions])
  return Scores(questions, np.split(scores, ends[:-1]))


def _batches(found: list[Answer], longest: int, tokens: int, unit: int) -> Iterator[tuple[list[int], int]]:
  """The numbers of the rows in each batch, and the length to which it is padded.

  Rows of similar length are together, the longest first. Lengths are powers of two, because each is compiled. A batch
  has a multiple of `unit` rows; the last row of a length is repeated for that.
  """
  length_of = lambda row: min(longest, max(8, 1 << (len(row.tokens) - 2).bit_length()))
  for length in sorted({length_of(row) for row in found}, reverse=True):
    mine = [number for number, row in enumerate(found) if length_of(row) == length]
    size = -(-min(len(mine), max(1, tokens // length)) // unit) * unit
    mine += [mine[-1]] * (-len(mine) % size)
    yield from ((mine[first : first + size], length) for first in range(0, len(mine), size))
