"""Schemes of ``model.builder``: ``SCHEME:PLACE`` instead of a function, such as ``hf:DIRECTORY``.
No torch.

A package adds one by an entry point of the group ``meshwright.schemes``: the scheme's name, and a
module with

    builder(place)                   the function that builds the model
    vocabulary(place)                its vocabulary size, or None
    weights(place, model)            run.weight_source.WeightSource for run.start, with the names of this model
"""

from __future__ import annotations

import functools
from importlib.metadata import EntryPoint
from typing import NamedTuple

from meshwright.system.packages import entries_of, is_own_package

GROUP = "meshwright.schemes"
OWN_SCHEMES = ("hf",)
"""Schemes that meshwright's packages register. They are schemes where these are not installed, too:
else a file ``hf.py`` in the working directory would be imported.
"""


class Scheme(NamedTuple):
    """Builder ``SCHEME:PLACE`` of a configuration."""

    place: str
    module: str
    """Module with the scheme's functions ``builder`` and ``vocabulary``.
    It is not imported here.
    """


@functools.cache
def _entries() -> dict[str, EntryPoint]:
    return entries_of(GROUP)


def scheme_of(builder: str) -> Scheme | None:
    """Return the scheme of a builder; None for a function ``package.module:function``."""
    name, _, place = builder.partition(":")
    if "." in name or name not in _entries():
        return None
    return Scheme(place, _entries()[name].value)


def is_own_scheme(builder: str) -> bool:
    """Return whether a builder's scheme is one of meshwright's packages.

    Such a scheme runs no code of its place, and its place holds the weights.
    """
    scheme = scheme_of(builder)
    return scheme is not None and is_own_package(scheme.module)


def is_scheme(builder: str) -> bool:
    """Return whether a builder has the form of a scheme."""
    return builder.partition(":")[0] in OWN_SCHEMES or scheme_of(builder) is not None
