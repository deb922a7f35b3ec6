"""Rendering of the text templates below ``templates/``: job scripts, completion scripts,
a first configuration.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jinja2


def render_template(
    name: str, values: Mapping[str, Any], filters: Mapping[str, Callable[[Any], str]] | None = None
) -> str:
    """Render a template. The filter ``quote`` quotes a word for a POSIX shell;
    an unknown value is an error.
    """
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).with_name("templates")),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= {"quote": shlex.quote, **(filters or {})}
    return environment.get_template(name).render(values)
