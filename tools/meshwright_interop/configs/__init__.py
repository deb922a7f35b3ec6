"""Import of other frameworks' configurations, with a report on each key that was not carried over.
Pure: no torch.
"""

from meshwright_interop.configs.account import file_text, format_report
from meshwright_interop.configs.convert import ImportedConfig, convert_file
from meshwright_interop.configs.source_keys import DroppedKey, DropReason
from meshwright_interop.configs.translation import Translation

__all__ = [
    "DropReason",
    "DroppedKey",
    "ImportedConfig",
    "Translation",
    "convert_file",
    "file_text",
    "format_report",
]
