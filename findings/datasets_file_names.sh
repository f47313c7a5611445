#!/usr/bin/env bash
# One file whose name has the word "train" or "test" in it hides all other files of a folder from datasets.
#
# Expected: load_dataset of a folder reads all files of JSON lines in it, or warns which it leaves out.
# Happens: if a name has train, test, dev or valid as one of its words, files without such a word are left out. Nothing
# is printed. The word "dev" makes the one file a validation split. (github.com/huggingface/datasets, issue 5021)
# Lost: most of the text, because of a book on how to train dogs; and the split that a run trains on.
# Versions: datasets 5.2.0, pyarrow 26.0.1, Python 3.11; 2026-11-27. Output:
#   books, wiki -> {'train': ['books', 'wiki']}
#   books, how-to-train-dogs, wiki -> {'train': ['how-to-train-dogs']}
#   books, dev-notes, wiki -> {'validation': ['dev-notes']}

set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3.11}" -m venv "$folder/venv"
cd "$folder"
venv/bin/pip install --quiet --no-compile --disable-pip-version-check datasets==5.2.0 pyarrow==26.0.1
venv/bin/python - <<'END'
import json, os, warnings

os.environ.update(HF_HUB_OFFLINE="1", HF_HOME=os.path.abspath("home"), HF_DATASETS_DISABLE_PROGRESS_BARS="1")
warnings.simplefilter("error")
import datasets

def read(*names):
  folder = "+".join(names)
  os.mkdir(folder)
  for name in names:
    with open(f"{folder}/{name}.jsonl", "w") as file:
      file.write(json.dumps({"file": name}) + "\n")
  parts = {part: sorted(rows["file"]) for part, rows in datasets.load_dataset(folder).items()}
  print(", ".join(names), "->", parts)
  return parts

assert read("books", "wiki") == {"train": ["books", "wiki"]}
assert read("books", "how-to-train-dogs", "wiki") == {"train": ["how-to-train-dogs"]}
assert read("books", "dev-notes", "wiki") == {"validation": ["dev-notes"]}

END
