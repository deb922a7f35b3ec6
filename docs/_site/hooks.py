"""Pages for the files that the documentation links to outside of docs/: code, examples, results.

On a code host such a link opens the file. The built site has to hold the file itself: each becomes a
page below source/, code in a block, Markdown rendered, a folder as a list of its files. Links in those
pages are followed too.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

LINK = re.compile(r"(?<=\]\()([^)\s#:]+)(#[^)\s]*)?(?=\))")
"""Target of a Markdown link within the repository, and its anchor."""
SOURCE = "source"
"""Folder of the site for pages of files outside of docs/."""
MAX_CODE_BYTES = 200_000


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add a page for every file outside of docs/ that a page links to."""
    root = Path(config.docs_dir).parent
    docs = Path(config.docs_dir).name
    waiting = [
        (posixpath.join(docs, file.src_uri), file.content_string)
        for file in files.documentation_pages()
    ]
    seen: set[str] = set()
    while waiting:
        place, text = waiting.pop()
        for target, _ in LINK.findall(text):
            path = posixpath.normpath(posixpath.join(posixpath.dirname(place), target))
            if path in seen or path == docs or path.startswith(f"{docs}/"):
                continue
            seen.add(path)
            page = _render(root, path, place)
            files.append(File.generated(config, _page_of(path), content=page))
            if path.endswith(".md"):
                waiting.append((path, page))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Point the links that leave docs/ at the pages of their files."""
    docs = Path(config.docs_dir).name
    uri = page.file.src_uri
    # where the file lies in the repository, and so what its links are relative to
    is_source = uri.startswith(f"{SOURCE}/")
    place = uri.removeprefix(f"{SOURCE}/") if is_source else posixpath.join(docs, uri)

    def rewrite(match: re.Match[str]) -> str:
        target, anchor = match[1], match[2] or ""
        path = posixpath.normpath(posixpath.join(posixpath.dirname(place), target))
        inside = path.removeprefix(f"{docs}/")
        found = "README.md" if path == docs else inside if inside != path else _page_of(path)
        return posixpath.relpath(found, posixpath.dirname(uri) or ".") + anchor

    return LINK.sub(rewrite, markdown)


def _page_of(path: str) -> str:
    """Return the page of a file: its own path for Markdown, with .md after it for the others."""
    return f"{SOURCE}/{path}" if path.endswith(".md") else f"{SOURCE}/{path}.md"


def _render(root: Path, path: str, place: str) -> str:
    """Return a file as Markdown. Raises PluginError: there is no such file."""
    full = root / path
    if path.startswith("..") or not full.exists():
        raise PluginError(f"{place} links to {path}, which is not there")
    if full.is_dir():
        names = sorted(each.name for each in full.iterdir() if not each.name.startswith((".", "_")))
        return f"# {path}\n\n" + "".join(f"- `{name}`\n" for name in names)
    text = full.read_text(encoding="utf-8")[:MAX_CODE_BYTES]
    if path.endswith(".md"):
        return text
    language = {".py": "python", ".toml": "toml", ".sh": "sh", ".ipynb": "json"}.get(
        full.suffix, ""
    )
    fence = "`" * max(3, max((len(run) for run in re.findall(r"`+", text)), default=0) + 1)
    return f"# {full.name}\n\n`{path}`\n\n{fence}{language}\n{text}\n{fence}\n"
