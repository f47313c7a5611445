"""Buckets of Google Cloud Storage and of S3: where the results of a run may be, and the data that it reads.

bucket.py names, reads and writes objects, answers.py says in a sentence why that failed, lease.py keeps a second run
out, and mirror.py copies the files of a run there and back. All of it goes through tensorstore, which orbax needs
anyway and which reads the arrays of checkpoints, so nothing has to be installed for it.

An object store is not a file system. An object is put whole and at once: there is no append, no rename, no folder.
Credentials are those that tensorstore finds by itself, in the environment or from the platform. We never see them.
"""

from runtime.storage.answers import StorageError
from runtime.storage.bucket import Folder, is_url, location

__all__ = ["Folder", "StorageError", "is_url", "location"]
