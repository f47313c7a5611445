#!/usr/bin/env bash
# A BPE tokenizer that was trained with dropout goes on dropping merges in whatever reads its file.
#
# Expected: dropout is for training a model. A tokenizer.json encodes a text in one way, or has to be asked to vary it.
# Happens: the file holds "dropout", and encode obeys it at every call. One text becomes other tokens each time, also
# for validation and generation. Nothing in encode's arguments turns it off; tokenizer.model.dropout = None does.
# Lost: prepared data that cannot be prepared again, and a validation loss of other, longer texts.
# Versions: tokenizers 0.23.3, Python 3.11; 2026-11-27. Output (the numbers of tokens are random):
#   dropout in the file: 0.1; one text encoded five times: 271, 257, 265, 262, 272 tokens, 5 different results
#   dropout removed: 161 tokens, 1 result

set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3.11}" -m venv "$folder/venv"
cd "$folder"
venv/bin/pip install --quiet --no-compile --disable-pip-version-check tokenizers==0.23.3
venv/bin/python - <<'END'
import json
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

text = "the quick brown fox jumps over the lazy dog while newer and wider rivers run lower " * 10
trained = Tokenizer(models.BPE(dropout=0.1))
trained.pre_tokenizer = pre_tokenizers.ByteLevel()
trained.train_from_iterator([text], trainers.BpeTrainer(vocab_size=300, show_progress=False))
file = trained.to_str()

def encoded(tokenizer):
  each = [tuple(tokenizer.encode(text).ids) for _ in range(5)]
  return each, len(set(each))

tokenizer = Tokenizer.from_str(file)
each, results = encoded(tokenizer)
print(f"dropout in the file: {json.loads(file)['model']['dropout']}; one text encoded five times:",
      ", ".join(str(len(ids)) for ids in each), f"tokens, {results} different results")
assert results > 1
tokenizer.model.dropout = None
each, results = encoded(tokenizer)
print(f"dropout removed: {len(each[0])} tokens, {results} result")
assert results == 1

END
