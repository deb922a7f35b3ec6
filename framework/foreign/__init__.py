"""Configurations of other frameworks -> ours: what each key becomes, and what could not come along. Pure: no torch."""

from meshwright.foreign.account import account, file_text
from meshwright.foreign.adopt import Adopted, adopt, which
from meshwright.foreign.draft import Draft, Left, Why

__all__ = ["Adopted", "Draft", "Left", "Why", "account", "adopt", "file_text", "which"]
