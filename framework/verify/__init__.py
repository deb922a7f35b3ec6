"""Proof that a layout gives the numbers of one process: the plain run, the layouts, the comparison."""

from framework.verify.compare import compare
from framework.verify.defaults import default_layouts, run_twice
from framework.verify.layouts import Layout, layout_config, parse_layout
from framework.verify.rank import open_feed
from framework.verify.reference import run_reference
from framework.verify.report import Report, Row
from framework.verify.run import run_layout, verify
from framework.verify.smaller import make_small, shrink, turn_dropout_on
from framework.verify.traits import Traits, probed, traits_of

__all__ = [
    "Layout",
    "Report",
    "Row",
    "Traits",
    "compare",
    "default_layouts",
    "layout_config",
    "make_small",
    "open_feed",
    "parse_layout",
    "probed",
    "run_layout",
    "run_reference",
    "run_twice",
    "shrink",
    "traits_of",
    "turn_dropout_on",
    "verify",
]
