"""Names of buckets, and the sentences for what goes wrong there. Nothing here needs a network."""

import errno
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import ROOT, one_sentence

from errors import ConfigError
from runtime.storage.answers import KINDS, explained, of_storage
from runtime.storage.bucket import Folder, is_url, location

SECRET = "planted-secret-4f1c"
TENSORSTORE = "PERMISSION_DENIED: Unknown [http_response_code='{code}'] [http_response_body='{body}']"


@pytest.mark.parametrize(
  "url, bucket, path",
  [
    ("gs://bucket/run", "bucket", "run"),
    ("s3://my.bucket-1/a/b c/", "my.bucket-1", "a/b c"),
    ("gs://bucket", "bucket", ""),
  ],
)
def test_a_url_is_a_folder_of_a_bucket(url, bucket, path):
  found = location(url, "workdir")
  assert isinstance(found, Folder)
  assert (found.bucket, found.path) == (bucket, path)
  assert str(found) == url.rstrip("/")
  assert str(found / "x" / "y.json").endswith("/x/y.json")
  assert (found / "x" / "y.json").parent == found / "x"


def test_other_names_are_paths():
  assert location("runs/a:b", "workdir") == Path("runs/a:b")
  assert not is_url("C:/runs")


@pytest.mark.parametrize(
  "url",
  [
    "https://bucket/run", "azure://bucket/run", "gs://", "gs:///run", "s3://Bucket/run", "gs://b/run", "gs://bucket/a//b",
    "gs://bucket/../other", "s3://bucket/a*",
  ],
)  # fmt: skip
def test_a_url_that_cannot_be_used_is_refused(url):
  with one_sentence("workdir=", url):
    location(url, "workdir")


@pytest.mark.parametrize(
  "url",
  [
    f"gs://user:{SECRET}@bucket/run", f"s3://bucket/run?X-Amz-Signature={SECRET}", f"gs://bucket/run#{SECRET}",
    f"https://user:{SECRET}@host/run",
  ],
)  # fmt: skip
def test_a_url_with_credentials_is_refused_and_not_repeated(url):
  with pytest.raises(ConfigError, match=r"^data.path .* credentials") as error:
    location(url, "data.path")
  assert SECRET not in str(error.value)


@pytest.mark.parametrize(
  "code, body, reason",
  [
    (401, "", "credentials are missing or have expired"),
    (400, "<Code>ExpiredToken</Code>", "credentials are missing or have expired"),
    (403, "<Code>InvalidAccessKeyId</Code><AWSAccessKeyId>KEY</AWSAccessKeyId>", "credentials are missing or have"),
    (403, "<Code>AccessDenied</Code>", "permission denied"),
    (404, "<Code>NoSuchBucket</Code>", "no such bucket"),
    (429, "rateLimitExceeded", "asked for fewer requests"),
    (500, "", "storage failed"),
    (503, "<Code>SlowDown</Code>", "asked for fewer requests"),
    (507, "", "quota is used up"),
    (403, "quotaExceeded", "quota is used up"),
    (418, "", "HTTP 418"),
  ],
)  # fmt: skip
def test_each_kind_of_failure_has_its_sentence(code, body, reason):
  message = TENSORSTORE.format(code=code, body=f"{body} {SECRET}")
  found = explained("gs://bucket/run/a", ValueError(message))
  assert reason in str(found)
  assert "gs://bucket/run/a" in str(found)
  assert "\n" not in str(found)
  assert SECRET not in f"{found!r}{found}"
  assert found.errno
  assert of_storage(ValueError(message))


def test_a_broken_connection_is_not_a_damaged_checkpoint():
  assert of_storage(ValueError("ABORTED: All 3 retry attempts failed: CURL error [curl_code='56']"))
  assert not of_storage(ValueError("DATA_LOSS: Error decoding manifest: Expected to read 4 bytes"))
  assert not of_storage(ValueError("NOT_FOUND: Metadata at params/x/.zarray does not exist"))


def test_full_storage_is_a_full_disk():
  assert [kind.number for kind in KINDS if "quota" in kind.reason] == [errno.EDQUOT]


@pytest.mark.full
def test_no_provider_needs_a_library_of_its_own():
  libraries = ("boto3", "botocore", "gcsfs", "s3fs", "obstore", "google.cloud.storage", "google.auth", "aiohttp")
  program = f"import sys; sys.modules.update(dict.fromkeys({libraries})); import train"  # importing one of them fails
  subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True)
