"""A page out of a template, and pictures of matplotlib's as a part of it."""

from __future__ import annotations

import html
import io
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jinja2

from framework.schedule.picture.figure import STYLE

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SHARED = Path(__file__).parent / "templates"
"""``page.html.j2``: the frame that each page extends."""
_TAG = re.compile(r"<[^>]*>")
_LONG = re.compile(r"(\d+\.\d\d)\d+")
_INDENT = re.compile(r"\s*\n\s*")


def render(template: Path, **values: Any) -> str:
    """The text of the file. Values are escaped, unless they are marked as HTML."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader([template.parent, SHARED]),
        undefined=jinja2.StrictUndefined,
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template(template.name).render(**values)


def svg_of(drawn: Figure, title: str) -> str:
    """As text that stands in a page; ``title`` is for those who do not see it. Places to a hundredth of a point."""
    import matplotlib

    target = io.StringIO()
    with matplotlib.rc_context(STYLE):
        drawn.savefig(target, format="svg", metadata={"Date": None})
    text = target.getvalue()
    text = _TAG.sub(lambda tag: _LONG.sub(r"\1", tag[0]), text[text.index("<svg") :])
    return _INDENT.sub(" ", text).replace("<svg ", f'<svg role="img" aria-label="{html.escape(title)}" ', 1)
