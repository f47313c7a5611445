#!/usr/bin/env bash
# A byte-level BPE tokenizer drops the characters that its training text did not have.
#
# Expected: byte-level means that any text can be encoded. A byte without a token is an error or an unknown token.
# Happens: the trainer makes tokens for the bytes that it saw, unless it is given initial_alphabet. encode leaves out
# the others without a word, and decode returns a text that reads well.
# Lost: digits, in this example: a price. Compare the text with what decode returns before training on it.
# Versions: tokenizers 0.23.3, Python 3.11; 2026-11-27. Output:
#   'the fox costs 1234 dollars' -> 'the fox costs  dollars'
#   '1234' -> []

set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3.11}" -m venv "$folder/venv"
cd "$folder"
venv/bin/pip install --quiet --no-compile --disable-pip-version-check tokenizers==0.23.3
venv/bin/python - <<'END'
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

tokenizer = Tokenizer(models.BPE())
tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
tokenizer.decoder = decoders.ByteLevel()
seen = "the quick brown fox jumps over the lazy dog and costs many dollars"
tokenizer.train_from_iterator([seen], trainers.BpeTrainer(vocab_size=300, show_progress=False))

text = "the fox costs 1234 dollars"
back = tokenizer.decode(tokenizer.encode(text).ids)
digits = tokenizer.encode("1234").ids
print(f"{text!r} -> {back!r}\n'1234' -> {digits}")
assert back == "the fox costs  dollars" and digits == []

END
