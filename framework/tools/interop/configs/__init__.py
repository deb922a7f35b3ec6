"""Import of other frameworks' configurations, with a report on each key that was not carried over. Pure: no torch."""

from meshwright.tools.interop.configs.account import file_text, format_report
from meshwright.tools.interop.configs.convert import ImportedConfig, convert_file
from meshwright.tools.interop.configs.source_keys import DroppedKey, DropReason
from meshwright.tools.interop.configs.translation import Translation

__all__ = [
    "DropReason",
    "DroppedKey",
    "ImportedConfig",
    "Translation",
    "convert_file",
    "file_text",
    "format_report",
]
