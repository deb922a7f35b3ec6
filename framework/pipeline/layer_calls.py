"""Calls of a stage's layers, resolved once: what a layer does not use costs no call per micro-batch.

wait for its weights -> offload of what it saves -> recompute -> restart of its dropouts -> the layer
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import partial
from typing import Any

from torch import nn

from meshwright.pipeline.activation_offload import ActivationOffload
from meshwright.pipeline.recompute import RecomputeContext, recomputed
from meshwright.pipeline.stage_checks import InspectedLayer, advise
from meshwright.seeding import dropouts_of, restart_calls


class LayerCalls:
    """Layers of a stage as functions of a value, which run one after the other.

    Args:
        before_layer: function called with the name of each layer before it runs.
        again: state that the second forward of a recompute restores.
        whole: layers that are recomputed as a whole.
        offloaded: layers whose saved tensors lie in host memory until backward.
    """

    def __init__(
        self,
        layers: nn.Sequential,
        before_layer: Callable[[str], None],
        again: RecomputeContext,
        whole: Collection[str],
        offloaded: Collection[str],
    ) -> None:
        self._layers, self._before_layer, self._again, self._whole = layers, before_layer, again, whole
        self._offloaded = [name for name, _ in layers.named_children() if name in offloaded]
        self._calls = [(name, self._call_of(name, layer, layer)) for name, layer in layers.named_children()]

    def _call_of(self, name: str, layer: nn.Module, inner: Callable[[Any], Any]) -> Callable[[Any], Any]:
        dropouts = dropouts_of(layer)

        def run(value: Any) -> Any:
            restart_calls(dropouts)  # also in the second forward of a recompute
            return inner(value)

        call = run if dropouts else inner
        return partial(recomputed, call, self._again) if name in self._whole else call

    def run(self, value: Any, *, offload: ActivationOffload | None, running: Collection[str] | None = None) -> Any:
        """Run the layers on the value that the first one takes; return the value of the last one.

        Args:
            offload: None: all saved tensors stay on the device.
            running: buffers that forward may change, to check that it changes no others; None: no check.
        """
        calls, name = self._calls, ""
        if running is not None:
            layers = self._layers.named_children()
            calls = [(name, self._call_of(name, each, InspectedLayer(name, each, running))) for name, each in layers]
        offloaded = self._offloaded if offload is not None else []
        try:
            for name, call in calls:
                self._before_layer(name)
                if offload is None or name not in offloaded:
                    value = call(value)
                else:
                    with offload.around_layer(is_last=name == offloaded[-1]):
                        value = call(value)
        except (RuntimeError, IndexError) as error:
            advise(f"layer {name}", error, self._again.draw.sample_indices)
            raise
        return value
