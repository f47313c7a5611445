"""Rows of token ids: the same tokens and documents from every form, without a tokenizer; and what does not fit."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from helpers import config, one_sentence
from row_files import MDS_ROWS, file_of, mds_files

from data import text
from data.dataset import Part
from data.text import prepare, token_rows
from data.text.files import Files, held_out
from data.text.rows import Fields
from data.text.tokenizers import BYTES
from reporting.evaluation.documents import documents

LENGTH = 32  # model.seq_len of the preset
IDS = [row["ids"] for row in MDS_ROWS]
TRAIN = [ids for i, ids in enumerate(IDS) if not held_out(i)]
ROWS = [{"ids": ids, "text": "some text", "label": 1} for ids in IDS]


def joined(documents: list[list[int]]) -> list[int]:
  return [token for document in documents for token in document]


def as_json(file: Path, rows: list[dict[str, Any]]) -> Path:
  file.write_text("".join(json.dumps(row) + "\n" for row in rows))
  return file


def files_of(form: str, tmp_path: Path) -> Files:
  if form.startswith("mds"):
    return mds_files(form.removeprefix("mds/"))
  if form == "json":
    return (file_of(as_json(tmp_path / "a.jsonl", ROWS), "json"),)
  if form == "json_values":
    (tmp_path / "a.json").write_text(json.dumps(ROWS, indent=1))
    return (file_of(tmp_path / "a.json", form),)
  table = pa.Table.from_pylist(ROWS)
  if form == "parquet":
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=25)
  else:
    with pa.OSFile(str(tmp_path / "a.arrow"), "wb") as out, pa.ipc.new_stream(out, table.schema) as writer:
      writer.write_table(table, max_chunksize=17)
  return (file_of(tmp_path / f"a.{form}", form),)


def load(files: Files, tmp_path: Path, vocab_size: int = 0, **fields: Any) -> Part:
  settings = config(**{"data__cache_dir": str(tmp_path / "cache"), "model__vocab_size": 300} | fields)
  found = token_rows.find(files, Fields("ids"), settings.data.cache_dir)
  assert found
  return token_rows.load("ids", found, settings, vocab_size)[0]


def test_every_form_gives_the_same_tokens_and_documents(tmp_path: Path):
  prints = set()
  for form in ("json", "json_values", "parquet", "arrow", "mds/ids", "mds/ids-typed"):
    part = load(files_of(form, tmp_path), tmp_path, data__packing="documents")
    stored = part.train.tokens  # type: ignore[attr-defined]
    assert stored.slice(0, len(stored)).tolist() == joined(TRAIN)  # and no token between documents
    assert part.counts["documents"] == (len(TRAIN), len(IDS) - len(TRAIN))
    assert (part.bytes_per_token, part.byte_pairs) == (None, None)
    prints.add(part.fingerprint)
  assert len(prints) == 1
  batch = part.train.read(np.arange(len(part.train)))
  pairs = zip(batch["tokens"], batch["segments"], strict=True)
  found = [tokens[segments == i].tolist() for tokens, segments in pairs for i in range(1, segments.max() + 1)]
  assert sorted(found) == sorted(ids for ids in TRAIN if len(ids) > 1)
  windows = load(files_of("mds/ids", tmp_path), tmp_path, data__packing="windows", model__seq_len=8).train
  assert windows.read(np.array([1]))["tokens"].tolist() == [joined(TRAIN)[8:17]]


def test_the_files_own_splits_are_used(tmp_path: Path):
  train, validation = (dataclasses.replace(file, split=i > 0) for i, file in enumerate(mds_files("ids")[:2]))
  part = load((train, validation), tmp_path, model__seq_len=8)
  count = part.counts["documents"][0]
  assert len(part.train.tokens) == len(joined(IDS[:count]))  # type: ignore[attr-defined]
  own = part.validation.tokens.slice(0, 20).tolist()  # type: ignore[attr-defined]
  assert own == joined(IDS[count:])[:20]


def test_a_copy_that_is_interrupted_gives_the_same_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
  monkeypatch.setattr(prepare, "BATCH", 500)
  monkeypatch.setattr(prepare, "SAVE_EVERY", 900)
  rows = token_rows.TokenRows(mds_files("ids-typed"), Fields("ids"))
  write = lambda folder: prepare.write_with(token_rows._Writer, ["tokens", "ends"], folder, rows.files, rows.fields, "")
  (tmp_path / "whole").mkdir()
  (tmp_path / "stopped").mkdir()
  write(tmp_path / "whole")
  save, saves = token_rows._Writer.save, 0

  def stop(writer: Any, piece: Any) -> None:
    nonlocal saves
    save(writer, piece)
    saves += 1
    raise KeyboardInterrupt

  monkeypatch.setattr(token_rows._Writer, "save", stop)
  for _ in range(3):
    with pytest.raises(KeyboardInterrupt):
      write(tmp_path / "stopped")
  monkeypatch.setattr(token_rows._Writer, "save", save)
  write(tmp_path / "stopped")
  contents = {file.name: file.read_bytes() for file in (tmp_path / "whole").iterdir()}
  assert set(contents) == {f"{split}.{kind}" for split in prepare.SPLITS for kind in ("tokens", "ends")} | {"meta.json"}
  assert {file.name: file.read_bytes() for file in (tmp_path / "stopped").iterdir()} == contents
  assert saves == 3
  assert contents["train.ends"] == np.cumsum([len(ids) for ids in TRAIN]).astype("<i8").tobytes()
  assert contents["train.tokens"] == np.array(joined(TRAIN), "<u4").tobytes()


def test_a_run_needs_no_tokenizer_and_a_second_start_opens_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
  fields = {
    "data__path": str(as_json(tmp_path / "a.jsonl", [{"ids": None}, {"ids": []}, *ROWS])),
    "data__cache_dir": str(tmp_path / "cache"), "data__text_field": "ids", "model__vocab_size": 0, "model__seq_len": 8,
  }  # fmt: skip
  with one_sentence("model.vocab_size=0", "token id 288", "use 289 or more"):
    text.load(config(**fields))
  fields["model__vocab_size"] = 300
  dataset = text.load(config(**fields))
  assert (dataset.text, dataset.tokenizer, dataset.model) == (None, "", {})
  monkeypatch.setattr(prepare, "read", None)
  monkeypatch.setattr(token_rows, "read", None)
  assert text.load(config(**fields)).parts[0].fingerprint == dataset.parts[0].fingerprint
  with one_sentence("data.tokenizer='bpe' did not write the tokens in", "a.jsonl"):
    text.load(config(**fields, data__tokenizer="bpe"))


def test_what_does_not_fit_token_ids_is_refused(tmp_path: Path):
  files = files_of("json", tmp_path)
  with one_sentence("model.vocab_size=288 is too small", "token id 288", "use 289"):
    load(files, tmp_path, model__vocab_size=288, model__seq_len=8)
  with one_sentence("data.path='ids' holds tokens without classes", "objective='class'"):
    load(files, tmp_path, model__objective="class")
  fields = {"data__path": files[0].path, "data__cache_dir": str(tmp_path / "cache")}
  with one_sentence("data.completion_field='ids' holds token ids in line 1 of", "data.prompt_field='text' needs text"):
    text.load(config(**fields, data__prompt_field="text", data__completion_field="ids", data__packing="documents"))
  with one_sentence("data.text_field='ids' holds token ids in row 1 of", "in place of text", "two sources"):
    documents(files[0].path, config(**fields, data__text_field="ids"), BYTES)
  for i, (rows, parts) in enumerate([
    ([*ROWS, {"ids": "text"}], ["holds text in row 61 of", "in place of token ids", "two sources"]),
    ([{"ids": "text"}, *ROWS], ["holds token ids in row 2 of", "in place of text", "two sources"]),
    ([*ROWS, {"ids": [1, -1]}], ["holds token id -1 in line 61 of", "from 0"]),
    ([*ROWS, {"ids": [1, 1 << 31]}], ["holds token id 2147483648 in line 61 of", "from 0"]),
    ([*ROWS, {"ids": [1, 1 << 70]}], ["is [1, 1180591620717411303424] in line 61 of", "token ids"]),
    ([*ROWS, {"ids": [1.5, 2]}], ["is [1.5, 2] in line 61 of", "token ids"]),
    ([*ROWS, {"ids": [[1, 2], [3]]}], ["is [[1, 2], [3]] in line 61 of", "token ids"]),
    ([*ROWS, {"ids": [[1, 2], [3, 4]]}], ["is [[1, 2], [3, 4]] in line 61 of", "token ids"]),
    ([*ROWS, {"ids": [True, False]}], ["is [True, False] in line 61 of", "token ids"]),
    ([*ROWS, {"ids": 7}], ["is 7 in line 61 of", "token ids"]),
  ]):  # fmt: skip
    file = as_json(tmp_path / f"{i}.jsonl", rows)
    with one_sentence("data.text_field='ids'", f"{i}.jsonl", *parts):
      text.load(config(**fields | {"data__path": str(file)}, data__text_field="ids", model__vocab_size=300))
