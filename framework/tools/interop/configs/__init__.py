"""Import of other frameworks' configurations, with a report on each key that was not carried over. Pure: no torch."""

from meshwright.tools.interop.configs.account import account, file_text
from meshwright.tools.interop.configs.convert import Adopted, adopt, which
from meshwright.tools.interop.configs.translation import Draft, Left, Why

__all__ = ["Adopted", "Draft", "Left", "Why", "account", "adopt", "file_text", "which"]
