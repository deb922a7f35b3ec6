"""Equivalence proof: parallel layouts train to the same numbers as one plain process."""

from meshwright.config.combinations.features import Traits
from meshwright.config.combinations.layout import Layout, parse_layout
from meshwright.traits import traits_of
from meshwright.verify.compare import compare
from meshwright.verify.defaults import default_layouts, run_twice
from meshwright.verify.layouts import layout_config, own_samples
from meshwright.verify.magnify import amplify, clip_first, compress, split_buckets
from meshwright.verify.probe import probe_coupling
from meshwright.verify.rank import open_verify_source, run_layout
from meshwright.verify.reference import run_reference
from meshwright.verify.report import Report, VerdictRow, join_reports
from meshwright.verify.run import Verification, verify
from meshwright.verify.smaller import make_small, shrink, turn_dropout_on
from meshwright.verify.trials import Trial, further_trials

__all__ = [
    "Layout",
    "Report",
    "Traits",
    "Trial",
    "VerdictRow",
    "Verification",
    "amplify",
    "clip_first",
    "compare",
    "compress",
    "default_layouts",
    "further_trials",
    "join_reports",
    "layout_config",
    "make_small",
    "open_verify_source",
    "own_samples",
    "parse_layout",
    "probe_coupling",
    "run_layout",
    "run_reference",
    "run_twice",
    "shrink",
    "split_buckets",
    "traits_of",
    "turn_dropout_on",
    "verify",
]
