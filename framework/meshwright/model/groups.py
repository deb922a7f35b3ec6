"""Parameter groups: learning rate factor and weight decay of some parameters by name pattern,
or frozen parameters.

    model.parameter_groups = [
        {names = ["embedding.*"], learning_rate_factor = 0.1, weight_decay = 0.0},
        {names = ["block0.*"], frozen = true},
    ]

The first group with a matching pattern applies. A tied weight has the group of its canonical name.
A model may have such a list as an attribute too: its factors and those of the configuration
multiply.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

from pydantic import ValidationError
from torch import nn

from meshwright.adapters.attach import is_adapter
from meshwright.config import Optimizer, ParameterGroup
from meshwright.config.functions import error_place, find_function
from meshwright.config.optimizers import DEFAULT
from meshwright.errors import ModelError, reason_of
from meshwright.placement.patterns import check_patterns, fits, matching

_KEY, _ATTRIBUTE = "model.parameter_groups", "the model's attribute parameter_groups"


def assign_groups(
    shapes: Mapping[str, tuple[int, ...]],
    groups: Sequence[ParameterGroup] | str,
    key: str = _KEY,
    aliases: Mapping[str, str] = MappingProxyType({}),
) -> dict[str, ParameterGroup]:
    """Return canonical parameter name -> its group, for the parameters that have one.

    Args:
        shapes: global shapes by canonical name.
        key: source of the groups, for messages.
        aliases: other names of tied weights, with their canonical names.

    Raises:
        ModelError: a pattern matches no parameter; or the user's function fails or returns
            something else.
    """
    if isinstance(groups, str):
        found = {name: _ask(groups, name, shape) for name, shape in shapes.items()}
        return {name: group for name, group in found.items() if group is not None}
    patterns = [pattern for group in groups for pattern in group.names]
    for pattern in patterns:
        others = matching([pattern], aliases)
        if others and not matching([pattern], shapes):
            first = aliases[others[0]]
            raise ModelError(
                "MW-MODEL-055",
                f"{key}: {pattern!r} matches {others[0]} alone, which is tied to {first}: one"
                f" weight has one group, by its first name. Write {first!r}",
            )
    check_patterns(key, patterns, list(shapes), "parameter")
    chosen = {
        name: next((group for group in groups if fits(name, *group.names)), None) for name in shapes
    }
    return {name: group for name, group in chosen.items() if group is not None}


def find_groups(
    layers: nn.Sequential,
    canonical: Callable[[str], str],
    configured: Sequence[ParameterGroup] | str,
    optimizer: Optimizer,
) -> dict[str, ParameterGroup]:
    """Return canonical parameter name -> its group,
    merged from the configuration and the model's attribute.

    Factors multiply. Other settings are the configuration's, or the model's if the configuration
    leaves them out. The model's are of its own parameters, not of adapters that have been attached.
    ``configured``: ``model.parameter_groups``.
    """
    named = dict(layers.named_parameters(remove_duplicate=False))
    shapes = {name: tuple(p.shape) for name, p in named.items() if canonical(name) == name}
    aliases = {name: canonical(name) for name in named if canonical(name) != name}
    declared = getattr(layers, "parameter_groups", None) or []
    try:
        of_model = {name: shape for name, shape in shapes.items() if not is_adapter(name)}
        own = assign_groups(
            of_model,
            [ParameterGroup.model_validate(group) for group in declared],
            _ATTRIBUTE,
            aliases,
        )
    except (TypeError, ValidationError) as error:
        why = error.errors()[0]["msg"] if isinstance(error, ValidationError) else error
        raise ModelError(
            "MW-MODEL-035", f"{_ATTRIBUTE} = {declared!r} is no list of groups: {why}"
        ) from error
    chosen = assign_groups(shapes, configured, aliases=aliases)
    found = own | chosen
    for name in own.keys() & chosen.keys():
        one, other = own[name].model_dump(), chosen[name].model_dump(exclude_unset=True)
        factors = {
            key: one[key] * getattr(chosen[name], key)
            for key in ("learning_rate_factor", "eps_factor")
        }
        found[name] = ParameterGroup(**(one | other | factors))
    scaled = [name for name, group in found.items() if group.eps_factor != 1]
    if scaled and optimizer.builder is None and not optimizer.spec.scales_eps:
        what = f"{scaled[0]} has an eps_factor (muP sets them, and learning rates for AdamW)"
        raise ModelError(
            "MW-MODEL-036",
            f'{what}, but optimizer.name = "{optimizer.name}": choose "{DEFAULT}", or leave it out',
        )
    return found


def freeze(
    layers: nn.Sequential, canonical: Callable[[str], str], groups: Mapping[str, ParameterGroup]
) -> None:
    """Set ``requires_grad`` to False for the parameters of frozen groups. ``groups``:
    by canonical name.
    """
    for name, parameter in layers.named_parameters(remove_duplicate=False):
        group = groups.get(canonical(name))
        if group is not None and group.frozen:
            parameter.requires_grad_(False)


def _ask(path: str, name: str, shape: tuple[int, ...]) -> ParameterGroup | None:
    """Call the user's function for one parameter."""
    wanted = (
        "a function of (name, shape) that returns a mapping such as {'learning_rate_factor': 0.1},"
        " or None"
    )
    function = find_function(path, _KEY, wanted, ModelError)
    try:
        found = function(name, shape)
        return None if found is None else ParameterGroup.model_validate({"names": [name], **found})
    except ValidationError as error:
        first = error.errors()[0]
        text = f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
        raise ModelError(
            "MW-MODEL-028", f"{_KEY} = {path!r} returned {found!r} for {name}: {text}"
        ) from error
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        text = f"failed for {name}{error_place(error)}: {reason_of(error)}"
        raise ModelError("MW-MODEL-031", f"{_KEY} = {path!r} {text}") from error
