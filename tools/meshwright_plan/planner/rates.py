"""Rates of a device and its links: operation -> seconds, message -> seconds.

    Work     -> seconds   product     tiles over processors, short inner dims, the largest rate seen; at least its bytes
                          attention   a share of the peak
                          the rest    bytes over bandwidth
    messages -> seconds   latency + bytes on the wire over the link's effective bandwidth

Constants that no data sheet contains are in :class:`RateFractions`, one set for all devices, models
and sources.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from meshwright_plan.planner.hardware import Hardware, Link, interpolated_seconds
from meshwright_plan.planner.links import (
    GroupLink,
    ReachedLinks,
    Spread,
    of_ring,
    ring_link,
    spread_of,
)
from meshwright_plan.planner.operations import Work, WorkKind


class RateFractions(NamedTuple):
    """Fractions of data sheet rates that a run reaches, the same for all devices,
    models and frameworks.

    The defaults fit the published runs of ``benchmarks/published_runs.csv``
    (``docs/planner-accuracy.md``), rounded.
    """

    product: float = 0.92
    """Fraction of the largest rate that a product reaches alone;
    clocks are lower in a whole run.
    """
    short_k: float = 260.0
    """Inner dim, in elements, at which a product reaches half of that rate."""
    tiling: float = 0.52
    """Exponent for the loss in a partial last wave of tiles: 0 no loss,
    1 all idle processors lost.
    """
    float8: float = 0.87
    """Fraction of the float8 rate reached with a scale per row (torchtitan on 8 H100:
    benchmarks/published.py).
    """
    memory: float = 0.64
    attention: float = 0.84
    """Fraction of the fused kernel's published standalone rate."""
    attention_backward: float = 0.72
    """Backward share of the peak over the forward share."""
    last_wave: float = 0.5
    """Waves of tiles that forward attention loses,
    because a causal mask makes the processors' parts unequal.

    In backward, kernels were measured to lose next to nothing.
    """
    node_link: float = 0.76
    cluster_link: float = 0.73
    message_s: float = 20e-6
    """Minimum seconds per message among GPUs, besides link latency (NCCL; measured on B200:
    22 to 26 us).
    """
    operation_s: float = 4e-6
    """Minimum seconds per operation on a GPU."""
    hidden: float = 0.7
    """Fraction of an overlapped message that does not delay computation."""
    waits: float = 0.005
    """Fraction of step time added per doubling of the nodes,
    because every step waits for the slowest one.
    """
    step_s: float = 0.0
    """Seconds per step for everything that is not modelled."""


class FrameworkTraits(NamedTuple):
    """Framework-specific choices that affect time. The defaults are meshwright's."""

    overlaps_reduce: bool = True
    """Gradient reduction over replicas overlaps the last backward."""
    overlaps_gather: bool = True
    """All-gather of weights overlaps the forward."""
    overlaps_tp: bool = False
    """Tensor-parallel messages overlap products."""
    overlaps_tp_with_weight_gradients: bool = True
    """In backward of column layers, repeated all-gathers of inputs and reductions
    of their gradients overlap products.

    Each hides at most the seconds of its product. Messages of forward, and of rows, block.
    """
    overlaps_context: bool = True
    """The key exchange of one head group overlaps the attention
    of another (context parallelism).
    """
    overlaps_sends: bool = True
    """A pipeline rank keeps computing while it sends;
    otherwise both sides block until the message has arrived.
    """
    scatters_sends: bool = False
    """Each tp rank sends its part of a replicated tensor,
    and the receivers all-gather it (Narayanan 2021).
    """
    accumulates_in_product: bool = False
    """A product accumulates into the gradient itself."""
    wide_gradient_bytes: int = 4
    """Bytes per element of an accumulated gradient, as it is reduced over replicas."""
    has_weight_copy: bool = True
    """Weights in the compute dtype are held besides float32 ones; else float32 weights alone,
    cast as they are used.
    """
    frees_sent_outputs: bool = False
    """A stage's output is freed once it is sent,
    unless its own layers keep it (``deallocate_pipeline_outputs``).
    """
    optimizer_bytes: float = 38.0
    """Bytes read and written per element of a shard: norm, clipping, AdamW, compute weights."""
    synchronises_steps: bool = True
    """No pipeline rank begins the next step before all have finished,
    because they share the gradient norm.
    """
    product_dtype: str = ""
    """Dtype of the layers' products if it differs from the rest; their factors are cast to it."""
    casts: float = 0.5
    """Casts of both factors per product of a layer. 0.5: each cast serves two products."""
    casts_weights: bool = True
    """Weights are cast for each micro-batch; False: once a step,
    which does not count (Transformer Engine).
    """
    cast_product_speed: float = 1.0
    """Speed of products of cast factors, relative to the hardware's rate."""
    splits_tp_products: bool = False
    """A product overlapped with its all-gather or reduce-scatter is cut into one part per rank.

    This is torch's ``_micro_pipeline_tp``. An input gradient is the sum of several products, so it
    is sent after them.
    """
    host_operation_s: float = 0.0
    """Seconds in which the host starts one operation on a GPU; 0: CUDA graphs, or not known."""
    starts_each_expert: bool = False
    """The products of a rank's experts are started one by one, on several streams,
    and not as one grouped product.
    """
    attention_speed: float = 1.0
    """Speed of the fused attention kernel, relative to the device's usual one."""
    attention_shares: tuple[float, float] | None = None
    """Fractions of the peak that its attention kernel reaches in forward and in backward, where
    both were measured; they take the place of the hardware's, of ``attention_speed`` and of the
    fitted constants.
    """
    attention_head_dims: tuple[int, ...] = (32, 64, 96, 128, 160, 192, 224, 256)
    """Head dims of the fused kernel (FlashAttention-2's);
    others take as long as the next larger one.
    """
    far_rows_share: float = 1.0
    """Rows sent to other nodes, over those of a plain all-to-all; below 1 if a row is sent once per
    node and not once per expert (DeepEP).
    """
    context: int = 1
    """Number of ranks over which each sequence is split,
    in a framework whose layers are profiled without messages.
    """
    context_exchange: str = "heads"
    """Exchange of context parallelism: "heads" or "keys".

    "heads": an all-to-all of queries, keys, values and outputs gives each rank all tokens of some
    heads. "keys": keys and values go round a ring.
    """


OWN_TRAITS = FrameworkTraits()
HOST_OPERATION_S = 1e-5
"""Host seconds per operation of this framework on a GPU: a few calls of torch of a few microseconds
each (NVIDIA, "Optimizing DeepSeek-V3 Training Performance on GB200 NVL72", section 2). Not measured
here.
"""
MEASURED = RateFractions(
    memory=1.0, node_link=1.0, cluster_link=1.0, hidden=0.0, waits=0.0, operation_s=0.0
)
"""Fractions for measured rates, which need no reduction."""
MEASURED_ON_GPU = RateFractions(product=1.0, memory=1.0)
"""Fractions for rates measured on a GPU: links and small kernels were not."""
CPU_TRAITS = FrameworkTraits(overlaps_reduce=False, overlaps_gather=False, overlaps_context=False)
"""Traits of devices whose compute cores also carry the messages."""

NOT_COMPUTED = (WorkKind.MEMORY, WorkKind.EMULATION)
"""Kinds that memory bandwidth alone limits."""
TILE = (128, 128)
QUERY_TILE = 128
"""Queries per processor at a time in attention."""


class PerformanceModel(NamedTuple):
    """Hardware, with the fractions of its rates that a run reaches and the traits of the framework
    that runs on it.
    """

    hardware: Hardware
    fractions: RateFractions = RateFractions()
    traits: FrameworkTraits = FrameworkTraits()
    num_ranks: int | None = None
    """Ranks of the job, which its groups tile; None: any number."""

    @classmethod
    def of(cls, hardware: Hardware) -> PerformanceModel:
        """Return the performance model of meshwright on ``hardware``."""
        if hardware.kind == "cuda":
            shares = hardware.torch_attention_shares
            traits = FrameworkTraits(attention_shares=shares, host_operation_s=HOST_OPERATION_S)
            return cls(hardware, MEASURED_ON_GPU if hardware.measured else RateFractions(), traits)
        return cls(hardware, MEASURED, CPU_TRAITS)

    @property
    def linked_ranks(self) -> int:
        """Number of neighbouring ranks that the node's link connects: those of a node,
        or of a domain of nodes.

        A job's nodes are spread evenly over as few domains as hold them, as by Slurm's
        ``--segment``: 64 nodes of 4 devices take 16 in each of four domains of 18, where a group of
        64 ranks leaves none.
        """
        hardware = self.hardware
        if self.num_ranks is None or hardware.linked_devices == hardware.devices_per_node:
            return hardware.linked_devices
        nodes = math.ceil(self.num_ranks / hardware.devices_per_node)
        domains = math.ceil(nodes * hardware.devices_per_node / hardware.linked_devices)
        return math.ceil(nodes / domains) * hardware.devices_per_node

    @property
    def memory_bytes_per_s(self) -> float:
        """Memory bandwidth of a device that operations reach."""
        return float(self.hardware.memory_bytes_per_s * self.fractions.memory)

    def work_s(self, work: Work, dtype: str, *, backward: bool) -> float:
        """Return the seconds of one operation of this kind."""
        hardware, operation_s = self.hardware, self.fractions.operation_s
        has_float8 = "float8" in hardware.flops_per_s
        if work.kind is WorkKind.EMULATION and has_float8:
            return 0.0
        if hardware.products:
            return _measured_s(work, hardware, dtype)
        memory_s = work.bytes / self.memory_bytes_per_s
        if work.kind in NOT_COMPUTED:
            return memory_s + operation_s
        if work.kind is WorkKind.ATTENTION:
            share = head_dim_share(work.shape[3], self.traits.attention_head_dims)
            share *= self.attention_share(work.shape[0] * work.shape[1], backward=backward)
            peak = hardware.attention_flops_per_s(dtype)
        else:
            share, peak = self.product_share(work.shape), float(hardware.flops_per_s[dtype])
            if work.kind is WorkKind.FLOAT8 and has_float8:
                peak = float(hardware.flops_per_s["float8"]) * self.fractions.float8
        return max(work.flops / (peak * share), memory_s) + operation_s

    def attention_share(self, queries: int, *, backward: bool) -> float:
        """Return the fused kernel's share of the peak, 0..1;
        ``queries`` is their number over all heads.
        """
        hardware, fractions = self.hardware, self.fractions
        waves = queries / QUERY_TILE / hardware.processors
        filled_waves = waves / (waves + fractions.last_wave)
        if (measured := self.traits.attention_shares) is not None:
            return measured[1] if backward else measured[0] * filled_waves
        speed = self.traits.attention_speed
        if hardware.attention_backward_share is not None:
            return speed * (
                hardware.attention_backward_share
                if backward
                else hardware.attention_share * filled_waves
            )
        share = speed * hardware.attention_share * fractions.attention
        return share * (fractions.attention_backward if backward else filled_waves)

    def product_share(self, shape: tuple[int, int, int, int]) -> float:
        """Return a product's share of the peak, 0..1; ``shape`` is (batch, m, n, k)."""
        batch, m, n, k = shape
        rows, columns = math.ceil(m / TILE[0]), math.ceil(n / TILE[1])
        waves = batch * rows * columns / self.hardware.processors
        full = (waves / math.ceil(waves)) ** self.fractions.tiling
        edges = (m / (rows * TILE[0])) * (n / (columns * TILE[1]))
        share: float = self.hardware.product_share * self.fractions.product * full * edges
        return share * k / (k + self.fractions.short_k)

    def group_link(self, size: int, stride: int) -> GroupLink:
        """Return the links between ``size`` ranks at a distance of ``stride`` ranks.

        Ranks of one node use the node's link. Across nodes, each device has its own network link,
        so a group with several ranks per node uses several of them: as many as the node with the
        fewest, of the groups that tile the job's ranks (:func:`spread_of`). Measured rings replace
        both rates.
        """
        hardware = self.hardware
        spread = spread_of(size, stride, self.linked_ranks, self.num_ranks)
        (in_node, crossings), reached = spread, self.reached_links(spread)
        within, node_latency_s = reached.node_bytes_per_s, reached.node_latency_s
        measured: tuple[tuple[str, Link], ...] = tuple(hardware.messages.items())
        if in_node == size:
            if measured and hardware.node_rings:
                usual = ring_link(
                    hardware.node_rings, max(2, min(hardware.processors, hardware.devices_per_node))
                )
                # calibrate measured over `usual`
                measured = of_ring(measured, within / usual.bytes_per_s)
            return GroupLink(within, (size - 1) * node_latency_s, size, reached.call_s, measured)
        ring_s = crossings * reached.cluster_latency_s + (size - crossings) * node_latency_s
        return GroupLink(
            min(reached.cluster_bytes_per_s * in_node, within),
            ring_s,
            size,
            reached.call_s,
            measured,
        )

    def reached_links(self, spread: Spread) -> ReachedLinks:
        """Return the links of a group with this spread: measured rings of its lengths,
        or fractions of the links.
        """
        hardware, node, cluster = self.hardware, self.hardware.node_link, self.hardware.cluster_link
        node_share, cluster_share = self.fractions.node_link, self.fractions.cluster_link
        call_s = self.fractions.message_s if hardware.kind == "cuda" else 0.0
        if hardware.node_rings and spread.fewest > 1:
            node, node_share, call_s = ring_link(hardware.node_rings, spread.fewest), 1.0, 0.0
        if hardware.cluster_rings and spread.nodes > 1:
            cluster, cluster_share, call_s = (
                ring_link(hardware.cluster_rings, spread.nodes),
                1.0,
                0.0,
            )
        rates = node.bytes_per_s * node_share, cluster.bytes_per_s * cluster_share
        return ReachedLinks(rates[0], node.latency_s, rates[1], cluster.latency_s, call_s)

    def send_link(self, crosses: bool) -> GroupLink:
        """Return the link of one message between two devices; ``crosses``:
        they are in different nodes.
        """
        measured = self.hardware.cluster_send if crosses else self.hardware.node_send
        if measured is not None:
            return GroupLink(measured.bytes_per_s, measured.latency_s, 2)
        return self.group_link(2, self.linked_ranks if crosses else 1)


def head_dim_share(head_dim: int, kernel_dims: tuple[int, ...]) -> float:
    """Return the head dim over the next larger one that the kernel supports, 0..1."""
    return max((head_dim / dims for dims in kernel_dims if dims >= head_dim), default=1.0)


def _measured_s(work: Work, hardware: Hardware, dtype: str) -> float:
    """Return the seconds of one operation from measured curves. ``dtype``: that of products."""
    if hardware.copies:
        memory_s = interpolated_seconds(hardware.copies, work.bytes)
    else:
        memory_s = work.bytes / hardware.memory_bytes_per_s
    product_s = 0.0
    if work.kind not in NOT_COMPUTED:
        product_s = interpolated_seconds(
            hardware.other_products.get(dtype, hardware.products), work.flops
        )
    return max(product_s, memory_s) / hardware.whole_share + hardware.operation_s
