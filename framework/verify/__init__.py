"""Proof that a layout gives the numbers of one process: the reference, the layouts, the comparison."""

from framework.verify.compare import Report, Row, compare
from framework.verify.layouts import Layout, default_layouts, layout_config, parse_layout, shrink
from framework.verify.reference import run_reference
from framework.verify.run import run_layout, verify
from framework.verify.traits import Traits, traits_of

__all__ = [
    "Layout",
    "Report",
    "Row",
    "Traits",
    "compare",
    "default_layouts",
    "layout_config",
    "parse_layout",
    "run_layout",
    "run_reference",
    "shrink",
    "traits_of",
    "verify",
]
