"""Bounded reader of YAML from anywhere: limits on bytes, depth, digits, and nodes with aliases put
in.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import yaml

from meshwright.system.bounded import MAX_DEPTH, MAX_DIGITS, MIB, check_values, in_our_words

MAX_YAML_BYTES = MIB // 4
MAX_YAML_NODES = 100_000
"""Maximum number of YAML nodes; an aliased node counts at each use."""


def parse_yaml(text: str) -> tuple[Any, Any]:
    """Parse YAML with PyYAML's pure SafeLoader -> (document, its root node;
    None and None where there is none).

    libyaml's C parser overflows the stack on deep nesting, so it is never used. Tags construct
    plain values only.

    Raises:
        ValueError: too long, nested too deeply, expanded to too many nodes by aliases, or an
            integer of many digits.
        yaml.YAMLError: not YAML.
    """
    if len(text) > MAX_YAML_BYTES:
        raise ValueError(
            f"{len(text):,} characters, and at most {MAX_YAML_BYTES:,} are read of YAML"
        )
    _check_events(yaml.parse(text, Loader=yaml.SafeLoader))
    loader = yaml.SafeLoader(text)
    try:
        root = loader.get_single_node()
        document = None if root is None else loader.construct_document(root)
    except RecursionError:
        raise ValueError(f"nested more than {MAX_DEPTH} deep") from None
    except ValueError as error:
        raise ValueError(in_our_words(error, text)) from None
    check_values(document)
    return document, root


def _check_events(events: Iterator[Any]) -> None:
    """Check depth, aliases and integers on YAML's event stream, without recursion."""
    sizes: dict[str, int] = {}
    open_: list[tuple[str | None, int]] = []
    total = 0
    for event in events:
        line = event.start_mark.line + 1
        if isinstance(event, yaml.AliasEvent):
            if any(event.anchor == anchor for anchor, _ in open_):
                raise ValueError(f"an alias in it contains itself (at line {line})")
            total += sizes.get(event.anchor, 1)
        elif isinstance(event, yaml.CollectionStartEvent):
            open_.append((event.anchor, total))
            total += 1
        elif isinstance(event, yaml.CollectionEndEvent):
            anchor, before = open_.pop()
            if anchor is not None:
                sizes[anchor] = total - before
        elif isinstance(event, yaml.ScalarEvent):
            total += 1
            if event.style is None and re.fullmatch(rf"[-+\w:.]{{{MAX_DIGITS + 1},}}", event.value):
                raise ValueError(f"a number of more than {MAX_DIGITS:,} digits (at line {line})")
        if len(open_) > MAX_DEPTH:
            raise ValueError(f"nested more than {MAX_DEPTH} deep (at line {line})")
        if total > MAX_YAML_NODES:
            raise ValueError(
                f"more than {MAX_YAML_NODES:,} values with its aliases put in (at line {line})"
            )
