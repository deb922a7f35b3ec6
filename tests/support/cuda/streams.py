"""Race check of CUDA streams: each operation of a step is assigned to the stream on
which it would run.

    stream of torch.cuda.current_stream   every operation on device tensors
    stream of a group                     its collectives and messages: NCCL has one for each communicator
    host                                  operations on tensors in host memory

Two accesses of a tensor, one of them a write, must be ordered: on one stream by the order of
launches, across streams by an event, a handle that was waited for, or a wait of the host. Tensors
are compared by storage. NOTE [not checked]: memory that the allocator gives to another tensor too
early. No storage is used twice here.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

# private, as FakeWork below: in torch 2.11 to 2.15
from torch.cuda._sanitizer import StreamSynchronizations
from torch.utils._pytree import tree_leaves

from meshwright.mesh.fake import InterceptedOperation
from meshwright.model.meter import Operation
from tests.support.cuda.call_site import call_site

DEFAULT, HOST = 0, 1
FACTORIES = (
    "empty",
    "new_empty",
    "empty_like",
    "empty_strided",
    "new_empty_strided",
    "record_stream",
)
POSTING = (
    *(
        "allreduce",
        "broadcast",
        "send",
        "recv",
        "alltoall_base",
        "barrier",
        "allgather",
        "reduce_scatter",
        "alltoall",
    ),
    *("_allgather_base", "_reduce_scatter_base", "allreduce_coalesced", "reduce"),
    *("allgather_into_tensor_coalesced", "reduce_scatter_tensor_coalesced"),
    *("all_gather_single", "reduce_scatter_single", "all_to_all_single"),
)
"""Methods of a process group that return a handle."""


class Access(NamedTuple):
    """Latest access of a storage by a stream."""

    number: int
    stream: int
    what: str


@dataclass
class History:
    """Accesses of one storage for which a later access must wait."""

    write: Access | None = None
    reads: dict[int, Access] = field(default_factory=dict)
    """Stream -> its last read since the last write."""


class Streams:
    """Streams, events and accesses of one process, and the races among them.

    Waits between streams are tracked by torch's CUDA sanitizer, without its stack traces, which
    would take minutes.
    """

    def __init__(self) -> None:
        self.order = StreamSynchronizations()
        self.names = {DEFAULT: "the compute stream", HOST: "the host"}
        self.races: dict[str, int] = {}
        """Description of a race -> number of occurrences."""
        self.order.create_stream(HOST)
        self._num_accesses = 0
        self._histories: dict[int, History] = defaultdict(History)
        self._groups: dict[str | None, int] = {}
        """Communicator -> its stream."""
        self._num_events = 0
        self._current = threading.local()
        self.number_of: Callable[[Tensor], int] = id
        """Function from a tensor to the number of its storage."""
        self._posted: int | None = None
        """Event of the communication that was posted last."""
        self._handles: dict[int, tuple[Any, int]] = {}
        """id() of a torch Work -> the Work, and the event of its communication."""

    def forget_accesses(self) -> None:
        """Forget all accesses and races, before another rank whose storages have the same numbers."""
        self._histories.clear()
        self._groups.clear()
        self._handles.clear()
        self.races.clear()

    def new_stream(self, name: str) -> int:
        """Return the number of a new stream."""
        number = len(self.names)
        self.names[number] = name
        self.order.create_stream(number)
        return number

    def new_event(self, stream: int | None = None) -> int:
        """Return the number of a new event, recorded on a stream if one is given."""
        self._num_events += 1
        self.order.create_event(self._num_events)
        if stream is not None:
            self.order.record_state(self._num_events, stream)
        return self._num_events

    @property
    def current(self) -> int:
        """Number of this thread's current stream."""
        return getattr(self._current, "stream", DEFAULT)

    @contextmanager
    def on(self, stream: int) -> Iterator[None]:
        """Make a stream this thread's current one."""
        before = self.current
        self._current.stream = stream
        try:
            yield
        finally:
            self._current.stream = before

    def wait(self, stream: int, other: int) -> None:
        """Make a stream wait for all work of another one so far."""
        self.order.stream_wait_for_event(stream, self.new_event(other))

    def host_waits(self, stream: int) -> None:
        """Make the host, and with it all later launches, wait for a stream."""
        self.order.all_streams_wait_for_stream(stream)

    def is_known_to_host(self, event: int) -> bool:
        """Return True if the host has waited for what an event has recorded,
        or for something later.
        """
        recorded = self.order.recorded_sync_states[event]
        return all(
            self.order.host_sync_state.get(stream, -1) >= number
            for stream, number in recorded.items()
        )

    def access(self, stream: int, reads: set[int], writes: set[int], what: str) -> None:
        """Note an operation on storages, and its races with earlier ones."""
        self._num_accesses += 1
        self.order.update_seq_num(stream, self._num_accesses)
        now = Access(self._num_accesses, stream, f"{what} at {call_site()}")
        for storage in reads - writes:
            history = self._histories[storage]
            self._compare(now, history.write)
            history.reads[stream] = now
        for storage in writes:
            history = self._histories[storage]
            for earlier in history.reads.values() or [history.write]:
                self._compare(now, earlier)
            self._histories[storage] = History(now)
        if stream == HOST:
            # the host launches nothing before it is done with its own operation
            self.host_waits(HOST)

    def _compare(self, now: Access, earlier: Access | None) -> None:
        if earlier is not None and not self.order.is_ordered_after(
            now.stream, earlier.number, earlier.stream
        ):
            race = (
                f"{now.what}, on {self.names[now.stream]}, does not wait for {earlier.what}, on "
                f"{self.names[earlier.stream]}"
            )
            self.races[race] = self.races.get(race, 0) + 1

    def read_by_host(self, tensor: Tensor) -> None:
        """Note that the host reads a value: it waits for the current stream, and for no other."""
        self.host_waits(self.current)
        self.access(HOST, {self.number_of(tensor)}, set(), "a value that the host reads")

    def operation(self, operation: Operation) -> None:
        """Note an operation of this process on device or host tensors."""
        if operation.packet.__name__ in FACTORIES:
            return
        reads: set[int] = set()
        writes: set[int] = set()
        is_on_device = False
        schema = operation.function._schema
        for position, argument in enumerate(schema.arguments):
            value = (
                operation.args[position]
                if position < len(operation.args)
                else operation.kwargs.get(argument.name)
            )
            alias = argument.alias_info
            if alias is not None and not alias.is_write:
                continue  # a view
            for tensor in _tensors(value):
                (reads if alias is None else writes).add(self.number_of(tensor))
                is_on_device |= tensor.device.type == "cuda"
        for returned, value in zip(
            schema.returns, _results(operation.result, len(schema.returns)), strict=False
        ):
            if returned.alias_info is None:
                for tensor in _tensors(value):
                    writes.add(self.number_of(tensor))
                    is_on_device |= tensor.device.type == "cuda"
        if writes:
            self.access(
                self.current if is_on_device else HOST, reads, writes, operation.packet.__name__
            )

    def communication(
        self, operation: Operation, call: InterceptedOperation, communicator: str | None
    ) -> None:
        """Note a collective or message: it begins after the current stream's work,
        on the stream of its group.
        """
        group, name = call.group, call.operation
        if communicator not in self._groups:
            more = ", ..." if len(group) > 4 else ""
            self._groups[communicator] = self.new_stream(
                f"the stream of ranks {', '.join(map(str, group[:4]))}{more}"
            )
        stream = self._groups[communicator]
        self.wait(stream, self.current)
        first = {self.number_of(tensor) for tensor in _tensors(operation.args[0])}
        others = {
            self.number_of(tensor) for tensor in _tensors((operation.args[1:], operation.kwargs))
        }
        reads, writes = (first, set()) if name == "send" else (others, first)
        is_functional = operation.function.namespace != "c10d"
        if is_functional:
            reads, writes = first | others, {self.number_of(tensor) for tensor in operation.outputs}
        self.access(stream, reads, writes, name)
        self._posted = self.new_event(stream)
        # a functional collective is waited for when its result is used: here at once
        if is_functional:
            self.order.stream_wait_for_event(self.current, self._posted)

    def install(self) -> None:
        """Wrap methods of torch's process groups and Work, so that ``wait`` orders streams;
        lasts for this process.
        """
        c10d: Any = torch._C._distributed_c10d
        for name in POSTING:
            if hasattr(dist.ProcessGroup, name):
                setattr(dist.ProcessGroup, name, self._posting(getattr(dist.ProcessGroup, name)))
        kinds: list[Any] = [dist.Work, c10d.FakeWork]
        for kind in kinds:
            kind.wait = self._waiting(kind.wait)

    def _posting(self, post: Callable[..., Any]) -> Callable[..., Any]:
        def posting(*args: Any, **options: Any) -> Any:
            self._posted = None
            work = post(*args, **options)
            if work is not None and self._posted is not None:
                self._handles[id(work)] = work, self._posted
            return work

        return posting

    def _waiting(self, wait: Callable[..., Any]) -> Callable[..., Any]:
        def waiting(work: Any, *args: Any) -> Any:
            if id(work) in self._handles:
                self.order.stream_wait_for_event(self.current, self._handles[id(work)][1])
            return wait(work, *args)

        return waiting


def _tensors(value: Any) -> list[Tensor]:
    leaves = [value] if isinstance(value, Tensor) else tree_leaves(value)
    return [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.device.type != "meta"]


def _results(result: Any, number: int) -> list[Any]:
    return list(result) if number > 1 else [result]
