"""Recipe that a message prints for a model that is no nn.Sequential:
how to cut it at its lists of blocks.
"""

from __future__ import annotations

import keyword
import re
from collections.abc import Sequence
from typing import Any

from torch import nn

CUT = """; of this module (docs/models.md, "Cut a module"):

class Part(nn.Module):  # a piece of forward, with the modules and parameters that it uses
    def __init__(self, run, **used):
        super().__init__()
        self.run = run
        for name, value in used.items():
            setattr(self, name, value)

    def forward(self, x):
        return self.run(self, x)

def build(**options):
    m = {kind}(**options)
    first = Part(lambda self, x: ..., {before})  # forward before {blocks}
    last = Part(lambda self, x: ..., {after})  # forward after it
    return nn.Sequential(first, {starred}, last)"""
"""Recipe that cuts a module at its lists of blocks.
Each ``...`` is the code of its forward there.
"""


def cut_at_lists(model: Any) -> str:
    """Return CUT for a module that has lists of blocks, and "" for anything else."""
    # a list has no forward to cut
    if not isinstance(model, nn.Module) or isinstance(model, nn.ModuleList):
        return ""
    lists: list[str] = []
    # paths registered before the first list, and after it
    pieces: tuple[list[str], list[str]] = [], []
    for name, module in model.named_modules(remove_duplicate=False):
        if any(
            name == each or name.startswith(f"{each}.") for each in (*lists, *pieces[0], *pieces[1])
        ):
            continue
        if isinstance(module, nn.ModuleList) and len(module):
            lists.append(name)
        elif name and not any(isinstance(each, nn.ModuleList) for each in module.modules()):
            if not isinstance(module, nn.ModuleDict):
                pieces[bool(lists)].append(name)
        else:  # it holds a list further down: its own parameters are pieces
            own = [key for key, _ in module.named_parameters(recurse=False)]
            pieces[bool(lists)].extend(f"{name}.{key}".lstrip(".") for key in own)
    if not lists:
        return ""
    before, after = (_arguments(model, each) for each in pieces)
    blocks = [_expression(model, name) for name in lists]
    starred = ", ".join(f"*{each}" for each in blocks)
    shown = blocks[0].removeprefix("m.")
    return CUT.format(
        kind=type(model).__name__, before=before, after=after, blocks=shown, starred=starred
    )


def _arguments(model: nn.Module, names: Sequence[str]) -> str:
    """Return keyword arguments for modules and parameters of the model,
    under names that Part can have.
    """
    used = {"self", "run", "forward"}
    arguments: list[str] = []
    for name in names:
        key = re.sub(r"\W", "_", name)
        while not _is_attribute(key) or key in used:
            key = f"_{key}"
        used.add(key)
        arguments.append(f"{key}={_expression(model, name)}")
    return ", ".join(arguments)


def _expression(model: nn.Module, name: str) -> str:
    """Return the expression for a module or parameter of ``m``:
    "m.features[1].blocks" for features.1.blocks.
    """
    expression, owner = "m", model
    for part in name.split("."):
        if _is_attribute(part):
            expression += f".{part}"
        elif isinstance(owner, nn.Sequential | nn.ModuleList) and part in owner._modules:
            expression += f"[{list(owner._modules).index(part)}]"
        else:
            expression = f"getattr({expression}, {part!r})"
        owner = getattr(owner, part)
    return expression


def _is_attribute(name: str) -> bool:
    return name.isidentifier() and not keyword.iskeyword(name)
