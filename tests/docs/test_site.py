"""The pages of docs/ as a site: it builds without a warning, and no Markdown is left in it unrendered."""

from __future__ import annotations

import html
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted((ROOT / "docs").rglob("*.md"))
ARTICLE = re.compile(r"<article.*?</article>", re.DOTALL)
CODE = re.compile(r"<pre.*?</pre>|<code>.*?</code>", re.DOTALL)
TEXT = re.compile(r"<(?:p|li)>(.*?)</(?:p|li)>", re.DOTALL)
UNRENDERED = re.compile(r"(^|\n)\s*([-*] |\d+\. |\| |```|#)|\*\*[^*]+\*\*|\]\(")
"""A list, table, block or heading inside a paragraph, bold text, or a link."""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the built site."""
    pytest.importorskip("material", reason="the site is built with the extra docs")
    out = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(out)]
    done = subprocess.run(
        command,
        cwd=ROOT,
        capture_output=True,
        text=True,
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return out


def articles(site: Path) -> dict[str, str]:
    """Return the text of each page, without its code."""
    found = {}
    for path in sorted(site.rglob("*.html")):
        match = ARTICLE.search(path.read_text())
        if match:
            found[str(path.relative_to(site))] = CODE.sub("CODE", match[0])
    return found


def test_every_page_is_built_and_rendered(site: Path) -> None:
    built = articles(site)
    assert {f"{page.relative_to(ROOT / 'docs').with_suffix('')}.html" for page in PAGES} - {
        "README.html",
        "tasks/README.html",
    } <= set(built)
    assert {"index.html", "tasks/index.html"} <= set(built)
    left = []
    for name, article in built.items():
        for text in TEXT.findall(article):
            plain = html.unescape(re.sub(r"<[^>]+>", "", text))
            if UNRENDERED.search(plain):
                left.append((name, plain[:200]))
    assert left == []


def test_pictures_say_what_they_show(site: Path) -> None:
    pictures = [
        (name, picture)
        for name, article in articles(site).items()
        for picture in re.findall(r"<img[^>]*>", article)
    ]
    assert pictures
    assert [each for each in pictures if not re.search(r'alt="[^"]{10,}"', each[1])] == []


def test_files_outside_of_the_documentation_are_pages_too(site: Path) -> None:
    """A link to code opens it, in the built site too."""
    article = (site / "read-the-code.html").read_text()
    assert 'href="source/framework/meshwright/train.py.html"' in article
    assert "def train(" in re.sub(
        r"<[^>]+>", "", (site / "source/framework/meshwright/train.py.html").read_text()
    )


def test_no_page_asks_another_host(site: Path) -> None:
    """Fonts, scripts and styles are in the site itself."""
    loaded = re.compile(r"<(?:script|link|img)[^>]*(?:src|href)=\"?https?://[^>]*>")
    assert [path.name for path in site.rglob("*.html") if loaded.search(path.read_text())] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT / "docs")))
def test_a_page_opens_with_whom_it_is_for(page: Path) -> None:
    title, empty, audience, *_ = page.read_text().splitlines()
    assert title.startswith("# ") and not empty
    assert re.fullmatch(r"\*For .*\.\*", audience), audience
