"""Texts that TensorFlow Datasets has prepared: a shard in array_record form (data/tfds.py), without TensorFlow.

A record is a `tf.train.Example`, encoded as the `features.json` beside it says: `Text`, string tensors, `ClassLabel`,
and sequences of integers, which are token ids. An offset is the number of a record.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

import limits
from data import records, tfds
from data.text.files import TextFile
from data.text.rows.arrow import at_a_time
from data.text.rows.fields import Fields, Read, columns_of
from errors import ConfigError

SHARE = 4  # of the limit of a row: the library keeps a small number in several times the bytes of its record
IN_ORDER = "readahead_buffer_size:0,max_parallelism:0"  # by default, each of many threads keeps 16 MB


def read(file: TextFile, fields: Fields, offset: int, before: int) -> Read:
  """The rows from `offset` on."""
  from tensorflow_datasets.core.features import FeaturesDict

  features, said = _features(file), f"{file.path!r} in data.path"
  columns = columns_of(fields, sorted(features), repr(file.path))
  wanted = FeaturesDict({name: features[name] for name in columns.values()})
  for encoded, count in _records(file, said, offset, fields.limit):
    if SHARE * len(encoded) > fields.limit:
      limits.check(f"record {offset + 1} of {said}, which is held {SHARE} times,", SHARE * len(encoded), fields.limit)
    try:
      values = wanted.deserialize_example_np(encoded)
    except Exception as error:  # of many types
      tfds.refuse(Path(file.path).parent, said, error)
    offset += 1
    found = {option: _value(values[name], name == fields.label) for option, name in columns.items()}
    yield found, offset, file.size * offset // count


def class_names(file: TextFile, field: str) -> list[str]:
  """The names of the classes, if the field is a ClassLabel."""
  return list(getattr(_features(file).get(field), "names", None) or [])


def _features(file: TextFile) -> dict[str, Any]:
  """The features by name."""
  from tensorflow_datasets.core.features import FeatureConnector, FeaturesDict

  folder, said = Path(file.path).parent, f"{file.path!r} in data.path"
  tfds.check_classes(folder, said)
  try:
    features = FeatureConnector.from_config(str(folder))
  except Exception as error:  # of many types
    tfds.refuse(folder, said, error)
  if not isinstance(features, FeaturesDict):
    raise ConfigError(f"{said} has records without names for their fields; use a data set with a FeaturesDict")
  return dict(features.items())


def _records(file: TextFile, said: str, start: int, limit: int) -> Iterator[tuple[bytes, int]]:
  """The records from `start` on, and how many the file has."""
  from array_record.python.array_record_module import ArrayRecordReader

  try:
    most = records.together(file.path, limit)
    reader = ArrayRecordReader(file.path, options=IN_ORDER)
    count = reader.num_records()
    step = min(most, at_a_time(count, file.size))
    for first in range(start, count, step):
      for record in reader.read(first, min(first + step, count)):
        yield record, count
    reader.close()
  except ConfigError:
    raise
  except Exception as error:  # of many types
    tfds.refuse(Path(file.path).parent, said, error)


def _value(value: Any, is_label: bool) -> Any:
  """A value as JSON would have it: bytes as text if it names a class, numbers of Python."""
  if isinstance(value, np.generic):
    value = value.item()
  return value.decode() if is_label and isinstance(value, bytes) else value
