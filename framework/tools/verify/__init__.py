"""Equivalence proof: parallel layouts train to the same numbers as one plain process."""

from meshwright.tools.verify.compare import compare
from meshwright.tools.verify.defaults import default_layouts, run_twice
from meshwright.tools.verify.layouts import Layout, layout_config, parse_layout
from meshwright.tools.verify.rank import open_verify_source, run_layout
from meshwright.tools.verify.reference import run_reference
from meshwright.tools.verify.report import Report, VerdictRow
from meshwright.tools.verify.run import Verification, verify
from meshwright.tools.verify.smaller import make_small, shrink, turn_dropout_on
from meshwright.tools.verify.traits import Traits, probe_coupling, traits_of

__all__ = [
    "Layout",
    "Report",
    "Traits",
    "VerdictRow",
    "Verification",
    "compare",
    "default_layouts",
    "layout_config",
    "make_small",
    "open_verify_source",
    "parse_layout",
    "probe_coupling",
    "run_layout",
    "run_reference",
    "run_twice",
    "shrink",
    "traits_of",
    "turn_dropout_on",
    "verify",
]
