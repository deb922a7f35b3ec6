"""The commands of `meshwright data`: prepare text files as a Megatron ``.bin/.idx`` pair, and show what was prepared.

Preparation is parallel, resumable, and publishes a corpus as a whole or not at all.
"""

from meshwright.data.prepare.preparation import Options, Progress, prepare
from meshwright.data.prepare.records import Form
from meshwright.data.prepare.sample_text import show, splits_of
from meshwright.data.prepare.stdlib import prepare_files, prepare_stdlib

__all__ = ["Form", "Options", "Progress", "prepare", "prepare_files", "prepare_stdlib", "show", "splits_of"]
