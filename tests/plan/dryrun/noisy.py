"""A builder that prints, with and without the end of a line."""

from __future__ import annotations

from typing import Any

from torch import nn

from meshwright_models import llama


def build(**options: Any) -> nn.Sequential:
    """A Llama, with what looks like a result on stdout."""
    print('{"layers": 2}\n{not json}\nbuilding ... ', end="")
    return llama.build(**options)
