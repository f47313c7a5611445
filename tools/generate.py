"""Writes text with a trained model.

    python -m tools.generate WORKDIR_or_DIR --prompt="def " [--prompt=...] [--length=100] [--temperature=0.8] ...
    python -m tools.generate WORKDIR_or_DIR < prompts.txt        # a prompt a line
    python -m tools.generate WORKDIR_or_DIR --prompt=... --strategy=two_d --mesh=model=2
    python -m tools.generate WORKDIR_or_DIR --chat [--system="..."] [--prompt=...]     # a dialogue, a line a message

WORKDIR is that of a run, or one of its checkpoints; DIR is a model in the form of Hugging Face. Texts are written
together. The first one is shown while it is written, and each of the others when those before it are complete.

With --chat each prompt is a message of one dialogue, which the model answers before it reads the next. The model's chat
template writes the dialogue, as in training (data/text/chat.py).
"""

import argparse
import itertools
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np

from checkpointing.storage_logs import shorten_storage_logs
from data.dataset import Text
from data.text import spans, tokenizers
from errors import ConfigError, one_of, positive
from models.generate import Sampling
from reporting.source import Model, laid_out, mesh_of, open_model
from runtime import command_line
from runtime.devices import start_jax
from strategies import Strategy, names
from training.program import Params

UNIT = 64  # tokens of a dialogue: each message makes it longer, and each length is compiled


class Writing:
  """One text while it is written: its tokens, and where it stops.

  Attributes:
    ids: the tokens that were written.
    done: whether it is complete.
  """

  def __init__(self, text: Text, prompt: Sequence[int], stops: Sequence[str]):
    self.text, self.prompt, self.stops = text, list(prompt), stops
    self.ids, self.done = list[int](), False

  def decoded(self) -> str:
    """What was written. It is decoded behind the prompt, because some tokenizers drop a space that begins a text."""
    return self.text.decode(self.prompt + self.ids)[len(self.text.decode(self.prompt)) :]

  def add(self, token: int) -> None:
    """Adds a token, unless it ends the text."""
    if self.done:
      return
    if token in self.text.ends:
      self.done = True
      return
    self.ids.append(token)
    self.done = any(stop in self.decoded() for stop in self.stops)

  def shown(self) -> str:
    """The text so far: up to a stop string, and without the first bytes of an incomplete character."""
    found = self.decoded()
    for stop in self.stops:
      found = found.partition(stop)[0]
    if self.done:
      return found
    held = max((n for stop in self.stops for n in range(1, len(stop)) if found.endswith(stop[:n])), default=0)
    return found[: len(found) - held].rstrip("\N{REPLACEMENT CHARACTER}")


def write(
  strategy: Strategy,
  params: Params,
  text: Text,
  prompts: Sequence[Sequence[int]],
  *,
  length: int,
  sampling: Sampling,
  seed: int = 0,
  stops: Sequence[str] = (),
  unit: int = 1,
) -> Iterator[list[Writing]]:
  """Continues prompts, given as token ids, by `length` tokens at most. Yields the texts after each token.

  Arrays are padded to a multiple of `unit`, so that longer prompts may share their programs.
  """
  lengths = np.array([len(prompt) for prompt in prompts], np.int32)
  padded = np.zeros((len(prompts), -(-int(max(lengths)) // unit) * unit), np.int32)
  for row, prompt in zip(padded, prompts, strict=True):
    row[: len(prompt)] = prompt
  writings = [Writing(text, prompt, stops) for prompt in prompts]
  size = -(-(int(max(lengths)) + length) // unit) * unit
  texts = strategy.writing.begin(params, padded, lengths, size=size, seed=seed, sampling=sampling)
  for step in range(length):
    newest = texts.newest
    if step + 1 < length:
      texts = strategy.writing.extend(params, texts, sampling)  # dispatched, while this token is looked at
    for writing, token in zip(writings, np.asarray(newest), strict=True):
      writing.add(int(token))
    yield writings
    if all(writing.done for writing in writings):
      return
  for writing in writings:
    writing.done = True
  yield writings


def show(steps: Iterator[list[Writing]], prompts: Sequence[str], say: Callable[[str], object]) -> None:
  """Shows texts, each after its prompt: the first that is not complete as it is written, then the next."""
  at, shown = 0, -1
  for writings in steps:
    while at < len(writings):
      if shown < 0:
        say(prompts[at])
        shown = 0
      now = writings[at].shown()
      say(now[shown:])
      shown = max(shown, len(now))
      if not writings[at].done:
        break
      say("\n")
      at, shown = at + 1, -1


def encoded(model: Model, prompts: Sequence[str]) -> tuple[Text, list[list[int]]]:
  """The model's tokenizer, and the token ids of prompts. Raises ConfigError for a prompt without tokens."""
  text = model.reads_text().text
  if not prompts:
    raise ConfigError("prompt is missing; give one with --prompt=..., or a line of standard input")
  found = [text.encode(prompt) for prompt in prompts]
  for prompt, ids in zip(prompts, found, strict=True):
    if not ids:
      raise ConfigError(f"prompt={prompt!r} has no tokens; write at least one character")
    _check_known(model, ids, f"prompt={prompt!r}")
  return text, found


def _note_length(model: Model, size: int) -> None:
  if model.trained and size > model.trained:
    print(f"note: texts of up to {size} tokens, from a model that was made for {model.trained}", file=sys.stderr)


def _check_known(model: Model, ids: Sequence[int], where: str) -> None:
  """Raises ConfigError for a token that was added to the tokenizer, but not to the model."""
  if (known := model.config.model.vocab_size) and max(ids) >= known:
    raise ConfigError(f"{where} has token {max(ids)}, but the model knows {known}; leave this token out")


class Chatting:
  """A dialogue: what was said, and the tokens to go on from.

  Attributes:
    text: the tokenizer. What ends an answer ends a text.
    messages: what was said so far.
  """

  def __init__(self, model: Model, system: str | None):
    self._model, self._tokenizer = model, tokenizers.for_chat(model.reads_text())
    self.text = self._tokenizer.text
    self.messages = [] if system is None else [{"role": "system", "content": system}]

  def ask(self, said: str) -> list[int]:
    """Adds the user's message. Returns the tokens of the dialogue, up to where the answer begins."""
    self.messages.append({"role": "user", "content": said})
    written = spans.written(self._tokenizer.chat.prompt(self.messages))
    ids: list[int] = self._tokenizer.encode_spans([written])[0].ids.tolist()
    _check_known(self._model, ids, "the dialogue")
    return ids

  def answered(self, answer: str) -> None:
    self.messages.append({"role": "assistant", "content": answer})


def chat(model: Model, options: argparse.Namespace, sampling: Sampling, said: Iterable[str]) -> None:
  """Answers messages one by one, and shows each with its answer."""
  dialogue = Chatting(model, options.system)
  asked = ((message, dialogue.ask(message)) for message in said)  # each after the answer to the one before
  if (first := next(asked, None)) is None:
    raise ConfigError("prompt is missing; give one with --prompt=..., or a line of standard input")
  devices, size = start_jax(model.config), len(first[1]) + options.length
  strategy = laid_out(model, options.strategy, mesh_of(options.mesh), size, devices)
  params = model.load(strategy)
  for message, ids in itertools.chain([first], asked):
    size = len(ids) + options.length
    _note_length(model, size)
    steps = write(
      strategy, params, dialogue.text, [ids], length=options.length, sampling=sampling, seed=options.seed,
      stops=options.stop, unit=UNIT,
    )  # fmt: skip
    writings = next(steps)
    show(itertools.chain([writings], steps), [f"> {message}\n"], lambda part: print(part, end="", flush=True))
    dialogue.answered(writings[0].shown())


def main(arguments: list[str]) -> None:
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument("source", metavar="WORKDIR_or_DIR")
  parser.add_argument("--prompt", action="append", help="text to continue; may be repeated")
  parser.add_argument("--length", type=int, default=100, help="tokens to write, at most (default: 100)")
  parser.add_argument("--temperature", type=float, default=1.0, help="0: always the most likely token (default: 1)")
  parser.add_argument("--top-k", type=int, default=0, help="choose among so many tokens; 0: all (default)")
  parser.add_argument("--top-p", type=float, default=1.0, help="choose among tokens that are so likely together")
  parser.add_argument("--repetition-penalty", type=float, default=1.0, help="above 1: repeat less (default: 1)")
  parser.add_argument("--stop", action="append", default=[], help="a string that ends texts; may be repeated")
  parser.add_argument("--chat", action="store_true", help="answer each prompt as a message of one dialogue")
  parser.add_argument("--system", help="with --chat: the system's message, which begins the dialogue")
  parser.add_argument("--seed", type=int, default=0)
  parser.add_argument("--strategy", default="single", help="how the model is laid out (default: single)")
  parser.add_argument("--mesh", action="append", default=[], metavar="AXIS=SIZE", help="the size of a mesh axis")
  options = parser.parse_args(arguments)
  one_of("strategy", options.strategy, names())
  positive("length", options.length)
  sampling = Sampling(options.repetition_penalty, options.temperature, options.top_k, options.top_p).check()
  shorten_storage_logs()
  if options.system is not None and not options.chat:
    raise ConfigError(f"system={options.system!r} begins a dialogue; add --chat")
  model = open_model(options.source)
  if options.chat:
    chat(model, options, sampling, options.prompt or (line.rstrip("\n") for line in sys.stdin))
    return
  prompts = options.prompt or [line.rstrip("\n") for line in sys.stdin]
  text, ids = encoded(model, prompts)
  devices = start_jax(model.config)
  size = max(map(len, ids)) + options.length
  _note_length(model, size)
  strategy = laid_out(model, options.strategy, mesh_of(options.mesh), size, devices)
  params = model.load(strategy)
  steps = write(
    strategy, params, text, ids, length=options.length, sampling=sampling, seed=options.seed, stops=options.stop
  )
  show(steps, prompts, lambda part: print(part, end="", flush=True))


if __name__ == "__main__":
  with command_line.bad_input_ends_the_program():
    main(sys.argv[1:])
