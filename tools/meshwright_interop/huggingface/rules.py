"""Rules that build a meshwright tensor from transformers tensors, and back: same values,
other order, bit for bit.

In names and comments, "ours" is the tensor of the meshwright model and "theirs" are the tensors of
transformers. Ours is fused: its rows form units, and a shard of consecutive units is itself a valid
layer (see ``meshwright_models/__init__.py``). A rule holds the number of units, and the rows that
each of theirs contributes to a unit::

    ours   | q0 q1 | k0 | v0 | q2 q3 | k1 | v1 |       units = 2, rows = (2 d, d, d)
    theirs | q0 q1 q2 q3 |   | k0 k1 |   | v0 v1 |     one tensor each, or ``stacked``: concatenated in one tensor
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from meshwright.parameters import ParameterInfo, Slice

Shape = tuple[int, ...]


class ExportRule(Protocol):
    """Rule by which a tensor of a checkpoint, or an expert of it, is written to files."""

    @property
    def ours(self) -> str:
        """Name in meshwright."""

    @property
    def keeps_dtype(self) -> bool:
        """True if it is written in the saved element type, whatever is asked for."""

    def info(self, ours: Shape) -> ParameterInfo:
        """Return the metadata of the part of ours that this rule covers."""

    def shapes(self, ours: Shape) -> dict[str, Shape]:
        """Return the name and shape of each tensor that is written."""

    def split(self, ours: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Yield the name and the contiguous values of each, in the order of ``shapes``."""


class TensorMapping(NamedTuple):
    """Mapping between one meshwright tensor (``ours``)
    and the transformers tensors in it (``theirs``).
    """

    ours: str
    theirs: tuple[str, ...]
    """Transformers names, in their order within a unit."""
    units: int = 1
    rows: tuple[int, ...] = ()
    """Number of rows of each part in one unit; (): a single part with all rows."""
    stacked: bool = False
    """True if theirs is one tensor with the parts concatenated along the rows."""
    transposed: bool = False
    """True if theirs is stored as (inputs, outputs), as in GPT-2's Conv1D."""
    same_as: tuple[str, ...] = ()
    """Further transformers names under which files may repeat this tensor (tied weights);
    never written.
    """
    factors: tuple[float, ...] = ()
    """Factors on the leading parts of ours at export (muP);
    parts without a factor are unchanged.
    """
    place: int | None = None
    """Position along dim 0 of ours, a batch of matrices of which each has a rule: an expert. None:
    all of ours.
    """
    pairs: tuple[int, int] | None = None
    """(n, r): of n rows each the last r are pairs of neighbours in theirs, and two halves in ours:
    rotated features.
    """
    keeps_dtype: bool = False
    """True if an export writes it in the saved element type, whatever is asked for."""

    def info(self, ours: Shape) -> ParameterInfo:
        """Return the metadata of the part of ours that this rule covers: all of it,
        or one expert.
        """
        part = None if self.place is None else Slice(0, self.place, self.place + 1, 1)
        return ParameterInfo(self.ours, ours, part)

    def shapes(self, ours: Shape) -> dict[str, Shape]:
        """Return the name and shape of each transformers tensor, given the global shape of ours."""
        ours = ours if self.place is None else ours[1:]
        rest = ours[1:]
        order = -1 if self.transposed else 1
        if self.stacked or not self.rows:
            return {self.theirs[0]: ours[::order]}
        return {
            name: (self.units * rows, *rest)[::order]
            for name, rows in zip(self.theirs, self.rows, strict=True)
        }

    def join(self, read: Callable[[str], Tensor], ours: Shape, dtype: torch.dtype) -> Tensor:
        """Build the meshwright tensor of shape ``ours`` in ``dtype``,
        calling ``read`` for one of theirs at a time.

        Of a batch, build the matrix at ``place``.
        """
        whole = torch.empty(ours if self.place is None else ours[1:], dtype=dtype)
        targets = self._parts(whole)
        if self.stacked:
            for target, section in zip(
                targets, self._sections(self._transpose(read(self.theirs[0]))), strict=True
            ):
                target.copy_(torch.unflatten(section, 0, target.shape[:2]))
            return whole
        for target, name in zip(targets, self.theirs, strict=True):
            part = self._halves(self._transpose(read(name)), 1)
            target.copy_(torch.unflatten(part, 0, target.shape[:2]) if self.rows else part)
        return whole

    def split(self, ours: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Yield the name and the contiguous values of each transformers tensor, one at a time.

        ``ours``: the whole tensor, or its part of :meth:`info`.
        """
        ours = ours if self.place is None else ours.squeeze(0)
        if any(factor != 1 for factor in self.factors):
            ours = ours.clone()
            for part, factor in zip(self._parts(ours), self.factors, strict=False):
                part.mul_(factor)
        if not self.rows:
            yield self.theirs[0], self._transpose(self._halves(ours, -1)).contiguous()
            return
        rest = tuple(ours.shape[1:])
        parts = self._parts(ours)
        if self.stacked:
            stacked = torch.empty_like(ours)
            for section, part in zip(self._sections(stacked), parts, strict=True):
                section.view(part.shape).copy_(part)
            yield self.theirs[0], self._transpose(stacked).contiguous()
            return
        for name, part in zip(self.theirs, parts, strict=True):
            yield name, self._transpose(part.reshape(-1, *rest)).contiguous()

    def _parts(self, ours: Tensor) -> Sequence[Tensor]:
        """Split ours into views (units, rows of the part, ...), one per part; without ``rows``,
        return it whole.
        """
        if not self.rows:
            return (ours,)
        units = ours.view(self.units, sum(self.rows), *ours.shape[1:])
        return torch.split(units, list(self.rows), dim=1)

    def _sections(self, theirs: Tensor) -> Sequence[Tensor]:
        """Split a stacked transformers tensor into views, one per part."""
        return torch.split(theirs, [self.units * rows for rows in self.rows])

    def _halves(self, tensor: Tensor, direction: int) -> Tensor:
        """Reorder the rotated rows: from theirs to ours (``direction`` 1),
        or from ours to theirs (-1).
        """
        if self.pairs is None:
            return tensor
        each, rotated = self.pairs
        places = torch.arange(each)
        turned = places[each - rotated :]
        order = torch.cat((places[: each - rotated], turned[0::2], turned[1::2]))
        units = tensor.reshape(-1, each, *tensor.shape[1:])
        return units[:, order if direction == 1 else order.argsort()].flatten(0, 1)

    def _transpose(self, theirs: Tensor) -> Tensor:
        return theirs.t() if self.transposed and theirs.dim() == 2 else theirs


def unchanged(ours: str, theirs: str) -> TensorMapping:
    """Return the mapping of a tensor that differs in its name alone."""
    return TensorMapping(ours, (theirs,))


class TensorPattern(NamedTuple):
    """Row of a table of tensors: a rule for each layer, kind and expert that its names stand for."""

    ours: str
    """Name in meshwright: ``*`` is the number of a layer, ``%`` is ``weight`` and ``bias``."""
    theirs: str
    """Name in transformers: ``{q,k}`` are tensors that ours fuses, ``#`` is the number of an
    expert, whose matrix is one of ours.
    """
    layout: str = ""
    """Change on the way, a key of the layouts; "": none."""
    needs: str = ""
    """Options of the model that must be set, or with ``!`` must not."""
    copies: str = ""
    """Second names in transformers, where they have no row of their own: tied weights."""

    def applies(self, options: Mapping[str, Any]) -> bool:
        """Return True if a model with these options has the tensor."""
        words = self.needs.split()
        return all(bool(options[word.removeprefix("!")]) != (word[0] == "!") for word in words)

    def of_layer(self, layer: int) -> TensorPattern:
        """Return the row of one layer."""
        ours, theirs = (name.replace("*", str(layer)) for name in (self.ours, self.theirs))
        return self._replace(ours=ours, theirs=theirs)

    def rules(self, layouts: Layouts, num_experts: int) -> Iterator[TensorMapping]:
        """Yield the rules of a row without layers."""
        fields = layouts[self.layout] if self.layout else {}
        same_as = tuple(self.copies.split())
        places = range(num_experts) if "#" in self.theirs else (None,)
        for kind in ("weight", "bias") if "%" in self.ours else ("",):
            ours = self.ours.replace("%", kind)
            for place in places:
                name = self.theirs.replace("%", kind).replace("#", str(place))
                before, _, rest = name.partition("{")
                parts, _, after = rest.partition("}")
                theirs = tuple(f"{before}{part}{after}" for part in parts.split(","))
                yield TensorMapping(ours, theirs, place=place, same_as=same_as, **fields)


Layouts = Mapping[str, Mapping[str, Any]]
"""Layout -> the fields of :class:`TensorMapping` that it sets, for a model of certain options."""


class TensorTable(NamedTuple):
    """All tensors of a model: rows before its layers, of its layers, and after them."""

    first: Sequence[TensorPattern]
    of_layers: Sequence[tuple[Sequence[TensorPattern], range]]
    """Rows, and the numbers of the layers that have them."""
    last: Sequence[TensorPattern]

    def rules(
        self, options: Mapping[str, Any], layouts: Layouts, num_experts: int = 0
    ) -> list[TensorMapping]:
        """Return the rules of a model with these options, in the order of its layers."""
        rows = list(self.first)
        for layer in range(max(layers.stop for _, layers in self.of_layers)):
            for part, layers in self.of_layers:
                rows += [row.of_layer(layer) for row in part] if layer in layers else []
        rows += self.last
        present = [row for row in rows if row.applies(options)]
        rules = [rule for row in present for rule in row.rules(layouts, num_experts)]
        own = {name for rule in rules for name in rule.theirs}
        return [
            rule._replace(same_as=tuple(name for name in rule.same_as if name not in own))
            for rule in rules
        ]
