"""A hook of mkdocs: pages and files of the repository that are outside docs/ become part of the site.

README is its first page. Markdown files that a page links become pages, and other files that it links are copied as
text. The links of all pages are rewritten to match, so the pages can be read in the repository and on the site.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from pymdownx.slugs import slugify

ROOT = Path(__file__).parents[1]
_FIRST = {"README.md": "index.md", "CONTRIBUTING.md": "CONTRIBUTING.md", "AGENTS.md": "AGENTS.md"}
_LINK = re.compile(r"(?<=\]\()(?!\w+:|#)([^)#\s]+)")


def on_config(config: MkDocsConfig) -> None:
    """Give headings the anchors that they have in a repository's viewer, which the pages' links name."""
    config.mdx_configs.setdefault("toc", {})["slugify"] = slugify(case="lower")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add what is outside docs/: the first pages, and everything that a page links."""
    waiting = [*_FIRST, *(f"docs/{file.src_uri}" for file in files.documentation_pages())]
    seen = set(waiting)
    while waiting:
        path = waiting.pop()
        if not path.startswith("docs/"):
            files.append(File.generated(config, uri_of(path), abs_src_path=str(ROOT / path)))
        if path.endswith(".md"):
            found = {_target(path, link) for link in _LINK.findall((ROOT / path).read_text(encoding="utf-8"))}
            new = {name for name in found - seen if not name.startswith("docs/") and (ROOT / name).is_file()}
            seen |= new
            waiting += new
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Rewrite a page's links from files of the repository to those of the site."""
    source = Path(page.file.abs_src_path or "").relative_to(ROOT).as_posix()
    here = posixpath.dirname(page.file.src_uri)
    return _LINK.sub(lambda link: posixpath.relpath(uri_of(_target(source, link[1])), here or "."), markdown)


def uri_of(path: str) -> str:
    """Return the name on the site of a file of the repository: "docs/train.md" -> "train.md"."""
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    return _FIRST.get(path) or (f"repository/{path}" if path.endswith(".md") else f"repository/{path}.txt")


def _target(source: str, link: str) -> str:
    """Return the file of the repository that a link of another one names."""
    return posixpath.normpath(posixpath.join(posixpath.dirname(source), link))
