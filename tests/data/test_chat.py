"""Dialogues: their tokens and what counts of them equal those of the library transformers (golden/chat/make.py)."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from helpers import config, one_sentence
from tokenizers import Tokenizer

from data import text
from data.dataset import Dataset
from data.text import packing, spans, templates, tokenizers
from data.text.chat import Dialogue
from data.text.files import held_out
from models.sizes import model_sizes

GOLDEN = Path(__file__).parents[1] / "golden" / "chat"
NAMES = sorted(folder.name for folder in GOLDEN.iterdir() if folder.is_dir())


def opened(folder: Path) -> tuple[tokenizers.Tokenizer, dict[str, Any]]:
  return tokenizers.from_file(folder / "tokenizer.json"), json.loads((folder / "expected.json").read_text())


@pytest.mark.parametrize("marked", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_tokens_of_a_dialogue_are_those_of_transformers(name: str, marked: bool, monkeypatch: pytest.MonkeyPatch):
  """So are those that count, whether the template marks them or not, up to the last of them."""
  if marked:
    monkeypatch.setattr(templates, "FILE", "marked.jinja")
  tokenizer, expected = opened(GOLDEN / name)
  for dialogue, found in expected.items():
    messages = found["messages"]
    document = tokenizer.chat.document(Dialogue(messages, 0, found["tools"]), "line 1")
    everything = document._replace(spans=tuple(span._replace(counted=True) for span in document.spans))
    (ids, counted), (whole, _) = tokenizer.encode_spans([document, everything])
    assert whole.tolist() == found["tokens"], dialogue
    assert ids.tolist() == found["tokens"][: found["counted"][-1] + 1], dialogue
    assert np.flatnonzero(counted).tolist() == found["counted"], dialogue


@pytest.mark.parametrize("name", NAMES)
def test_a_model_is_asked_as_transformers_asks_it(name: str):
  tokenizer, expected = opened(GOLDEN / name)
  for found in expected.values():
    last = max(i for i, message in enumerate(found["messages"]) if message["role"] == "assistant")
    asked = tokenizer.chat.prompt(found["messages"][:last], found["tools"])
    assert tokenizer.encode_spans([spans.written(asked)])[0].ids.tolist() == found["asked"]


def rows_file(folder: Path, name: str, rows: list[dict[str, Any]]) -> Path:
  """The rows as JSON lines or as a table, by the name's suffix."""
  if name.endswith(".parquet"):
    pq.write_table(pa.Table.from_pylist(rows), folder / name)
  else:
    (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
  return folder / name


def load(tmp_path: Path, path: Path, name: str = "tools", **fields: Any) -> Dataset:
  given = {"data__path": str(path), "data__cache_dir": str(tmp_path / "cache"), "data__tokenizer": str(GOLDEN / name)}
  given |= {"data__messages_field": "messages", "data__packing": "documents", "model__vocab_size": 0}
  return text.load(config(**given | fields))


def documents(dataset: Dataset) -> list[tuple[list[int], list[int]]]:
  """The tokens of each document to train on, and the places of those that count."""
  source = dataset.parts[0].train
  tokens, counted = (file.slice(0, len(file)) for file in (source.tokens, source.completions))
  ends = np.fromfile(source.tokens.path.with_suffix(".ends"), "<i8")
  pairs = zip(np.split(tokens, ends[:-1]), np.split(counted, ends[:-1]), strict=True)
  return [(ids.tolist(), np.flatnonzero(own).tolist()) for ids, own in pairs]


def cut(found: dict[str, Any]) -> tuple[list[int], list[int]]:
  """What is prepared of a dialogue: its tokens up to the last that counts."""
  return found["tokens"][: found["counted"][-1] + 1], found["counted"]


@pytest.mark.parametrize("kind", ["a.jsonl", "a.parquet"])
def test_rows_with_messages_are_prepared_with_their_tools(tmp_path: Path, kind: str):
  """A table gives every message every field; those without a value must not reach the template."""
  expected = opened(GOLDEN / "tools")[1]
  some = [expected[name] for name in ("called", "another call", "two")]
  rows = [{"messages": found["messages"], "tools": found["tools"], "id": i} for i, found in enumerate(some * 20)]
  dataset = load(tmp_path, rows_file(tmp_path, kind, rows))
  train = [cut(some[i % 3]) for i in range(60) if not held_out(i)]
  assert documents(dataset) == train
  assert dataset.parts[0].counts["tokens of completions"][0] == sum(len(counted) for _, counted in train)
  assert dataset.text
  assert dataset.text.ends == {2, 7}  # </s>, and <|end|>, which ends an answer
  assert json.loads(dataset.text.files()["generation_config.json"])["eos_token_id"] == [2, 7]
  assert dataset.text.files()["chat_template.jinja"] == (GOLDEN / "tools" / "chat_template.jinja").read_text()


def test_prompts_and_completions_may_be_messages_and_rows_of_all_kinds_may_be_mixed(tmp_path: Path):
  """Of messages in a prompt nothing counts, whoever wrote them."""
  found = opened(GOLDEN / "headers")[1]["system"]
  both = {"prompt": found["messages"][:6], "completion": found["messages"][6:]}
  rows = [{"messages": found["messages"]}, both, {"prompt": "<|im_start|>user\nWho?", "completion": " I<|im_end|>"}]
  fields = {"data__prompt_field": "prompt"}
  dataset = load(tmp_path, rows_file(tmp_path, "a.jsonl", rows * 20), "headers", **fields)
  ids, counted = cut(found)
  last = max(i for i, token in enumerate(ids) if token == 3)  # <|im_start|>
  later = [i for i in counted if i > last]
  loaded = Tokenizer.from_file(str(GOLDEN / "headers" / "tokenizer.json"))
  asked, answer = (loaded.encode(part, add_special_tokens=False).ids for part in rows[2].values())
  assert asked[0] == loaded.token_to_id("<|im_start|>")
  written = [1, *asked, *answer]  # <s> before the prompt; <|im_end|> is an end, so </s> is not added
  expected = [(ids, counted), (ids, later), (written, [*range(1 + len(asked), len(written))])]
  assert documents(dataset) == [expected[i % 3] for i in range(60) if not held_out(i)]


def test_every_prediction_that_counts_is_made_once_where_answers_are_apart(
  tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
  monkeypatch.setattr(packing, "READ", 5)
  found = opened(GOLDEN / "headers")[1]
  rows = [{"messages": found[name]["messages"]} for name in ("system", "two", "asked last")] * 10
  dataset = load(tmp_path, rows_file(tmp_path, "a.jsonl", rows), "headers", model__seq_len=9)
  source = dataset.parts[0].train
  batch = source.read(np.arange(len(source)))
  counted = (np.diff(batch["segments"]) == 0) & batch["completions"][:, 1:]
  assert counted.any(axis=1).all()
  pairs = np.stack([batch["tokens"][:, :-1], batch["tokens"][:, 1:]], axis=-1)[counted]
  expected = [(ids[i - 1], ids[i]) for ids, own in documents(dataset) for i in own]
  assert sorted(map(tuple, pairs.tolist())) == sorted(expected)
  assert len(expected) == sum(len(own) for _, own in documents(dataset))


def copied(folder: Path, template: str, **files: Any) -> Path:
  """The tokenizer of `headers` with another template, and other files."""
  folder.mkdir()
  for name in ("tokenizer.json", "tokenizer_config.json"):
    shutil.copy(GOLDEN / "headers" / name, folder / name)
  if template:
    (folder / "chat_template.jinja").write_text(template)
  for name, content in files.items():
    (folder / f"{name}.json").write_text(json.dumps(content))
  return folder


ASK, ANSWER = {"role": "user", "content": "Who?"}, {"role": "assistant", "content": "I."}
PLAIN = "{% for m in messages %}{{ m.role + ':' + m.content }}{% endfor %}"
LATER = "{% for m in messages %}{{ m.content + (loop.length > 2) | string + '<|im_end|>' }}{% endfor %}"
ENDLESS = "{% for a in range(9999) %}{% for b in range(9999) %}{{ 'a' * 9999 }}{% endfor %}{% endfor %}"


@pytest.mark.parametrize(
  "row, template, parts",
  [
    ({"messages": [ASK]}, PLAIN, ["line 10 of", "no turn of the role 'assistant'", "only 'user'", "leave it out"]),
    ({"messages": []}, PLAIN, ["data.messages_field='messages' is [] in line 10", '"role": "user"']),
    ({"messages": "Who?"}, PLAIN, ["data.messages_field='messages' is 'Who?' in line 10"]),
    ({"messages": [{"from": "human", "value": "Who?"}]}, PLAIN, ["message 1 of", "has from, value and no role"]),
    ({"messages": [ASK, {"role": "assistant", "content": 3}]}, PLAIN, ["message 2 of", "content=3", "use text"]),
    ({"messages": [ASK | {"content": [{"type": "image"}]}]}, PLAIN, ["message 1 of", "content other than text"]),
    ({"turns": [ASK, ANSWER]}, PLAIN, ["data.messages_field='messages' is not in line 10", "which has turns"]),
    ({"messages": [ASK, ANSWER], "tools": "{"}, PLAIN, ["tools is not valid JSON in line 10 of"]),
    ({"messages": [ASK, ANSWER, ASK, ANSWER]}, LATER, ["line 10 of", "message 2 is not the beginning", "generation %"]),
    ({"messages": [ASK, ANSWER]}, ENDLESS, ["writes more than 16,777,216 characters"]),
    ({"messages": [ASK, ANSWER]}, "{{ 'a' * 10 ** 9 }}", ["cannot write it", "too large"]),
    ({"messages": [ASK, ANSWER]}, "{{ messages.clear() }}", ["cannot write it", "attribute 'clear'"]),
    ({"messages": [ASK, ANSWER]}, "{{ raise_exception('no such role') }}", ["cannot write it (no such role)"]),
    ({"messages": [ASK, ANSWER]}, "{% for %}", ["is not a valid chat template"]),
    (
      {"messages": [ASK, ANSWER]},
      "",
      ["has no chat template", "put that of its model beside it, as chat_template.jinja"],
    ),
  ],
)
def test_dialogues_that_cannot_be_learned_from_are_refused(tmp_path: Path, row: Any, template: str, parts: list[str]):
  fine = [{"messages": [ASK, ANSWER]}] * 9
  folder = copied(tmp_path / "tokenizer", template)
  with one_sentence(*parts):
    load(tmp_path, rows_file(tmp_path, "a.jsonl", [*fine, row]), data__tokenizer=str(folder))


def test_data_without_messages_is_refused(tmp_path: Path):
  (tmp_path / "a.txt").write_text("text\n" * 100)
  np.arange(1000, dtype="<u2").tofile(tmp_path / "a.bin")
  with one_sentence("a.txt' in data.path is plain text", "data.messages_field='messages'"):
    load(tmp_path, tmp_path / "a.txt")
  with one_sentence("a.bin' holds tokens without prompts", "data.messages_field='messages'"):
    load(tmp_path, tmp_path / "a.bin", model__vocab_size=1000)
  with one_sentence("data.tokenizer='bytes' has no chat template"):
    load(tmp_path, rows_file(tmp_path, "a.jsonl", [{"messages": [ASK, ANSWER]}] * 30), data__tokenizer="bytes")
  with one_sentence("data.messages_field='messages' needs data.packing='documents'"):
    model_sizes(config(data__messages_field="messages", model__vocab_size=64))


def test_templates_are_found_where_models_keep_them(tmp_path: Path):
  """A file of its own comes first; tokenizer_config.json may have several by name, one for dialogues with tools."""
  named = [{"name": "default", "template": "a{{ bos_token }}"}, {"name": "tool_use", "template": "b{{ tools }}"}]
  variables = {"bos_token": "<s>", "eos_token": {"content": "</s>"}}
  several = copied(tmp_path / "several", "", tokenizer_config=variables | {"chat_template": named})
  one = copied(tmp_path / "one", "", tokenizer_config=variables | {"chat_template": "c"})
  own = copied(tmp_path / "own", "d", tokenizer_config=variables | {"chat_template": "c"})
  asked = lambda folder, tools: tokenizers.from_file(folder / "tokenizer.json").chat.prompt([ASK], tools)
  assert [asked(folder, None) for folder in (several, one, own)] == ["a<s>", "c", "d"]
  assert asked(several, ["x"]) == "b['x']"


def test_a_changed_template_is_prepared_anew(tmp_path: Path):
  path, found = rows_file(tmp_path, "a.jsonl", [{"messages": [ASK, ANSWER]}] * 30), []
  folder = copied(tmp_path / "tokenizer", PLAIN)
  for template in (PLAIN, PLAIN.replace(":", ";")):
    (folder / "chat_template.jinja").write_text(template)
    found.append(load(tmp_path, path, data__tokenizer=str(folder)).parts[0].fingerprint)
  assert found[0] != found[1]


def test_an_answer_without_a_token_behind_it_ends_with_end(tmp_path: Path):
  folder = copied(tmp_path / "tokenizer", "{% for m in messages %}{{ m.role + ': ' + m.content + '\\n' }}{% endfor %}")
  path = rows_file(tmp_path, "a.jsonl", [{"messages": [ASK, ANSWER, ASK, ANSWER]}] * 30)
  loaded, dataset = (
    Tokenizer.from_file(str(folder / "tokenizer.json")),
    load(tmp_path, path, data__tokenizer=str(folder)),
  )
  ids, counted = documents(dataset)[0]
  written = "user: Who?\nassistant: I.\nuser: Who?\nassistant: I."
  assert ids == [*loaded.encode(written, add_special_tokens=False).ids, 2]
  assert loaded.decode([ids[i] for i in counted], skip_special_tokens=False) == "assistant: I.assistant: I.</s>"


def test_a_template_may_need_a_message_of_the_system(tmp_path: Path):
  """It refuses the dialogue without one by which the end of answers is found."""
  needs = "{% if messages[0].role != 'system' %}{{ raise_exception('no system') }}{% endif %}"
  folder = copied(tmp_path / "tokenizer", needs + (GOLDEN / "headers" / "chat_template.jinja").read_text())
  tokenizer = tokenizers.from_file(folder / "tokenizer.json")
  assert tokenizer.chat.end == "<|im_end|>"
  system = {"role": "system", "content": "Be kind."}
  (found,) = tokenizer.encode_spans([tokenizer.chat.document(Dialogue([system, ASK, ANSWER]), "")])
  assert tokenizer.text.decode(found.ids[found.counted].tolist()) == "I."
  with one_sentence("row 1 cannot be learned from", "(no system)"):
    tokenizer.chat.document(Dialogue([ASK, ANSWER]), "row 1")


def test_a_stranger_s_dialogue_counts_as_far_as_the_template_writes_it(tmp_path: Path):
  """An answer that holds the control token of its own end counts as a whole. Content in parts is joined."""
  folder = copied(tmp_path / "tokenizer", (GOLDEN / "headers" / "chat_template.jinja").read_text())
  hostile = ANSWER | {"content": [{"type": "text", "text": "A<|im_end|>"}, {"type": "text", "text": "B"}]}
  tokenizer = tokenizers.from_file(folder / "tokenizer.json")
  ids, counted = tokenizer.encode_spans([tokenizer.chat.document(Dialogue([ASK, hostile, ASK, ANSWER]), "")])[0]
  shown = Tokenizer.from_file(str(folder / "tokenizer.json")).decode(ids[counted].tolist(), skip_special_tokens=False)
  assert shown == "A<|im_end|>B<|im_end|>I.<|im_end|>"
