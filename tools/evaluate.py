"""Measures a trained model on any text, or on questions with several choices.

    python -m tools.evaluate WORKDIR_or_DIR --data.path=FILE_OR_FOLDER        # loss, perplexity and bits a byte
    python -m tools.evaluate WORKDIR_or_DIR --data.path=... --data.prompt_field=prompt    # of completions alone
    python -m tools.evaluate WORKDIR_or_DIR --data.path=... --data.messages_field=messages    # of answers alone
    python -m tools.evaluate WORKDIR_or_DIR --choices=FILE.jsonl              # accuracy
    python -m tools.evaluate WORKDIR_or_DIR --data.path=... --strategy=two_d --mesh=model=2 --json=FILE

WORKDIR is that of a run, or one of its checkpoints; DIR is a model in the form of Hugging Face. All of the text is
read; nothing is held out. A line of FILE.jsonl is {"question": "2 + 2 =", "choices": ["3", "4"], "answer": 1}. The
numbers are the same under every strategy.
"""

import argparse
import dataclasses
import json
import math
import sys
from pathlib import Path
from typing import Any

import jax.numpy as jnp

from checkpointing.storage_logs import shorten_storage_logs
from data.text.tokenizers import Tokenizer
from errors import ConfigError, not_negative, one_of, positive
from reporting.evaluation import choices
from reporting.evaluation.documents import Documents, documents
from reporting.evaluation.evaluator import Evaluator
from reporting.source import Model, laid_out, mesh_of, open_model
from runtime import command_line, folders
from runtime.devices import start_jax
from strategies import Strategy, names
from training.program import Params, TrainState

FIELDS = ("text_field", "prompt_field", "completion_field", "messages_field", "cache_dir")  # of config.data
TOKENS = 8192  # in a batch, about, unless the user says how many sequences


def with_options(model: Model, options: argparse.Namespace) -> tuple[Model, Tokenizer]:
  """The model with what the command line says of the text, and its tokenizer. Raises ConfigError for another model."""
  tokenizer, config = model.reads_text(), model.config.copy_and_resolve_references()
  if config.model.objective != "next_token":
    raise ConfigError(
      f"this model has model.objective={config.model.objective!r} and predicts no tokens; use a language model"
    )
  length = model.seq_len if options.seq_len is None else positive("seq-len", options.seq_len)
  given = {f"data.{name}": getattr(options, name) for name in FIELDS}
  config.update_from_flattened_dict(
    {"data.packing": "documents", "model.seq_len": length, "data.prompt_field": "", "data.messages_field": ""}
    | {"eval_examples": not_negative("examples", options.examples, "use 0 for all")}
    | {name: value for name, value in given.items() if value}
  )
  return dataclasses.replace(model, config=config), tokenizer


def batch_size(strategy: Strategy, given: int | None) -> int:
  """How many sequences a batch has: as given, or about TOKENS in all. Raises ConfigError if they split unevenly."""
  if given is not None:
    strategy.check_batch("batch-size", given)
    return given
  unit = strategy.layout.shards("batch") * strategy.runner.microbatches
  return unit * max(1, TOKENS // (unit * strategy.program.sizes.seq_len))


def on_text(strategy: Strategy, params: Params, text: Documents, config: Any) -> dict[str, float]:
  """What the model's loss is on the documents, or on `eval_examples` sequences of them."""
  state = TrainState(jnp.zeros((), jnp.int32), params, None)
  (sums,) = Evaluator(strategy, text.dataset, config).sums(state)
  count, loss = int(sums["count"]), sums["loss"] / sums["count"]
  size = text.bytes * count / text.tokens  # of some sequences: as many bytes a token as in all of the text
  bits = sums["loss"] / math.log(2) / size
  return {"loss": loss, "perplexity": math.exp(loss), "bits_per_byte": bits, "tokens": count}


def main(arguments: list[str]) -> None:
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument("source", metavar="WORKDIR_or_DIR")
  parser.add_argument("--data.path", dest="path", default="", help="text files, folders, JSON lines or tables")
  parser.add_argument("--data.text_field", dest="text_field", help="the field that holds it (default: the run's)")
  parser.add_argument("--data.prompt_field", dest="prompt_field", help="that of prompts, which are not predicted")
  parser.add_argument("--data.completion_field", dest="completion_field", help="that of what follows prompts")
  parser.add_argument("--data.messages_field", dest="messages_field", help="that of dialogues; answers are predicted")
  parser.add_argument("--data.cache_dir", dest="cache_dir", help="where prepared text is kept")
  parser.add_argument("--choices", metavar="FILE", help="JSON lines with question, choices and answer")
  parser.add_argument("--between", default=" ", help="goes between question and choice (default: a space)")
  parser.add_argument("--seq-len", type=int, help="tokens read at a time (default: the run's; of a DIR at most 1024)")
  parser.add_argument("--batch-size", type=int, help=f"sequences in a batch (default: about {TOKENS} tokens)")
  parser.add_argument("--examples", type=int, default=0, help="sequences of the text to read; 0: all (default)")
  parser.add_argument("--strategy", default="single", help="how the model is laid out (default: single)")
  parser.add_argument("--mesh", action="append", default=[], metavar="AXIS=SIZE", help="the size of a mesh axis")
  parser.add_argument("--json", type=Path, metavar="FILE", help="a JSON file to write the results to")
  options = parser.parse_args(arguments)
  if not options.path and not options.choices:
    raise ConfigError("data.path is missing; name a text with --data.path=FILE_OR_FOLDER, or questions with --choices")
  one_of("strategy", options.strategy, names())
  file = options.json and folders.writable_file(options.json.expanduser(), "json")
  questions = choices.read(options.choices) if options.choices else []
  shorten_storage_logs()
  model, tokenizer = with_options(open_model(options.source), options)
  devices = start_jax(model.config)
  strategy = laid_out(model, options.strategy, mesh_of(options.mesh), model.config.model.seq_len, devices)
  model.config.eval_batch_size = size = batch_size(strategy, options.batch_size)
  text = documents(options.path, model.config, tokenizer) if options.path else None
  for note in text.notes if text else ():
    print(f"note: {note}", file=sys.stderr)
  longest = model.config.model.seq_len
  rows = choices.rows(questions, tokenizer, between=options.between, longest=longest) if questions else []
  params = model.load(strategy)
  print(f"strategy   {strategy.describe(options.strategy)}", flush=True)
  found: dict[str, Any] = {"source": options.source, "strategy": options.strategy}
  if text:
    values = on_text(strategy, params, text, model.config)
    found["text"] = {"path": options.path, "documents": text.count, "bytes": text.bytes, **values}
    part = "" if values["tokens"] == text.tokens else f" of {text.tokens:,}"
    unit = "document" if text.count == 1 else "documents"
    print(f"text       {options.path}: {text.count:,} {unit}, {text.bytes:,} bytes")
    print(f"tokens     {values['tokens']:,}{part}")
    print(f"loss       {values['loss']:.4f} nats a token")
    print(f"perplexity {values['perplexity']:.3f}")
    print(f"bits/byte  {values['bits_per_byte']:.4f}", flush=True)
  if questions:
    scores = choices.score(strategy, params, questions, rows, tokens=size * longest)
    both = {"accuracy": scores.accuracy, "accuracy_per_byte": scores.accuracy_per_byte}
    found["choices"] = {"path": options.choices, **both, "scores": [one.tolist() for one in scores.scores]}
    print(f"questions  {options.choices}: {len(questions):,}")
    print(f"accuracy   {scores.accuracy:.4f} by likelihood, {scores.accuracy_per_byte:.4f} by likelihood a byte")
  if file:
    file.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
  with command_line.bad_input_ends_the_program():
    main(sys.argv[1:])
