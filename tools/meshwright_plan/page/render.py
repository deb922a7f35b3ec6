"""Rendering of HTML pages from templates, and of matplotlib figures as inline SVG."""

from __future__ import annotations

import html
import io
import math
import re
from collections import Counter
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jinja2

from meshwright_plan.picture.figure import STYLE
from meshwright_plan.picture.palette import TEXT

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SHARED = Path(__file__).parent / "templates"
"""Directory of ``page.html.j2``, the frame that each page extends."""
OFTEN = 8
"""Number of uses from which a style becomes a class."""
_STYLE = re.compile(r' style="([^"]*)"')
_TAG = re.compile(r"<[^>]*>")
_LONG = re.compile(r"(\d+\.\d\d)\d+")
_FONTS = re.compile(r"font-family: [^;\"]*")
_NAMED_GROUP = re.compile(r'<g id="[^"]*"')
_INDENT = re.compile(r"\s*\n\s*")
_BOX = re.compile(r'<g id="panel\d+-(rank\d+)-([^"]+)">')
_ID = re.compile(r'(\bid="|url\(#|href="#)')
_WIDTH = re.compile(r'<svg [^>]*?width="([\d.]+)pt"')
LARGEST = 1.5
"""Largest enlargement of a picture on a wide screen."""


def render(template: Path, **values: Any) -> str:
    """Return the rendered file. Values are escaped, unless they are marked as HTML."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader([template.parent, SHARED]),
        undefined=jinja2.StrictUndefined,
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template(template.name).render(**values)


def svg_of(drawn: Figure, title: str, prefix: str = "") -> str:
    """Return a figure as SVG text for use inside a page; ``title`` is its label for screen readers.

    ``prefix`` begins the names inside it. Pictures of one page must not share names: what is named
    in a folded section is not drawn, such as the hatching of a box.

    It is never shrunk, so that its smallest letters stay readable: on a narrow screen it scrolls in
    its frame. A box of a schedule has a tooltip with its rank and action.

    The text is less than half of matplotlib's file: coordinates are rounded to a hundredth of a
    point, groups have no names, fonts are few, and frequent styles become classes.
    """
    import matplotlib

    target = io.StringIO()
    with matplotlib.rc_context(STYLE):
        # the page has the paper
        drawn.savefig(target, format="svg", metadata={"Date": None}, transparent=True)
    text = target.getvalue()
    text = _TAG.sub(lambda tag: _LONG.sub(r"\1", tag[0]), text[text.index("<svg") :])
    text = _BOX.sub(r"<g><title>\1 \2</title>", text)
    text = _NAMED_GROUP.sub(
        "<g", _FONTS.sub("font-family: 'DejaVu Sans', Verdana, sans-serif", text)
    )
    text = _TAG.sub(lambda tag: tag[0].replace(TEXT, f"var(--on-paper, {TEXT})"), text)
    text = _TAG.sub(lambda tag: _ID.sub(rf"\1{prefix}", tag[0]), text)
    text = _with_classes(_INDENT.sub(" ", text))
    found = _WIDTH.search(text)
    assert found is not None, text[:200]
    width = math.ceil(float(found[1]))
    size = f"min-width: {width}pt; max-width: {LARGEST * width:g}pt"
    return text.replace(
        "<svg ", f'<svg role="img" aria-label="{html.escape(title)}" style="{size}" ', 1
    )


def _with_classes(svg: str) -> str:
    """Replace frequent styles by classes. A class is named by the hash of its style,
    so pictures of one page agree.
    """
    often = [style for style, times in Counter(_STYLE.findall(svg)).items() if times >= OFTEN]
    names = {style: f"s{sha256(style.encode()).hexdigest()[:8]}" for style in often}
    svg = _STYLE.sub(
        lambda found: f' class="{names[found[1]]}"' if found[1] in names else found[0], svg
    )
    rules = "".join(f".{name}{{{html.unescape(style)}}}" for style, name in names.items())
    head, end, rest = svg.partition(">")
    return f"{head}{end}<style>{rules}</style>{rest}" if rules else svg
