"""Memory of one stage for one micro-batch, combined from the profiles of its layers."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

from meshwright_plan.planner.layer_profile import LayerProfile


class BackwardPoint(NamedTuple):
    """One layer's turn in the backward of a stage."""

    bytes: int
    """Peak bytes, above those live at the start of the stage's backward."""
    elements: int
    """Number of the layer's parameters, without experts that ranks share."""
    elements_before: int
    """Number of parameters whose gradients exist before this layer's backward:
    those of the later layers.
    """
    experts: int = 0
    """Number of parameters of the layer's experts that ranks share."""
    experts_before: int = 0
    """Number of shared experts' parameters whose gradients exist before this layer's backward."""
    frozen: int = 0
    """Number of the layer's weights that are not trained, without experts that ranks share."""
    after: int = 0
    """Bytes once the layer's backward is done,
    above those live at the start of the stage's backward.
    """
    largest: int = 0
    """Elements of the layer's largest parameter, whose gradient may complete a bucket."""

    @property
    def gathered(self) -> int:
        """Number of the layer's weights that ZeRO-3 gathers."""
        return self.elements + self.frozen


class Footprint(NamedTuple):
    """Memory of one stage for one micro-batch, in bytes."""

    inputs: int
    """Tensors from the previous stage, held from their receive to their backward."""
    kept: int
    """Tensors kept between forward and backward, including values between layers,
    excluding ``inputs``.
    """
    forward_peak: int
    """Peak in forward, above the bytes live before it."""
    backward: tuple[BackwardPoint, ...]
    """Points of a whole backward, or of the input-gradient half: last layer to first,
    then the end of the backward.
    """
    deferred: int
    """Bytes kept between the halves of a split backward."""
    weight_half: tuple[BackwardPoint, ...]
    """Points of the weight-gradient half of a split backward."""
    outputs: int
    """Outputs sent to the next stage and held for backward."""
    input_gradients: int
    output_gradients: int
    """Gradients received from the next stage."""
    offloaded: int = 0
    """Bytes in host memory between forward and backward, not part of ``kept``."""
    last_group: int = 0
    """Part of ``offloaded`` that stays on the device until another computation has begun."""
    forward_layer: int = 0
    """Index of the layer at the peak in forward."""
    units: tuple[tuple[int, bool], ...] = ()
    """Units of ZeRO-3: number of layers, and whether its weights stay gathered. Empty: of a layer each."""
    forward_experts: int = 0
    """Number of parameters of the experts that ranks share of the layer at the peak in forward."""
    sent_only: int = 0
    """Part of ``kept`` that no layer needs in backward:
    outputs that are held because they are sent.
    """


class SharedWeight(NamedTuple):
    """Weight that several layers of one stage use, such as a tied embedding.

    Its gradient is accumulated once: the last user's contribution is kept until the backward of the
    first user.
    """

    first: int
    """Index in the stage of the first layer that uses it."""
    last: int
    bytes: int
    """Bytes of its gradient, in the compute dtype."""

    def waits_in(self, index: int) -> int:
        """Return the bytes of the gradient if it exists, unfinished,
        while the backward of layer ``index`` runs.
        """
        return self.bytes if self.first <= index < self.last else 0


def stage_footprints(
    layers: Sequence[LayerProfile],
    stages: Sequence[range],
    shared: Callable[[range], Sequence[SharedWeight]],
    away: Collection[int],
) -> list[Footprint]:
    """Return the footprint of each stage.

    Args:
        shared: function from a stage's layers to the weights that several of them use.
        away: indices in the model of the layers with activation offload.
    """
    combined: list[Footprint] = []
    known: dict[Any, Footprint] = {}
    for index, run in enumerate(stages):
        received = layers[run.start - 1].outputs if index else ()
        inputs = tuple((tensor.bytes, tensor.needs_gradient) for tensor in received)
        of_stage, last = layers[run.start : run.stop], index == len(stages) - 1
        offloaded = tuple(layer - run.start for layer in run if layer in away)
        weights = tuple(shared(run))
        key = tuple(layer.identity for layer in of_stage), inputs, last, weights, offloaded
        if key not in known:
            known[key] = footprint(of_stage, inputs, last=last, shared=weights, offloaded=offloaded)
        combined.append(known[key])
    return combined


def footprint(
    layers: Sequence[LayerProfile],
    inputs: Sequence[tuple[int, bool]],
    *,
    last: bool,
    shared: Sequence[SharedWeight] = (),
    offloaded: Collection[int] = (),
) -> Footprint:
    """Combine the layers of a stage.

    Args:
        inputs: (bytes, needs gradient) of each tensor from the previous stage. Empty for the first
            stage: its samples are small, and counted where a layer keeps them.
        last: True if the stage ends in the loss.
        shared: weights that several of the layers use.
        offloaded: indices of layers with activation offload. The saved tensors of the layer with
            the loss stay.
    """
    away = frozenset(index for index in offloaded if not (last and index == len(layers) - 1))
    forward = _forward(layers, len(inputs), last, away)
    groups = [forward.released[index] if index in away else 0 for index in range(len(layers))]
    kept = sum(forward.released) - sum(groups)
    deferred = sum(layer.deferred_bytes for layer in layers)
    backward, weight_half = _backward(layers, forward.released, groups, last=last, shared=shared)
    sent = 0
    if not last:
        sent = sum(tensor.bytes for tensor in layers[-1].outputs if tensor.needs_gradient)
    return Footprint(
        inputs=sum(size for size, _ in inputs),
        kept=kept,
        forward_peak=forward.peak,
        backward=backward,
        deferred=deferred,
        weight_half=weight_half,
        outputs=sent,
        input_gradients=sum(size for size, needs_gradient in inputs if needs_gradient),
        output_gradients=sent,
        offloaded=sum(groups),
        last_group=next((size for size in reversed(groups) if size), 0),
        forward_layer=forward.at_peak,
        forward_experts=layers[forward.at_peak].num_experts,
        sent_only=forward.released[len(layers)],
    )


def _backward(
    layers: Sequence[LayerProfile],
    released: Sequence[int],
    groups: Sequence[int],
    *,
    last: bool,
    shared: Sequence[SharedWeight],
) -> tuple[tuple[BackwardPoint, ...], tuple[BackwardPoint, ...]]:
    """Return the points of a whole backward (or its input-gradient half), and those of the
    weight-gradient half: last layer to first, then the end.

    Args:
        released: bytes that each layer's backward releases.
        groups: part of them in host memory until the backward of the layer after it.
    """
    in_halves = any(layer.weight_half for layer in layers)
    kept = sum(released) - sum(groups)
    deferred = sum(layer.deferred_bytes for layer in layers)
    whole: list[BackwardPoint] = []
    weights: list[BackwardPoint] = []
    live, live_deferred = kept, deferred
    elements = experts = 0
    for index, layer in reversed(list(enumerate(layers))):
        peak, weight_peak = layer.backward_peak, layer.weight_peak
        if index == len(layers) - 1 and not last:
            peak = layer.backward_peak_from_outside
        # the unfinished gradient of a shared weight is made in W, if there is one
        waiting = sum(weight.waits_in(index) for weight in shared)
        if in_halves:
            weight_peak += waiting
        else:
            peak += waiting
        # back on the device: this layer's group, and the next one, which is prefetched
        peak += groups[index] + next((size for size in reversed(groups[:index]) if size), 0)
        point = BackwardPoint(
            live + peak - kept,
            layer.num_dense,
            elements,
            layer.num_experts,
            experts,
            layer.num_frozen,
            largest=layer.largest,
        )
        weight_bytes = live_deferred + weight_peak - deferred
        live += layer.deferred_bytes - released[index] + groups[index]
        live_deferred -= layer.deferred_bytes
        whole.append(point._replace(after=live - kept))
        weights.append(point._replace(bytes=weight_bytes, after=live_deferred - deferred))
        elements += layer.num_dense
        experts += layer.num_experts
    end = BackwardPoint(deferred - kept, 0, elements, 0, experts)
    return (*whole, end), (*weights, end._replace(bytes=-deferred))


class _Forward(NamedTuple):
    """Memory of a stage's forward."""

    peak: int
    at_peak: int
    """Index of the layer at the peak."""
    released: list[int]
    """Bytes that each layer's backward releases; the last: those held only to be sent."""


def _forward(
    layers: Sequence[LayerProfile], num_inputs: int, last: bool, away: Collection[int]
) -> _Forward:
    """Follow the values of a micro-batch through the layers.

    While a layer runs, the saved tensors of the latest layer in ``away`` before it are still on the
    device. A tensor between layers is counted once. The first layer that keeps it is the last to
    release it in backward.
    """
    sizes = dict.fromkeys(range(num_inputs), 0)
    """Bytes of the tensors between layers, by number; 0 if counted elsewhere: received,
    or kept by their own layer.
    """
    keepers: dict[int, int] = {}
    """Tensor -> first layer that keeps it; ``len(layers)``: kept to be sent."""
    value = list(sizes)
    owned = forward_peak = at_peak = leaving = 0
    for index, layer in enumerate(layers):
        if not value:
            value = [len(sizes) + place for place in range(len(layer.inputs_kept))]
            sizes |= dict.fromkeys(value, 0)
        for place, tensor in enumerate(value):
            if layer.inputs_kept[place]:
                keepers.setdefault(tensor, index)
        on_device = {
            tensor for tensor, keeper in keepers.items() if keeper not in away or keeper == index
        }
        live = owned + leaving + sum(sizes[tensor] for tensor in {*value, *on_device})
        if live + layer.forward_peak > forward_peak:
            forward_peak, at_peak = live + layer.forward_peak, index
        if index in away:
            leaving = layer.kept_bytes
        else:
            owned += layer.kept_bytes
        outputs = []
        for output in layer.outputs:
            if output.input_index is not None:
                outputs.append(value[output.input_index])
            else:
                outputs.append(len(sizes))
                sizes[len(sizes)] = 0 if output.kept else output.bytes
        value = outputs
    if not last:
        for output, tensor in zip(layers[-1].outputs, value, strict=True):
            if output.needs_gradient:
                keepers.setdefault(tensor, len(layers))
    released = [layer.kept_bytes for layer in layers] + [0]
    for tensor, keeper in keepers.items():
        released[keeper] += sizes[tensor]
    return _Forward(forward_peak, at_peak, released)
