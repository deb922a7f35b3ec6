"""Sizes of a layout that must divide each other, or a size of the batch, the samples or the model."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import NamedTuple

from meshwright.config.batch import divisors
from meshwright.config.combinations.features import Traits
from meshwright.config.combinations.layout import Layout


class LayoutSizes(NamedTuple):
    """Sizes that a layout has to fit; 0: not known."""

    global_batch: int = 0
    sequence_length: int = 0
    num_layers: int = 0
    experts: tuple[int, ...] = ()

    @classmethod
    def of(cls, traits: Traits, global_batch: int, sequence_length: int) -> LayoutSizes:
        """Return the sizes of a model on samples of a batch."""
        return cls(global_batch, sequence_length, traits.num_layers, traits.experts)


class Dividend(NamedTuple):
    """A number that another must divide, and its name in messages."""

    name: str
    value: int


class Division(NamedTuple):
    """A number that must divide others."""

    code: str
    advice: str
    """Next move; ``{choices}`` stands for the divisors, ``{nearest}`` for the multiples of
    the divisor below and above.
    """
    divisor: str
    """The number that divides, as messages name it."""
    find: Callable[[Layout, LayoutSizes], tuple[int, Iterable[Dividend]]]

    def find_problem(self, layout: Layout, sizes: LayoutSizes) -> str | None:
        """Return the message for the first number that is not divided, or None."""
        divisor, dividends = self.find(layout, sizes)
        for name, value in dividends:
            if value % divisor:
                choices = ""
                if "{choices}" in self.advice:
                    choices = ", ".join(map(str, divisors(value)))
                below = value // divisor * divisor
                nearest = [str(each) for each in (below, below + divisor) if each]
                advice = self.advice.format(choices=choices, nearest=" or ".join(nearest))
                return f"{self.divisor} = {divisor} does not divide {name} = {value}: {advice}"
        return None


def _ranks(**degrees: int) -> Dividend:
    """Return a product of degrees, named as "dp 4 x tp 2"; a cp of 1 is not named."""
    named = [f"{axis} {n}" for axis, n in degrees.items() if axis != "cp" or n > 1]
    return Dividend(" x ".join(named), math.prod(degrees.values()))


def _replicas(layout: Layout, sizes: LayoutSizes) -> tuple[int, list[Dividend]]:
    return layout.shard or 1, [_ranks(dp=layout.dp, cp=layout.cp)]


def _ranks_of_stage(layout: Layout, sizes: LayoutSizes) -> tuple[int, list[Dividend]]:
    return layout.ep, [_ranks(dp=layout.dp, cp=layout.cp, tp=layout.tp)]


def _ranks_of_experts(layout: Layout, sizes: LayoutSizes) -> tuple[int, list[Dividend]]:
    return layout.tp, [Dividend("parallel.ep", layout.ep)] if layout.ep > 1 else []


def _experts(layout: Layout, sizes: LayoutSizes) -> tuple[int, list[Dividend]]:
    return layout.ep, [Dividend("the number of experts", count) for count in sizes.experts]


def _tokens(layout: Layout, sizes: LayoutSizes) -> tuple[int, list[Dividend]]:
    return layout.cp, [Dividend("data.sequence_length", sizes.sequence_length)]


def _samples(layout: Layout, sizes: LayoutSizes) -> tuple[int, list[Dividend]]:
    divisor = layout.micro_batch_size * layout.dp
    return divisor, [Dividend("global_batch", sizes.global_batch)]


SHARDS = Division("MW-CONFIG-005", "choose one of {choices}", "parallel.shard_factor", _replicas)
EXPERT_RANKS = Division(
    "MW-CONFIG-077",
    "the ranks of a stage share its experts; choose one of {choices}",
    "parallel.ep",
    _ranks_of_stage,
)
EXPERT_GROUPS = Division(
    "MW-CONFIG-076",
    "whole tensor-parallel groups share the experts; set parallel.ep to 1 or to a multiple of"
    " parallel.tp",
    "parallel.tp",
    _ranks_of_experts,
)
TOKENS = Division(
    "MW-CONFIG-069",
    "each context-parallel rank has as many tokens; use {nearest}, or another parallel.cp",
    "parallel.cp",
    _tokens,
)
SAMPLES = Division(
    "MW-CONFIG-100",
    "each replica has as many micro-batches; choose other degrees, or set global_batch to {nearest}",
    "micro_batch_size x dp",
    _samples,
)
EXPERTS = Division(
    code="MW-EP-002",  # the blueprint names the module
    advice="choose one of {choices}",
    divisor="parallel.ep",
    find=_experts,
)


def fits(layout: Layout, sizes: LayoutSizes) -> bool:
    """Return True if the layout has a layer for each stage, and all divisions leave no rest, also
    of tokens that sequence parallelism divides again.

    One expression, for searches over many layouts.
    """
    tokens = layout.cp * layout.tp if layout.sequence else layout.cp
    ranks = layout.dp * layout.cp * layout.tp
    return (
        (not sizes.num_layers or layout.num_stages <= sizes.num_layers)
        and sizes.global_batch % (layout.dp * layout.micro_batch_size) == 0
        and (tokens == 1 or sizes.sequence_length % tokens == 0)
        and (layout.dp * layout.cp) % (layout.shard or 1) == 0
        and ranks % layout.ep == 0
        and (layout.ep == 1 or layout.ep % layout.tp == 0)
        and all(count % layout.ep == 0 for count in sizes.experts)
    )
