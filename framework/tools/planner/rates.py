"""How fast a device computes and its links carry: an operation -> seconds, a message -> seconds.

    Work     -> seconds   product     tiles over processors, short inner dims, the largest rate seen; at least its bytes
                          attention   a share of the peak
                          the rest    bytes over bandwidth
    Said     -> seconds   latency + bytes on the wire over what the link reaches

Constants that are no data sheet's are in :class:`Reached`, one set for all devices, models and sources.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from meshwright.tools.planner.hardware import Hardware, Link, time_on
from meshwright.tools.planner.operations import Kind, Work


class Reached(NamedTuple):
    """Shares of what a data sheet promises, the same for all devices, models and frameworks.

    The defaults fit the published runs of ``benchmarks/published_runs.csv`` (``docs/planner-accuracy.md``), rounded.
    """

    product: float = 0.92
    """Of the largest rate that products are seen to reach alone: in a whole run clocks are lower."""
    short_k: float = 260.0
    """A product with an inner dim of so many elements reaches half of that."""
    tiling: float = 0.52
    """How much of a last wave of tiles that leaves processors idle is lost."""
    memory: float = 0.64
    attention: float = 0.84
    """Of what the fused kernel is said to reach, by itself."""
    attention_backward: float = 0.72
    """Of its share of the peak in forward."""
    last_wave: float = 0.5
    """Rounds of all processors that attention loses in forward: under a causal mask their parts are unequal. (In
    backward, kernels were measured to lose next to nothing.)"""
    node_link: float = 0.76
    cluster_link: float = 0.73
    message_s: float = 20e-6
    """Of a message among GPUs, at least, besides the links' latencies (NCCL; measured on B200: 22 to 26 us)."""
    operation_s: float = 4e-6
    """Of an operation on a GPU, at least."""
    hidden: float = 0.7
    """Of a message that runs beside computation, how much it does not delay."""
    waits: float = 0.005
    """Of a step's time, for each doubling of the devices: the slowest of many is waited for."""
    step_s: float = 0.0
    """Of each step, for what is not modelled."""


class Habits(NamedTuple):
    """What a framework does in its own way. The defaults are this one's."""

    reduces_beside: bool = True
    """Sums over replicas run beside the last backward."""
    gathers_beside: bool = True
    """Weights are gathered beside the forward."""
    tp_beside: bool = False
    """Messages of tensor parallelism run beside products."""
    tp_beside_weight_gradients: bool = False
    """In backward, what can be: the sums of input gradients, and gathering inputs once more, run beside products."""
    sends_beside: bool = True
    """A pipeline rank computes on while it sends; otherwise both sides wait until a message is there."""
    scatters_sends: bool = False
    """Each tp rank sends its part of what all of them have, and they gather it on the other side (Narayanan 2021)."""
    accumulates_in_product: bool = False
    """A product adds to the gradient itself."""
    wide_gradient_bytes: int = 4
    """Of an element of a gradient that is accumulated, and summed over replicas."""
    optimizer_bytes: float = 38.0
    """Read and written per element of a shard: norm, clipping, AdamW, the weights that are computed with."""
    steps_together: bool = True
    """No pipeline rank begins the next step before all are done (they agree on the gradient's norm)."""
    product_dtype: str = ""
    """Of the products of layers, where it is another than the rest's: their factors are cast for them."""
    casts: float = 0.5
    """Of both factors for each of a layer's three products. Half: what one product has cast serves another one too."""
    cast_product_speed: float = 1.0
    """Of products of such factors, where it is another than the hardware's."""
    tp_in_parts: bool = False
    """A product whose factor comes in, or whose result goes out, as the product is made is cut into a part per rank
    (torch's ``_micro_pipeline_tp``). An input's gradient is the sum of several products: it goes out behind them."""
    attention_speed: float = 1.0
    """Of the fused attention kernel, where it is another than the device's usual one."""
    attention_head_dims: tuple[int, ...] = (32, 64, 96, 128, 160, 192, 224, 256)
    """That the fused kernel is made for (FlashAttention-2's): others take as long as the next larger one."""
    context: int = 1
    """Ranks over which each sequence is split."""
    context_exchange: str = "heads"
    """"heads": queries, keys, values and outputs change places, so that a rank has all of some heads. "keys": keys and
    values go round."""


MEASURED = Reached(memory=1.0, node_link=1.0, cluster_link=1.0, hidden=0.0, waits=0.0, operation_s=0.0)
"""Of rates that are measured, all is reached."""
ON_CORES = Habits(reduces_beside=False, gathers_beside=False)
"""Where messages are carried by the cores that compute."""

TILE = (128, 128)
ROWS = 128
"""Of queries that a processor works on at once in attention."""


def _peak(hardware: Hardware, dtype: str) -> float:
    return float(hardware.flops_per_s[dtype])


def work_s(
    work: Work, hardware: Hardware, dtype: str, reached: Reached, *, backward: bool, habits: Habits | None = None
) -> float:
    """Seconds of one of these operations."""
    if hardware.products:
        return _measured(work, hardware)
    memory_s = work.bytes / (hardware.memory_bytes_per_s * reached.memory)
    if work.kind is Kind.ATTENTION:
        habits = habits or Habits()
        share = habits.attention_speed * filled(work.shape[3], habits.attention_head_dims)
        share *= attention_share(work.shape[0] * work.shape[1], hardware, reached, backward=backward)
        return max(work.flops / (_peak(hardware, "bfloat16") * share), memory_s) + reached.operation_s
    if work.kind is Kind.MEMORY:
        return memory_s + reached.operation_s
    share = product_share(work.shape, hardware, reached)
    return max(work.flops / (_peak(hardware, dtype) * share), memory_s) + reached.operation_s


def attention_share(queries: int, hardware: Hardware, reached: Reached, *, backward: bool) -> float:
    """Of the peak, what the fused kernel reaches with so many queries of all heads."""
    measured = hardware.attention_backward_share
    waves = queries / ROWS / hardware.processors
    filled_waves = waves / (waves + reached.last_wave)
    if measured is not None:
        return measured if backward else hardware.attention_share * filled_waves
    said = hardware.attention_share * reached.attention
    return said * (reached.attention_backward if backward else filled_waves)


def filled(head_dim: int, made_for: tuple[int, ...]) -> float:
    """Of the dims that a kernel works on, how many a head has."""
    return max((head_dim / dims for dims in made_for if dims >= head_dim), default=1.0)


def product_share(shape: tuple[int, int, int, int], hardware: Hardware, reached: Reached) -> float:
    """Of the peak, what a product of (batch, m, n, k) reaches."""
    batch, m, n, k = shape
    tiles = batch * math.ceil(m / TILE[0]) * math.ceil(n / TILE[1])
    waves = tiles / hardware.processors
    full = (waves / math.ceil(waves)) ** reached.tiling
    edges = (m / (math.ceil(m / TILE[0]) * TILE[0])) * (n / (math.ceil(n / TILE[1]) * TILE[1]))
    share: float = hardware.product_share * reached.product * full * edges * k / (k + reached.short_k)
    return share


def _measured(work: Work, hardware: Hardware) -> float:
    memory_s = time_on(hardware.copies, work.bytes) if hardware.copies else work.bytes / hardware.memory_bytes_per_s
    computing_s = 0.0 if work.kind is Kind.MEMORY else time_on(hardware.products, work.flops)
    return max(computing_s, memory_s) / hardware.whole_share + hardware.operation_s


class Wire(NamedTuple):
    """The links of one axis for one layout."""

    bytes_per_s: float
    ring_s: float
    """Of the way once around."""
    size: int
    call_s: float = 0.0
    """Of each message, to be started."""
    measured: tuple[tuple[str, Link], ...] = ()
    """By kind, where messages were measured."""

    def seconds(self, wire_bytes: float, calls: float = 1, kind: str = "") -> float:
        """Of so many messages of a kind, which together put so many bytes on the wire per rank.

        Gathering and scattering go once around a ring, however long it is; a sum to all goes around twice or, among
        many, up and down a tree (NCCL's choices).
        """
        if self.size == 1:
            return 0.0
        for name, link in self.measured:
            if name == kind:
                hops = 1 if kind == "send" else (self.size - 1) * (2 if kind == "all_reduce" else 1)
                return wire_bytes / link.bytes_per_s + calls * hops * link.latency_s
        latency = self.ring_s
        if kind == "all_reduce":
            latency *= min(2.0, 4.0 * math.log2(self.size) / (self.size - 1))
        return wire_bytes / self.bytes_per_s + calls * (latency + self.call_s)


def wire_of(size: int, stride: int, hardware: Hardware, reached: Reached) -> Wire:
    """The links that ``size`` ranks talk over which stand ``stride`` apart.

    Those of one node go by the node's link. Across nodes, each device has a way out of its own: of a group with
    several ranks in a node, all of theirs carry its messages.
    """
    node, cluster = hardware.node_link, hardware.cluster_link
    within = node.bytes_per_s * reached.node_link
    call_s = reached.message_s if hardware.kind == "cuda" else 0.0
    measured = tuple(hardware.messages.items())
    if size * stride <= hardware.devices_per_node:
        return Wire(within, (size - 1) * node.latency_s, size, call_s, measured)
    in_node = min(max(1, hardware.devices_per_node // stride), size)
    crossings = math.ceil(size / in_node)
    ring = crossings * cluster.latency_s + (size - crossings) * node.latency_s
    return Wire(min(cluster.bytes_per_s * reached.cluster_link * in_node, within), ring, size, call_s)
