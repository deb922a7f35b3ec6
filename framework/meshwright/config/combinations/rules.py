"""Rules of the configuration that follow from the axes, the table of pairs and the divisions."""

from __future__ import annotations

from functools import partial

from meshwright.config.combinations.axes import AXES, find_option_problem
from meshwright.config.combinations.features import LAYOUT
from meshwright.config.combinations.layout import layout_of
from meshwright.config.combinations.refused import REFUSED, RefusedPair
from meshwright.config.combinations.sizes import EXPERT_GROUPS, TOKENS, LayoutSizes
from meshwright.config.rules import Rule
from meshwright.config.schema import RunConfig


def _expert_groups(config: RunConfig) -> str | None:
    return EXPERT_GROUPS.find_problem(layout_of(config), LayoutSizes())


def _tokens(config: RunConfig) -> str | None:
    if config.data.builder is not None:  # the samples of a builder are measured when it is run
        return None
    sizes = LayoutSizes(sequence_length=config.data.sequence_length)
    return TOKENS.find_problem(layout_of(config), sizes)


_OPTION_RULES = tuple(
    Rule(
        option.code,
        partial(find_option_problem, axis=axis, option=option),
        (f"parallel.{axis.name}", f"parallel.{option.key}"),
    )
    for axis in AXES
    for option in axis.options
)
_SIZE_RULES = (
    Rule(EXPERT_GROUPS.code, _expert_groups, ("parallel.ep", "parallel.tp")),
    Rule(TOKENS.code, _tokens, ("parallel.cp", "data.sequence_length", "data.builder")),
)


def _rule_of(row: RefusedPair) -> Rule:
    return Rule(row.code, row.find_problem, row.keys)


COMBINATION_RULES = (*_OPTION_RULES, *map(_rule_of, REFUSED), *_SIZE_RULES)
LAYOUT_COMBINATIONS = (
    *_OPTION_RULES,
    *(_rule_of(row) for row in REFUSED if {row.first, row.second} & LAYOUT.keys()),
    *_SIZE_RULES,
)
"""Rules in which a layout takes part: the others are of the configuration that it was made from."""
