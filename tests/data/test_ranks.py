"""tiktoken gives the tokens of `tokenizers` wherever it is used, and a tokenizer without a proof is refused."""

import functools
import json
import random
import re
import socket
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import config
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers

from data import text as texts_of
from data.text import named_tokens, ranks, tokenizers
from data.text.ranks import Documents, NotEqualError, Ranks

BYTE_LEVEL = pre_tokenizers.ByteLevel(add_prefix_space=False)
NO_REGEX = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)


def split(pattern: str, behavior: str = "isolated", invert: bool = False) -> pre_tokenizers.PreTokenizer:
  return pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(pattern), behavior, invert), NO_REGEX])


CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
KINDS = {
  "GPT-2": BYTE_LEVEL,
  "Llama 3": split(
    CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
  ),
  "Qwen2": split(CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"),
  "o200k": split(ranks.O200K, "removed", invert=True),
  "SmolLM2": pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), BYTE_LEVEL]),
}
TEXTS = {
  "code": Path(ranks.__file__).read_text(),
  "ends of lines": Path(ranks.__file__).read_text()[-3000:].replace("\n", "\r\n") + "\r\r\n \n\r ",
  "contractions": "It's they'RE we'Ve I'M you'll he'D don't ''s x'\u017f 'LL's\n" * 3,
  "digits": "1 12 123 1234 12345 1,234.56 2026-11-27 0x1F ٣٤٥ ४५ ½ ² Ⅻ x1y22z333 a 1  2   3\t4\n5",
  "spaces": "a  b   c\t\td \n\n e\u00a0f\u3000g \u2028h\u2029 \v\f\x1c\x1d\x1e\x1f\x85  1   \n   x\n"
  + " " * 300 + "y" + " " * 99,
  "scripts": "他说，这是一本书。日本語のテキスト 한국어 हिन्दी में ภาษาไทย العربية עברית Ελληνικά Кириллица ქართული አማርኛ",
  "marks": "e\u0301 é o\u0308\u0323 ö A\u030a Å \u212b ﬁ ﬀ ẛ̣ \u1100\u1161\u11a8 각 क\u093c क़"
  " a\u0315\u0300\u05ae\u0300b \u0301x",
  "cases": "ǅ ǈ ß ẞ İ ı ſ K Å ʰ ªº HTTPServer camelCase XMLHttpRequest iPhone ÀÉÎ àéî Ǆungla ᴬᴮ",
  "pictures": "😀👩\u200d👩\u200d👧 🇩🇪 ✈️ ∑∞ «»“”‘’—… €£¥ № ™ \ue000 \U0010fffd \ufeff \u200b\u00ad",
  "control": "".join(map(chr, range(0xA0))) + "\x7f\x80",
  "names of special tokens": "a<end>b <end> <|im_start|>user\n<|no token|>é<|no token|>",
  "long words": "ab" * 300 + " " + "的" * 200 + " " + "=" * 500 + "-" * 131 + "\n" * 150,
}  # fmt: skip
NOT_UTF8 = [b"caf\xe9 \xff\xfe abc", b"\xe2\x82", b"\xf0\x9f\x98 x", b"\xed\xa0\x80y", bytes(range(256))]


@functools.cache
def form_of(kind: str) -> str:
  """A tokenizer.json of a kind, trained here."""
  made = Tokenizer(models.BPE())
  made.pre_tokenizer = KINDS[kind]
  if kind == "Qwen2":
    made.normalizer = normalizers.NFC()
  trainer = trainers.BpeTrainer(
    vocab_size=700, special_tokens=["<end>"], initial_alphabet=BYTE_LEVEL.alphabet(), show_progress=False
  )
  made.train_from_iterator([*TEXTS.values(), *["the word helloworld"] * 9], trainer)
  made.add_special_tokens(["<|im_start|>"])
  form = json.loads(made.to_str())
  if kind == "Llama 3":  # as converted: all pairs that make a token, and tokens that no pair makes
    vocabulary = form["model"]["vocab"]
    vocabulary |= {"qzjxvk": len(vocabulary) + 9, "Ġqzjxvkw": len(vocabulary) + 10}
    cuts = [(word[:at], word[at:], i) for word, i in vocabulary.items() for at in range(1, len(word))]
    pairs = [(i, vocabulary[left], left, right) for left, right, i in cuts if {left, right} <= vocabulary.keys()]
    form["model"] |= {"ignore_merges": True, "merges": [[left, right] for _, _, left, right in sorted(pairs)]}
  return json.dumps(form)


def loaded(form: dict[str, Any] | str) -> Tokenizer:
  found = Tokenizer.from_str(form if isinstance(form, str) else json.dumps(form))
  found.encode_special_tokens = True
  return found


def expected(tokenizer: Tokenizer, text: str) -> list[int]:
  return tokenizer.encode(text, add_special_tokens=False).ids


@pytest.fixture
def by_tiktoken_alone(monkeypatch: pytest.MonkeyPatch) -> None:
  """Nothing is compared, and `tokenizers` encodes no document."""
  monkeypatch.setattr(ranks, "COMPARED", 0)
  monkeypatch.setattr(Documents, "_by_tokenizers", lambda self, texts: [] if not texts else pytest.fail(texts[0]))


@pytest.mark.parametrize("kind", KINDS)
def test_tiktoken_gives_the_tokens_of_tokenizers(kind: str, by_tiktoken_alone: None):
  theirs, chance = loaded(form_of(kind)), random.Random(kind)
  documents = Documents(loaded(form_of(kind)), np.dtype("<u2"))
  everything = "".join(TEXTS.values())
  mixed = ["".join(chance.choices(everything, k=200)) for _ in range(150)]
  spaced = ["".join(chance.choices(" \n\t\r a1.'sé的\u0301", k=120)) for _ in range(150)]
  cut = [everything[at : at + 90] for at in chance.choices(range(len(everything)), k=150)]
  words = ["", " qzjxvkw", "qzjxvk", "xqzjxvk qzjxvkqzjxvk"]
  pieces = [text.encode() for text in [*TEXTS.values(), *mixed, *spaced, *cut, *words]] + NOT_UTF8
  for piece, found in zip(pieces, documents(pieces), strict=True):
    assert found.dtype == np.dtype("<u2")
    assert found.tolist() == expected(theirs, piece.decode(errors="replace"))
  assert documents.library() == "tiktoken"


def test_several_threads_give_the_same_tokens(by_tiktoken_alone: None, monkeypatch: pytest.MonkeyPatch):
  pieces = [text.encode() for text in TEXTS.values()] * 5
  documents = Documents(loaded(form_of("Qwen2")), np.dtype("<u2"))
  alone = documents(pieces)
  monkeypatch.setattr(ranks, "TOGETHER", 0)
  monkeypatch.setattr(ranks, "WORTH", 0)
  for here, there in zip(alone, documents(pieces), strict=True):
    np.testing.assert_array_equal(here, there)
  assert documents([]) == []


def tiny(tokens: str, merges: str = "", **changes: Any) -> dict[str, Any]:
  """A tokenizer.json of the 256 bytes, then these tokens, with these merges such as "a+b"."""
  model = models.BPE({c: i for i, c in enumerate([*sorted(BYTE_LEVEL.alphabet()), *tokens.split()])}, [])
  made = Tokenizer(model)
  made.pre_tokenizer = BYTE_LEVEL
  form = json.loads(made.to_str())
  form["model"]["merges"] = [merge.split("+") for merge in merges.split()]
  form["model"] |= {name: value for name, value in changes.items() if name in form["model"]}
  return form | {name: value for name, value in changes.items() if name in form}


def without(form: dict[str, Any], token: str) -> dict[str, Any]:
  form["model"]["vocab"].pop(token)
  return form


def as_is(form: dict[str, Any], text: str, pattern: str = ranks.GPT2) -> list[int]:
  """What tiktoken gives with all tokens of a vocabulary."""
  byte_of = ranks.alphabet()
  ids = {bytes(byte_of.get(c, 0) for c in token): i for token, i in form["model"]["vocab"].items()}
  return ranks.encoding_of(Ranks(pattern, ids)).encode_to_numpy(text, disallowed_special=()).tolist()


def json_of(part: Any) -> Any:
  return json.loads(part.__getstate__())


REFUSED = {  # a condition, a tokenizer for which it does not hold, a text with other tokens, and the reason
  "order of merges": (tiny("ab bc", "b+c a+b"), "abc", "its merges are not in the order of ids"),
  "two of a token are left": (tiny("ab abc", "a+b", ignore_merges=True), "xabc", "no merge makes its token 'abc'"),
  "no dropout": (tiny("ab", "a+b", dropout=1.0), "ab", "it has dropout"),
  "no suffix": (tiny("b</w> ab", "a+b", end_of_word_suffix="</w>"), "ab", "it has end_of_word_suffix"),
  "no prefix": (tiny("##b ab", "a+##b", continuing_subword_prefix="##"), "aab", "it has continuing_subword_prefix"),
  "normalizer": (tiny("ab", "a+b", normalizer=json_of(normalizers.Lowercase())), "AB", "its normalizer is Lowercase"),
  "prefix space": (tiny("Ġa", "Ġ+a", pre_tokenizer=json_of(pre_tokenizers.ByteLevel())), "a", r"\(ByteLevel\)"),
  "no words": (tiny("aĠ", "a+Ġ", pre_tokenizer=json_of(NO_REGEX)), "a b", r"\(ByteLevel\) is not in the table"),
  "unknown pattern": (tiny("", pre_tokenizer=json_of(split(r"\d+"))), "a1", r"\(Split\+ByteLevel\) is not in the tab"),
  "removed words": (tiny("", pre_tokenizer=json_of(split(ranks.QWEN, "removed"))), "1a", r"\(Split\+ByteLevel\)"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_a_tokenizer_with_other_tokens_is_refused(name: str):
  form, text, reason = REFUSED[name]
  theirs = expected(loaded(form), text)
  assert as_is(form, text, r"\d+" if name == "unknown pattern" else ranks.GPT2) != theirs
  with pytest.raises(NotEqualError, match=reason):
    ranks.proven(form)
  documents = Documents(loaded(form), np.dtype("<u2"))
  assert [ids.tolist() for ids in documents([text.encode()])] == [theirs]
  assert documents.library().startswith("tokenizers, as ")


def test_a_vocabulary_that_tiktoken_cannot_take_is_refused():
  with pytest.raises(NotEqualError, match="its vocabulary lacks 1 of the 256 bytes"):
    ranks.proven(without(tiny(""), "x"))
  twice = tiny("abcd efgh")
  twice["model"]["vocab"]["efgh"] = twice["model"]["vocab"]["abcd"]
  with pytest.raises(NotEqualError, match="two of its tokens have the same id"):
    ranks.proven(twice)
  with pytest.raises(NotEqualError, match="its model is WordLevel, not BPE"):
    ranks.proven(json.loads(Tokenizer(models.WordLevel({"a": 0}, "a")).to_str()))


@pytest.mark.parametrize("token", ["abc", "abcd", "cab"])
def test_a_token_that_no_merge_makes_is_left_out(token: str, by_tiktoken_alone: None):
  """As the names of special tokens, which are in the vocabulary of a BPE that is trained here."""
  form, text = tiny(f"ab {token}", "a+b"), f"{token} x{token}"
  theirs = expected(loaded(form), text)
  assert as_is(form, text) != theirs
  assert token.encode() not in ranks.proven(form).ids
  assert Documents(loaded(form), np.dtype("<u2"))([text.encode()])[0].tolist() == theirs


def test_a_product_of_several_merges_may_have_the_order_of_ids(by_tiktoken_alone: None):
  """Only one of its merges is ever used."""
  form = tiny("ab bc abc", "a+b b+c a+bc ab+c")
  theirs, chance = loaded(form), random.Random(0)
  pieces = ["".join(chance.choices("abc", k=20)) for _ in range(200)]
  documents = Documents(loaded(form), np.dtype("<u2"))
  found = documents([piece.encode() for piece in pieces])
  assert [ids.tolist() for ids in found] == [expected(theirs, piece) for piece in pieces]


def test_random_vocabularies_give_the_same_tokens_or_are_refused(by_tiktoken_alone: None):
  """Merges in any order, with products that are made in several ways, or by none."""
  chance, taken = random.Random(1), 0
  for _ in range(100):
    known, merges = ["a", "b", "c"], list[str]()
    for _ in range(chance.randrange(1, 9)):
      left, right = chance.choice(known), chance.choice(known)
      merges.append(f"{left}+{right}")
      known += [left + right] if left + right not in known else []
    known += [word for word in ("abca", "ccb", "bacb") if word not in known and chance.random() < 0.2]
    if chance.random() < 0.2:
      chance.shuffle(merges)
    form = tiny(" ".join(known[3:]), " ".join(dict.fromkeys(merges)), ignore_merges=chance.random() < 0.5)
    try:
      ranks.proven(form)
    except NotEqualError:
      continue
    taken += 1
    theirs, documents = loaded(form), Documents(loaded(form), np.dtype("<u2"))
    pieces = ["".join(chance.choices("abc", k=chance.randrange(1, 15))) for _ in range(60)] + known
    found = documents([piece.encode() for piece in pieces])
    assert [ids.tolist() for ids in found] == [expected(theirs, piece) for piece in pieces], form["model"]["merges"]
  assert taken > 40


def test_added_tokens_in_a_text_are_those_of_tokenizers():
  """Also where `tokenizers` takes the spaces beside them, or compares them in normal form."""
  theirs = loaded(form_of("Qwen2"))
  theirs.add_tokens(["<tool>", AddedToken("<fill>", lstrip=True, rstrip=True), "né", "o\u0308k"])
  documents = Documents(loaded(theirs.to_str()), np.dtype("<u2"))
  texts = [
    "use <tool> and",
    "a  <fill>  b",
    "ne\u0301 né",
    "one\u0301",
    "\u00f6k",
    "Ne\u0301",
    "<|im_start|>user",
    "<tool",
    *TEXTS.values(),
  ]
  found = documents([text.encode() for text in texts])
  assert [ids.tolist() for ids in found] == [expected(theirs, text) for text in texts]
  assert any(theirs.token_to_id("<tool>") in ids for ids in found)
  assert documents.library() == "tiktoken, but for texts with an added token"


def test_other_tokens_in_the_first_text_leave_all_to_tokenizers(
  monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
  form = tiny("ab bc", "b+c a+b")
  ids = {token.encode() if len(token) > 1 else bytes([ranks.alphabet()[token]]): i for token, i in vocabulary(form)}
  monkeypatch.setattr(ranks, "proven", lambda form: Ranks(ranks.GPT2, ids))
  documents, theirs = Documents(loaded(form), np.dtype("<u2")), loaded(form)
  pieces = ["abab", "same", "abc", "abcabc"]
  for _ in range(2):
    found = documents([piece.encode() for piece in pieces])
    assert [ids.tolist() for ids in found] == [expected(theirs, piece) for piece in pieces]
  assert documents.library() == "tokenizers, as tiktoken gives other tokens for 'abc'"
  assert capsys.readouterr().err == f"documents are tokenized by {documents.library()}\n"


def vocabulary(form: dict[str, Any]) -> list[tuple[str, int]]:
  return list(form["model"]["vocab"].items())


def test_only_the_first_text_of_a_preparation_is_compared(monkeypatch: pytest.MonkeyPatch):
  monkeypatch.setattr(ranks, "COMPARED", 1000)
  documents = Documents(loaded(form_of("GPT-2")), np.dtype("<u2"))
  compared = []
  slow = Documents._by_tokenizers
  monkeypatch.setattr(Documents, "_by_tokenizers", lambda self, texts: compared.extend(texts) or slow(self, texts))
  for _ in range(2):
    documents.compare()
    documents([b"a" * 300] * 10)
    documents([b"b" * 300] * 10)
    assert compared == ["a" * 300] * 4
    compared.clear()


def test_a_text_that_tiktoken_gives_up_on_goes_to_tokenizers(monkeypatch: pytest.MonkeyPatch):
  class GivesUp:
    def encode_to_numpy(self, text: str, **options: Any) -> np.ndarray:
      raise ValueError("Regex error while tokenizing")

  documents, theirs = Documents(loaded(form_of("GPT-2")), np.dtype("<u2")), loaded(form_of("GPT-2"))
  assert documents.library() == "tiktoken"
  monkeypatch.setattr(documents, "_fast", GivesUp())
  assert documents([b"some text"])[0].tolist() == expected(theirs, "some text")


@pytest.mark.full
def test_tiktoken_gives_up_on_a_million_spaces():
  documents, theirs = Documents(loaded(form_of("GPT-2")), np.dtype("<u2")), loaded(form_of("GPT-2"))
  for text in (" " * 1_000_000 + "a", "ab" * 500_000):
    assert documents([text.encode()])[0].tolist() == expected(theirs, text)


@pytest.mark.parametrize("other", [r"\p{Nd}", r"(?!9)\p{N}", r"(?![\x{1E950}-\x{1E959}])\p{N}", r"[\p{N}\x{16E9B}]"])
def test_libraries_that_differ_in_a_class_are_found(other: str, monkeypatch: pytest.MonkeyPatch):
  encoding_of = ranks.encoding_of

  def differing(given: Ranks) -> Any:
    return encoding_of(given._replace(pattern=given.pattern.replace(r"\p{N}", other)))

  monkeypatch.setattr(ranks, "encoding_of", differing)
  with pytest.raises(NotEqualError, match=r"differ in \\p\{N\}"):
    ranks.check_classes.__wrapped__(ranks.GPT2)


def test_digits_that_are_split_otherwise_are_found(monkeypatch: pytest.MonkeyPatch):
  """`tokenizers` splits by the digits of Unicode 17, but does not have them in its classes."""
  documents, theirs = Documents(loaded(form_of("SmolLM2")), np.dtype("<u2")), loaded(form_of("SmolLM2"))
  monkeypatch.setattr(documents, "_to_compare", 0)
  text = "a  \U00011de0b\n    \U00016ff4x"
  assert documents([text.encode()])[0].tolist() == expected(theirs, text)
  assert documents.library() == "tiktoken"
  monkeypatch.setattr(ranks, "NEW_DIGITS", re.compile("\U00016ff4"))
  with pytest.raises(NotEqualError, match=r"differ in \\p\{N\}"):
    ranks.check_classes.__wrapped__(ranks.DIGITS)


@pytest.mark.full
@pytest.mark.both_stacks
def test_the_libraries_agree_on_the_classes_of_all_characters():
  points = [*range(0x34000), *range(0xE0000, 0xE0200)]  # none of the others has one
  every = "".join(chr(point) for point in points if not 0xD800 <= point < 0xE000)
  for name in (r"\p{L}", r"\p{N}", r"\s", r"\p{M}", r"\p{Lu}", r"\p{Lt}", r"\p{Ll}", r"\p{Lm}", r"\p{Lo}"):
    encoding = ranks.encoding_of(Ranks(name, {bytes([byte]): byte for byte in range(256)}))
    here = bytes(encoding.encode_to_numpy(every, disallowed_special=()).tolist()).decode()
    there = pre_tokenizers.Split(Regex(name), "removed").pre_tokenize_str(every)
    assert set(here) == set(every) - {character for part, _ in there for character in part}
    assert max(map(ord, here)) < ranks.LAST_LETTERS or name == r"\p{M}"
    if name == r"\p{N}":
      parts = pre_tokenizers.Digits(individual_digits=True).pre_tokenize_str("a".join(["", *every, ""]))
      digits = {part for part, _ in parts if len(part) == 1 and part != "a"}
      assert all(ranks.NEW_DIGITS.match(character) for character in set(here) ^ digits)


def test_both_libraries_prepare_the_same_data_and_the_run_says_which(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
  (tmp_path / "a.txt").write_text(TEXTS["code"])
  fields = {"data__path": str(tmp_path / "a.txt"), "data__tokenizer": "bpe", "model__vocab_size": 300}

  def load(cache: str) -> Any:
    return texts_of.load(config("single", **fields, model__seq_len=16, data__cache_dir=str(tmp_path / cache)))

  fast = load("fast")
  assert fast.description.endswith("(bpe; tokenized by tiktoken)")

  def refuse(form: dict[str, Any]) -> Ranks:
    raise NotEqualError("it has dropout")

  monkeypatch.setattr(ranks, "proven", refuse)
  slow = load("slow")
  assert slow.description.endswith("(bpe; tokenized by tokenizers, as it has dropout)")
  assert fast.parts[0].fingerprint == slow.parts[0].fingerprint
  assert fast.tokenizer == slow.tokenizer
  assert load("fast").description == fast.description  # which is kept beside the data


def test_tiktoken_needs_no_network(monkeypatch: pytest.MonkeyPatch):
  monkeypatch.setattr(socket, "socket", lambda *args, **options: pytest.fail("a connection"))
  monkeypatch.setattr(socket, "getaddrinfo", lambda *args, **options: pytest.fail("a name"))
  documents = Documents(loaded(form_of("GPT-2")), np.dtype("<u2"))
  assert len(documents([b"some text"])) == 1
  assert documents.library() == "tiktoken"


def test_a_sample_has_the_least_stride_that_keeps_both_limits(monkeypatch: pytest.MonkeyPatch):
  monkeypatch.setattr(tokenizers, "UNIT", 200)
  chance = random.Random(2)
  for _ in range(60):
    pieces = [b" ".join(chance.choices([b"w%d" % i for i in range(99)], k=20)) for _ in range(chance.randrange(1, 70))]
    size, words = chance.randrange(100, 12_000), chance.randrange(20, 400)
    units = list(tokenizers.units(pieces, 200))
    for stride in (1, 2, 4, 8, 16, 32, 64, 128):
      kept = [piece for unit in units[::stride] for piece in unit]
      seen = {word for piece in kept for word in tokenizers.WORDS.findall(piece.decode())}
      if len(units) <= stride or (sum(len(p) + 64 for p in kept) <= size and sum(map(len, seen)) <= words):
        break
    assert tokenizers.sample(pieces, size, words) == kept


NAMES = ["<|im_start|>", "<|im_end|>", "<|im_end|>x", "<end>", "user"]  # one begins another; the last is a word


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("added", ["special", "not normalized", "normalized", "with spaces"])
def test_names_of_tokens_stand_for_them_as_in_tokenizers(kind: str, added: str, monkeypatch: pytest.MonkeyPatch):
  monkeypatch.setattr(named_tokens, "FEW", 0)
  tokenizer = Tokenizer.from_str(form_of(kind))
  more = {"normalized": {"normalized": True}, "with spaces": {"lstrip": True}}.get(added, {"normalized": False})
  tokenizer.add_special_tokens(["<|im_end|>"])
  tokenizer.add_tokens([AddedToken(name, special=added == "special", **more) for name in NAMES[2:]])
  plain = loaded(tokenizer.to_str())
  plain.encode_special_tokens = True
  encode = named_tokens.NamedTokens(tokenizer, Documents(plain, np.dtype("<u4")))
  choice = random.Random(0)
  pieces = [
    *NAMES,
    *NAMES,
    "<|im_",
    "end|>",
    " ",
    "\n",
    "The user's 123 words",
    "é e\u0301",
    "他说",
    "'LL",
    "user user",
  ]
  texts = ["", *TEXTS.values(), *("".join(choice.choices(pieces, k=choice.randint(1, 30))) for _ in range(150))]
  expected = [found.ids for found in tokenizer.encode_batch_fast(texts, add_special_tokens=False)]
  assert encode(texts) == expected
