"""A page as one file: its title, what it is of, its sections, and the style and script that all pages share."""

import os
from html import escape
from pathlib import Path

from reporting.pages.element import tag

HERE = Path(__file__).parent
ICON = "<link rel='icon' href='data:,'>"  # otherwise a browser asks a server for one


def document(title: str, subtitle: str, *sections: str, script: str = "", style: str = "", navigation: str = "") -> str:
  """A whole page.

  Args:
    script, style: JavaScript and CSS of this page alone.
    navigation: links to the parts of the page, as markup.
  """
  head = (
    "<meta charset='utf-8'><meta name='viewport' content='width=device-width, initial-scale=1'>"
    "<meta name='color-scheme' content='light dark'>" + ICON + tag("title", escape(title))
  )
  styles = "".join(f"<style>{rules}</style>" for rules in ((HERE / "page.css").read_text(), style) if rules)
  scripts = "".join(f"<script>{code}</script>" for code in ((HERE / "page.js").read_text(), script) if code)
  top = tag("header", tag("h1", escape(title)), tag("p", escape(subtitle), class_="about"))
  body = tag("body", top, navigation, tag("main", *sections, id="main"), scripts)
  return f"<!doctype html>\n<html lang='en'><head>{head}{styles}</head>{body}</html>\n"


def _no_links(path: str, flags: int) -> int:
  """Follows no link that a stranger has left in a workdir: it would overwrite a file elsewhere."""
  return os.open(path, flags | os.O_NOFOLLOW, 0o666)


def write(path: Path, page: str) -> None:
  """Writes a page, or another text, at once, so that nobody ever reads half of it. Raises OSError.

  Names of files may hold what UTF-8 cannot write: the bytes of another encoding. Each becomes a question mark.
  """
  part = path.with_name(f".{path.name}.{os.getpid()}.part")
  try:
    with open(part, "w", encoding="utf-8", errors="replace", opener=_no_links) as file:
      file.write(page)
    part.replace(path)
  finally:
    part.unlink(missing_ok=True)
