"""Real weights of one stage from the model on meta. A rank never stores another rank's weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from meshwright.model.build import PlainModel
from meshwright.parameters import ParameterInfo


def materialise(
    layers: nn.Sequential,
    model: PlainModel,
    infos: Mapping[str, ParameterInfo],
    dtype: torch.dtype,
    device: torch.device,
    local_of: Callable[[ParameterInfo], Tensor] | None = None,
) -> nn.Sequential:
    """Materialise the weights of one stage: this tp rank's slices, in the training dtype, on the device.

    Parameters tied inside the stage stay one object.

    Args:
        layers: The stage, with parameters on the meta device in this tp rank's local shapes; changed in place.
        model: The whole model, with ties and initial values.
        infos: Canonical parameter name -> its global shape and this rank's slice.
        dtype: Dtype of the weights.
        device: Device of the weights and buffers.
        local_of: Returns this rank's slice of a parameter. None: the initial weights. Each full tensor is then drawn in
            float32 on CPU by the parameter's name, one at a time, sliced and cast: the same bits in every layout.
    """

    def drawn(info: ParameterInfo) -> Tensor:
        return info.take(model.initial(info.name))

    local_of = local_of or drawn
    made: dict[str, nn.Parameter] = {}
    for name, outline in list(layers.named_parameters(remove_duplicate=False)):
        canonical = model.canonical(name)
        if canonical not in made:
            local = local_of(infos[canonical])
            assert local.shape == outline.shape, (name, tuple(local.shape), tuple(outline.shape))
            made[canonical] = nn.Parameter(local.to(device=device, dtype=dtype), requires_grad=outline.requires_grad)
        owner_name, _, attribute = name.rpartition(".")
        layers.get_submodule(owner_name)._parameters[attribute] = made[canonical]
    is_here = all(buffer.device == device for buffer in layers.buffers())
    return layers if is_here else layers.to(device)
