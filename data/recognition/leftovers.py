"""What programs leave beside data: downloads that have not ended, copies, checksums, folders of a system or a cache.

And tables whose files do not all count: the log of Delta Lake, Iceberg or Hudi says which do. An old file of such a
table holds rows that were removed since, or that another file holds, too.
"""

import re

from data.recognition.survey import Survey

LEFT = "left by a program, no data"
UNFINISHED, TABLE = "unfinished", "table"  # kinds
OF_TABLES = ("parquet", "orc", "avro")
# By what follows the last point in the name of a file, or by the name if it has none.
ENDINGS = {
  **dict.fromkeys(("part", "partial", "crdownload", "incomplete", "aria2", "opdownload", "filepart"), UNFINISHED),
  **dict.fromkeys(("tmp", "bak", "orig", "swp", "swo", "crc"), LEFT),
  **dict.fromkeys(("md5", "sha1", "sha256", "sha512", "md5sum", "sha256sum"), LEFT),
  **dict.fromkeys(("md5sums", "sha1sums", "sha256sums", "sha512sums", "icon\r"), LEFT),
}
NAMES = {"thumbs.db", "ehthumbs.db", "desktop.ini"}
FOLDERS = {"__macosx", "__pycache__", "_temporary", "_delta_log", "@eadir", "$recycle.bin", "lost+found"}
OF_A_CACHE = re.compile(r"cache-[0-9a-f]+\.arrow|tmp\w{8}")  # what `map` of Hugging Face's `datasets` keeps


def leftovers(found: Survey) -> dict[str, str]:
  """The files that are no data, or no data by themselves, with LEFT or their kind."""
  said = {}
  last, of_folder = "", ""
  for file in found.files:  # there may be millions
    folder, _, name = file.relative.rpartition("/")
    if folder != last:
      last, of_folder = folder, _of_folder(folder)
    ending = name.rpartition(".")[2].lower()
    if kind := ENDINGS.get(ending) or of_folder:
      said[file.relative] = kind
    elif name[-1] == "~" or (ending in ("db", "ini") and name.lower() in NAMES):
      said[file.relative] = LEFT
  return _tables(found) | said


def _of_folder(path: str) -> str:
  """What the files in a folder are: UNFINISHED, LEFT, or "" for others."""
  return UNFINISHED if path.endswith(".incomplete") else LEFT if FOLDERS & set(path.lower().split("/")) else ""


def _tables(found: Survey) -> dict[str, str]:
  """The files of tables that have a log."""
  roots = {name.removesuffix(".hoodie") for name in found.hidden if name.endswith(".hoodie")}
  for file in found.files:
    if "_delta_log/" in file.relative:
      roots.add(file.relative.partition("_delta_log/")[0])
    elif file.relative.endswith(".metadata.json") and file.folder.rpartition("/")[2] == "metadata":
      roots.add(file.folder.removesuffix("metadata"))
  some = [file.relative for file in found.files if file.kind in OF_TABLES] if roots else []
  return {relative: TABLE for relative in some if relative.startswith(tuple(roots))}
