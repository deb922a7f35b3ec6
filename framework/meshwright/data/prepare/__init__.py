"""Commands of `meshwright data`: preparation of text as a Megatron ``.bin/.idx`` pair,
and a view of its samples.

Preparation is parallel and resumable, and publishes a complete corpus or none.
"""

from meshwright.data.prepare.finish import Outcome
from meshwright.data.prepare.length_report import ContextReport
from meshwright.data.prepare.preparation import Options, Progress, prepare
from meshwright.data.prepare.records import Form, RecordKeys
from meshwright.data.prepare.sample_text import show, splits_of
from meshwright.data.prepare.stdlib import prepare_files, prepare_stdlib
from meshwright.data.splits import SplitRule

__all__ = [
    "ContextReport",
    "Form",
    "Options",
    "Outcome",
    "Progress",
    "RecordKeys",
    "SplitRule",
    "prepare",
    "prepare_files",
    "prepare_stdlib",
    "show",
    "splits_of",
]
