"""Profile of one layer for one micro-batch on one tp rank: its operations,
its messages and its memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from meshwright_plan.planner.operations import Work


class CoreCall(NamedTuple):
    """Call of an attention core that the sharding plan names."""

    window: int | None
    """Largest number of keys that a query attends to; None: all."""
    flops: float
    """FLOPs of all pairs of this rank's queries and the sample's keys."""
    groups: int = 1
    """Number of head groups (``cp_head_groups``):
    keys of one are exchanged while another attends.
    """


class GroupMessages(NamedTuple):
    """Messages of one kind within a tp, cp or ep group."""

    operation: str
    calls: int
    wire_bytes: float
    """Bytes that one rank puts on the wire, all calls together."""
    axis: str = "tp"


class OutputTensor(NamedTuple):
    """A tensor in the output of a layer."""

    bytes: int
    input_index: int | None
    """Index of the input leaf whose storage this tensor shares; None if the layer created it."""
    kept: bool
    """True if the layer itself keeps the tensor for its backward."""
    needs_gradient: bool


@dataclass(frozen=True)
class LayerProfile:
    """Profile of a layer for one micro-batch on one tp rank; the last includes the loss.
    Bytes are of live tensors.
    """

    name: str
    forward: tuple[Work, ...]
    backward: tuple[Work, ...]
    weight_half: tuple[Work, ...]
    """Weight-gradient half of a split backward; ``backward`` is then the input-gradient half."""
    forward_messages: tuple[GroupMessages, ...]
    backward_messages: tuple[GroupMessages, ...]
    num_parameters: int
    """Number of local trained parameter elements;
    a weight tied to another layer's counts in both.
    """
    kept_bytes: int
    """Bytes kept between forward and backward, without inputs;
    includes the output if the layer keeps it.
    """
    inputs_kept: tuple[bool, ...]
    """True for each input leaf that the layer keeps for backward."""
    outputs: tuple[OutputTensor, ...]
    forward_peak: int
    """Peak bytes in forward, above the bytes live before it, without inputs."""
    backward_peak: int
    """Peak bytes in backward, above the bytes live before it,
    including those kept (which are freed gradually).
    """
    backward_peak_from_outside: int
    """The same without the incoming gradient, for a stage's last layer,
    whose gradient is a received message.
    """
    deferred_bytes: int = 0
    """Bytes kept between the halves of a split backward."""
    weight_peak: int = 0
    """Peak bytes in the second half of a split backward,
    above the bytes live before it and those kept.
    """
    attended: tuple[tuple[int, int], ...] = ()
    """(bytes of queries, bytes of keys and values) of each attention in forward."""
    cores: tuple[CoreCall, ...] = ()
    """Calls of metered attention cores in forward."""
    width: int = 0
    """Last dim of its first floating-point input; 0 without one."""
    num_experts: int = 0
    """Part of ``num_parameters`` in experts that ranks share (expert parallelism)."""
    num_frozen: int = 0
    """Number of local elements that are not trained, without experts that ranks share."""

    largest: int = 0
    """Number of elements of the largest trained parameter, without experts that ranks share."""

    @property
    def identity(self) -> tuple[int, ...]:
        """Key that a profile shares with its copies under other names, while they are alive."""
        return (
            id(self.forward),
            id(self.backward),
            id(self.outputs),
            self.kept_bytes,
            self.backward_peak,
        )

    @property
    def num_dense(self) -> int:
        """Number of trained elements outside of experts that ranks share."""
        return self.num_parameters - self.num_experts

    @property
    def output_bytes(self) -> int:
        """Bytes of the output tensors."""
        return sum(leaf.bytes for leaf in self.outputs)
