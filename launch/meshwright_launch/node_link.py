"""Connection between the agents of two nodes: lines of JSON, bounded, checked, and never executed.

    agent         Hello, when its fork server is warm; Exit of each rank; Signalled; Stopped; Beat
    coordinator   Order; Stop; End; Beat

A dead process closes its connection. Where a machine dies or a cable is cut, the kernel reports it
after KEEPALIVE_S without an answer of the other kernel, however busy the processes are; an agent
that is stuck itself stops to beat. No torch.
"""

from __future__ import annotations

import contextlib
import errno
import socket
import time
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from meshwright_launch.failure import FailureRecord
from meshwright_launch.node_ranks import RankExit

MAX_LINE_BYTES = 1 << 20
READ_BYTES = 1 << 16
MAX_TURN_BYTES = 64 << 20
"""Bytes that are taken at once, and that may wait to be sent."""
MAX_HELLO_BYTES = 4096
"""Most bytes that are taken of a connection before its first message."""
MAX_TEXT = 60_000
"""Maximal length of a message or traceback of a rank; the rest is in its log."""
BEAT_S = 1.0
BEATS_PER_S = 200
"""Most beats that reach the coordinator in a second: more nodes beat more slowly."""
KEEPALIVE_S = 8
"""Seconds without an answer after which a machine counts as lost: longer than the failover of a link."""
SILENT_S = 60.0
"""Seconds without a beat after which an agent counts as lost, though its kernel answers: longer than
a file system of the run takes to come back.
"""

Whole = Annotated[int, Field(ge=0, le=2**63 - 1)]
Rank = Annotated[int, Field(ge=0, le=2**20)]
Code = Annotated[int, Field(ge=-255, le=255)]
Text = Annotated[str, Field(max_length=MAX_TEXT)]


class NodeMessage(BaseModel):
    """Base of messages: exact types, no unknown fields."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class Hello(NodeMessage):
    """First message of an agent: it is ready to fork ranks."""

    kind: Literal["hello"] = "hello"
    node: Rank
    name: Annotated[str, Field(max_length=255)]
    run: Annotated[str, Field(max_length=64)]
    """Hash of the configuration and the number of nodes: they are the same on all nodes."""
    address: Annotated[str, Field(max_length=64)] = ""
    """Address at which other nodes reach its ranks; empty: the loopback, or not known."""


class Beat(NodeMessage):
    """Sign of life."""

    kind: Literal["beat"] = "beat"


class Failure(NodeMessage):
    """Record of a failed rank, as in ``failure.py``."""

    message: Text
    trace: Text
    exit_code: Code
    lost_peer: bool
    age_s: Annotated[float, Field(ge=0, le=1e9)]
    """Seconds since the failure: clocks of nodes differ."""


class Exit(NodeMessage):
    """End of a rank's process."""

    kind: Literal["exit"] = "exit"
    rank: Rank
    generation: Whole
    code: Code
    failure: Failure | None = None

    @staticmethod
    def pack(ended: RankExit) -> Exit:
        """Return the message for a rank that has ended."""
        found = ended.failure
        failure = (
            None
            if found is None
            else Failure(
                message=_encodable(found.message)[:MAX_TEXT],
                trace=_encodable(found.trace)[-MAX_TEXT:],
                exit_code=found.exit_code,
                lost_peer=found.lost_peer,
                age_s=max(0.0, time.monotonic() - found.at_s),
            )
        )
        return Exit(rank=ended.rank, generation=ended.generation, code=ended.code, failure=failure)

    def record(self) -> FailureRecord | None:
        """Return the failure record, on the clock of this machine."""
        found = self.failure
        if found is None:
            return None
        at_s = time.monotonic() - found.age_s
        return FailureRecord(
            self.rank, at_s, found.message, found.trace, found.exit_code, found.lost_peer
        )


class Signalled(NodeMessage):
    """The ranks of a node are to save and exit."""

    kind: Literal["signalled"] = "signalled"


class Stopped(NodeMessage):
    """All ranks of a node have ended, as a :class:`Stop` asks."""

    kind: Literal["stopped"] = "stopped"


class Order(NodeMessage):
    """Ranks of a node from now on, and those that get new processes. All others are killed."""

    kind: Literal["order"] = "order"
    generation: Whole
    port: Annotated[int, Field(ge=1, le=65_535)]
    """Port of the ranks' store on the first node."""
    num_ranks: Annotated[int, Field(ge=1, le=2**20)]
    """Number of ranks of the run in this launch."""
    ranks: tuple[Rank, ...]
    begin: tuple[Rank, ...]
    is_recovery: bool
    clears: bool = False
    """Flag: the steps in memory are not to be used."""


class Stop(NodeMessage):
    """The ranks are to be ended, and the agent stays."""

    kind: Literal["stop"] = "stop"


class End(NodeMessage):
    """The run has ended."""

    kind: Literal["end"] = "end"
    exit_code: Code
    message: Text = ""


AnyMessage = Annotated[
    Hello | Beat | Exit | Signalled | Stopped | Order | Stop | End, Field(discriminator="kind")
]
_PARSER: TypeAdapter[AnyMessage] = TypeAdapter(AnyMessage)


class LinkLost(Exception):
    """The other side has closed the connection, does not answer, or sends no messages."""


class NodeLink:
    """Connection to another node. No call blocks."""

    def __init__(self, connection: socket.socket, num_nodes: int = 1) -> None:
        """Take over a connection. ``num_nodes``: those of the run."""
        self.connection = connection
        self._beat_s = max(BEAT_S, num_nodes / BEATS_PER_S)
        self._buffer = b""
        """Begin of a message whose end has not arrived."""
        self._unsent = bytearray()
        self._lost = ""
        self._sent_s = 0.0
        self.num_reads = 0
        """Times that something has arrived."""
        self.silent_s = 0.0
        """Seconds since the last message, in which this process ran: see :meth:`count_silence`."""
        for option, value in (
            (socket.TCP_KEEPIDLE, 1),
            (socket.TCP_KEEPINTVL, 1),
            (socket.TCP_KEEPCNT, KEEPALIVE_S - 1),
            # also of a machine that has died with data on the way to it
            (socket.TCP_USER_TIMEOUT, KEEPALIVE_S * 1000),
            (socket.TCP_NODELAY, 1),
        ):
            connection.setsockopt(socket.IPPROTO_TCP, option, value)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        connection.setblocking(False)

    def send(self, message: NodeMessage) -> None:
        """Send a message; one that cannot be sent is lost with the link, which the next
        :meth:`receive` reports.
        """
        self._sent_s = time.monotonic()
        self._unsent += message.model_dump_json().encode() + b"\n"
        self._flush()
        if len(self._unsent) > MAX_TURN_BYTES:
            self._lost = self._lost or "it reads no messages"

    def _flush(self) -> None:
        """Send as much as the kernel takes now; each turn sends more."""
        try:
            while self._unsent and not self._lost:
                del self._unsent[: self.connection.send(self._unsent)]
        except BlockingIOError:
            pass
        except OSError as error:
            self._lost = self._lost or _reason(error)

    def beat(self) -> None:
        """Send a sign of life when one is due."""
        if time.monotonic() - self._sent_s >= self._beat_s:
            self.send(Beat())

    def count_silence(self, turn_s: float) -> None:
        """Count time without a message. ``turn_s``: seconds of this process's last turn; one that was
        stopped meanwhile (SIGSTOP, a suspended job) counts no more than a beat.
        """
        self.silent_s += min(turn_s, self._beat_s)
        if self.silent_s > SILENT_S:
            self._lost = self._lost or f"no sign of life for {SILENT_S:g} s"

    def receive_first(self) -> NodeMessage | None:
        """Return the first message of a connection, once it has arrived. Whoever reaches the port can
        connect: no more of what was sent is read or parsed.

        Raises:
            LinkLost: there is none in MAX_HELLO_BYTES, or it is no message.
        """
        try:
            data = self.connection.recv(MAX_HELLO_BYTES - len(self._buffer))
        except BlockingIOError:
            return None
        except OSError as error:
            raise LinkLost(_reason(error)) from None
        self._buffer += data
        line, end, rest = self._buffer.partition(b"\n")
        if not end and data and len(self._buffer) < MAX_HELLO_BYTES:
            return None
        if not end:
            raise LinkLost("it has sent no message" if data else "it has closed its connection")
        self._buffer = rest
        try:
            return _PARSER.validate_json(line)
        except ValidationError:
            raise LinkLost("it has sent what is no message") from None

    def receive(self) -> list[NodeMessage]:
        """Return the messages that have arrived.

        Raises:
            LinkLost: there are none any more.
        """
        self._flush()
        # many long messages may arrive at once: the failures of a node's ranks
        *lines, self._buffer = (self._buffer + self._read()).split(b"\n")
        if len(self._buffer) > MAX_LINE_BYTES:
            self._lost = "it has sent what is no message"
        messages: list[NodeMessage] = []
        for line in lines:
            try:
                messages.append(_PARSER.validate_json(line))
            except ValidationError:
                self._lost = "it has sent what is no message"
                break
        if self._lost and not messages:
            raise LinkLost(self._lost)
        return messages

    def _read(self) -> bytes:
        """Return what has arrived, at most MAX_TURN_BYTES; note the end of the connection."""
        found: list[bytes] = []
        try:
            while len(found) * READ_BYTES < MAX_TURN_BYTES:
                data = self.connection.recv(READ_BYTES)
                if not data:
                    self._lost = self._lost or "it has closed its connection"
                    break
                self.silent_s = 0.0
                self.num_reads += 1
                found.append(data)
        except BlockingIOError:
            pass
        except OSError as error:
            self._lost = self._lost or _reason(error)
        return b"".join(found)

    def close(self) -> None:
        """Close the connection; what was sent still arrives."""
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_WR)
        self.connection.close()


def _encodable(text: str) -> str:
    """Return a text without lone surrogates, such as those of a file name that is no UTF-8."""
    return text.encode("utf-8", "replace").decode()


def _reason(error: OSError) -> str:
    if error.errno in (errno.ECONNRESET, errno.EPIPE):
        return "it has closed its connection"
    if error.errno == errno.ETIMEDOUT:
        return f"no answer for {KEEPALIVE_S} s"
    return f"its connection has ended ({error.strerror or type(error).__name__})"
