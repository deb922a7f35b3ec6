"""Coordinator of a run with a mirror (``watch.mirror``): dead ranks and nodes are replaced in place.

    an agent       reports that rank 3 was ended by SIGKILL; or its connection ends, with all its ranks
    coordinator    orders a new process for each, on the same node or on a spare one; announces generation 1
    other ranks    their collectives fail, or a thread aborts them when it sees the announcement;
                   they close their groups and free their memory (recovery.py)
    all ranks      rendezvous of generation 1, mesh, build, resume from the mirror, train
    coordinator    all ranks have taken a step: the recovery is complete, and recorded

A lost node without a spare one leaves fewer replicas (replicas.py): all ranks start anew on the nodes that
are left, with the largest dp that they hold, from the same mirror. When there are nodes for more again, the
coordinator announces a planned change in the same way.

A hang whose report names stuck ranks is a failure of these. What fails before a recovery is complete,
or does not come in time, starts all ranks anew, from the same mirror. Each failure counts as one of
``launch.max_restarts``. After the last one, or three in a row at the same step, a failure is handled as
without a mirror (restarts.py), and the ranks again resume from it.

The coordinator is a part of the first node's agent, beside rank 0: without that node the run ends.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, NamedTuple

from meshwright.config import RunConfig
from meshwright.errors import DriftError, HangError, MissingRanksError, NonFiniteError
from meshwright.run.directory import RECOVERIES, run_directory
from meshwright.system.atomic import append_synced
from meshwright.terminal.output import abridge, tell
from meshwright_launch.failure import (
    FailureRecord,
    NodesLost,
    RankFailed,
    build_error,
    causes_first,
)
from meshwright_launch.growth import Growth
from meshwright_launch.mirror_place import MirrorPlace
from meshwright_launch.node_link import (
    BEAT_S,
    Exit,
    NodeMessage,
    Order,
    Signalled,
    Stop,
    Stopped,
)
from meshwright_launch.node_place import NodePlace
from meshwright_launch.node_ranks import SHUTDOWN_S, UNKNOWN_EXIT, server_gone
from meshwright_launch.node_table import Node, NodeTable, choose_nodes
from meshwright_launch.recovery_notes import PHASES, CoordinatorNotes
from meshwright_launch.replicas import NoReplicas, ReplicaCounts, Replicas
from meshwright_launch.restarts import MAX_FUTILE_RESTARTS, log_failure

TOGETHER_S = 0.05
"""Seconds in which ranks that die are taken to die together: one recovery replaces all of them."""
RECOVERY_POLL_S = 0.05
"""Interval in seconds in which the coordinator looks at a recovery."""
LEAVE_S = 20.0
"""Time for the ranks to leave their step; those that do not are killed."""
JOIN_S = 60.0
"""Time for all ranks of a planned change to meet. Nothing has failed: a node that has come and is silent must
not hold the run up for ``launch.timeout_s``. Its fork server is warm, so the imports are done."""
SPARE_GRACE_S = 10.0
"""Time to wait for the agents of further nodes once there are enough for all ranks."""
REPLACED_EXIT_CODES = (1,)
"""Exit codes that a replacement may get past, besides deaths by a signal."""


class RankFault(NamedTuple):
    """Ranks that are to be replaced, and why."""

    ranks: tuple[int, ...]
    what: str
    """One line for the user."""
    error: RankFailed
    """End of the run if they cannot be replaced."""
    is_transient: bool = True
    is_new: bool = True
    """False: a consequence of one that was counted."""
    nodes: tuple[str, ...] = ()
    detected_s: float = 0.0
    """Seconds from the last sign of life until it was seen."""


@dataclass
class RankRecovery:
    """Recovery that is not complete."""

    fault: RankFault
    replaced: tuple[int, ...]
    """Ranks with new processes."""
    begun_s: float = field(default_factory=time.monotonic)
    is_planned: bool = False
    """Flag: nodes have come, and nothing has failed."""
    times: dict[str, float] = field(default_factory=dict)
    """Phase -> seconds after ``begun_s`` when all ranks had completed it."""


class Coordinator:
    """Launcher of the ranks of all nodes. One at a time, in the process of the first node's agent."""

    def __init__(
        self,
        config: RunConfig,
        place: NodePlace,
        table: NodeTable,
        store: tuple[Any, int],
        mirror: MirrorPlace,
    ) -> None:
        """Begin with the first node alone.

        Args:
            config: resolved.
            table: nodes of the run, of which only this one has come.
            store: store of the ranks, and its port.
            mirror: that of this node.
        """
        self._place, self._table, self._mirror = place, table, mirror
        self._notes, self._port = CoordinatorNotes(store[0]), store[1]
        self._limit, self._timeout_s = config.launch.max_restarts, config.launch.timeout_s
        self._directory = run_directory(config.run)
        self._generation_of: dict[int, int] = {}
        """Launch in which the process of each rank was started."""
        self._exits: dict[int, Exit] = {}
        """Exit of each rank's present process, if it has ended."""
        self._stopped: set[int] = set()
        self._recovery: RankRecovery | None = None
        self._counts = ReplicaCounts(config, place)
        self._replicas = self._counts.configured
        """Layout in use."""
        self._settled = self._replicas
        """Layout of the last complete launch or recovery."""
        self._growth = Growth(config.launch.grow_after_s)
        self._ring: list[Node] = []
        """Nodes whose ranks have taken the last step, in the order of the ranks: they hold its mirror."""
        self._proven = {self._replicas.dp}
        """Numbers of replicas with which the run has taken a step, and the configured one."""
        self._is_requested = False
        self._clears = False

    @property
    def _num_ranks(self) -> int:
        return self._table.num_ranks

    # -----------------------------------------------------------------------------------------------------
    # one launch of all ranks

    def launch(self) -> None:
        """Start all ranks; block until all have ended. Again: start them anew, on the nodes that are
        left.

        Raises:
            RankFailed: as :func:`meshwright_launch.local.launch` does.
            NodesLost: there are too few nodes.
            MissingRanksError: the agents of too few nodes have come.
        """
        if not self._table.blocks:
            self._gather()
        else:
            self._mirror.generation += 1
        self._recovery = None
        self._growth.give_up()
        self._fit_nodes()
        self._order(range(self._num_ranks), is_recovery=False)
        try:
            while not self._have_all_ended():
                self._listen()
                self._take_turn()
        except RankFailed as failed:
            failed.is_requested = self._is_requested
            # steps before a drift may have drifted too
            codes = {failed.exit_code, *(each.code for each in self._exits.values())}
            self._clears = DriftError.exit_code in codes
            raise
        for record in self._records():  # all have saved and exited on request
            raise RankFailed(record.message, record.rank, record.exit_code)

    def _take_turn(self) -> None:
        """Replace the ranks of a fault, or follow the recovery from an earlier one.

        Raises:
            RankFailed: a fault that is not repaired; all ranks have been ended.
        """
        fault = self._find_fault()
        if self._recovery is not None and self._have_stepped():
            self._follow(self._recovery)  # first: a fault after it is another one
        if fault is not None and self._can_repair(fault):
            self._repair(fault)
        elif fault is not None:
            self._stop()
            raise self._last_error(fault)
        elif self._recovery is not None and self._has_finished() and not self._have_met():
            self._stop()  # those that wait for a rank that has ended the run
            raise RankFailed(
                "a rank died while the others ended the run; the next start finds it complete", 0
            )
        elif self._recovery is not None:
            self._follow(self._recovery)
        elif self._can_grow():
            self._grow()

    def _have_all_ended(self) -> bool:
        return len(self._exits) == self._num_ranks and not any(
            each.code for each in self._exits.values()
        )

    def _have_met(self) -> bool:
        """Return True if all ranks have met since the start or the last fault."""
        return self._notes.count("groups") == self._num_ranks

    def _have_stepped(self) -> bool:
        """Return True if all ranks have taken a step since the start or the last fault."""
        return self._notes.count("stepped") == self._num_ranks

    def _has_finished(self) -> bool:
        """Return True if some rank has ended the run."""
        return any(each.code == 0 for each in self._exits.values())

    # -----------------------------------------------------------------------------------------------------
    # faults

    def _find_fault(self) -> RankFault | None:
        """Return what is wrong now: a lost node, ranks that have ended, a hang, or a recovery that
        does not proceed.
        """
        if self._table.lost or any(each.code for each in self._exits.values()):
            time.sleep(TOGETHER_S)
            self._listen(0.0)
            return self._find_dead()
        return self._find_stuck()

    def _find_dead(self) -> RankFault:
        """Return the ranks whose processes or nodes are gone."""
        failed = {rank: each for rank, each in sorted(self._exits.items()) if each.code}
        gone = [rank for index in self._table.lost for rank in self._table.ranks_of(index)]
        names = [self._table.nodes[index].name for index in self._table.lost]
        ranks = tuple(sorted({*failed, *gone}))
        if gone:
            reason, silent_s = max(self._table.lost.values(), key=lambda each: each[1])
            text = f"node{'s' * (len(names) > 1)} {', '.join(names)} lost: {reason}"
            error = RankFailed(
                f"{text}; with it rank{'s' * (len(gone) > 1)} {abridge(gone)}", gone[0]
            )
        else:
            first = min(failed)
            error, silent_s = self._error_of(first, failed[first].code), 0.0
        more = len(ranks) - max(1, len(gone))
        what = str(error).splitlines()[0]
        what += f", and {more} more rank{'s' * (more > 1)} with it" if more else ""
        is_transient = all(
            each.code < 0 or each.code in REPLACED_EXIT_CODES for each in failed.values()
        )
        nodes = names or [self._table.node_of(rank).name for rank in failed]
        return RankFault(
            ranks, what, error, is_transient, nodes=tuple(dict.fromkeys(nodes)), detected_s=silent_s
        )

    def _find_stuck(self) -> RankFault | None:
        """Return the ranks that a report of a hang names, or that do not leave their step in a
        recovery.
        """
        verdict = self._notes.take_verdict()
        if verdict is not None and max(verdict.ranks) < self._num_ranks:
            ranks = verdict.ranks
            what = verdict.message.splitlines()[0]
            error = RankFailed(verdict.message, min(ranks), HangError.exit_code)
            return RankFault(
                ranks, what, error, nodes=self._table.names_of(ranks), detected_s=verdict.for_s
            )
        recovery = self._recovery
        if recovery is not None and recovery.is_planned:
            fault = self._find_silent(recovery)
            if fault is not None:
                return fault
        if recovery is None or "left" in recovery.times:
            return None
        waited_s = time.monotonic() - recovery.begun_s
        if waited_s < LEAVE_S:
            return None
        came = self._notes.came("left", self._num_ranks)
        if waited_s < self._timeout_s:
            came.update(recovery.replaced)  # new processes import, and have no step to leave
        ranks = tuple(rank for rank in range(self._num_ranks) if rank not in came)
        if not ranks:
            return None
        what = (
            f"rank{'s' * (len(ranks) > 1)} {abridge(ranks)} did not leave"
            f" {'their' if len(ranks) > 1 else 'its'} step within {waited_s:.0f} s of a failure"
        )
        is_new = len(recovery.replaced) == self._num_ranks  # new processes have no step to leave
        return RankFault(
            ranks,
            what,
            RankFailed(what, ranks[0]),
            is_new=is_new,
            nodes=self._table.names_of(ranks),
        )

    def _find_silent(self, recovery: RankRecovery) -> RankFault | None:
        """Return the ranks of a planned change that have not met in time: those that have not left,
        for which the others wait, or all that are missing.
        """
        waited_s = time.monotonic() - recovery.begun_s
        if waited_s < min(JOIN_S, self._timeout_s):
            return None
        for phase in ("left", "groups"):
            came = self._notes.came(phase, self._num_ranks)
            ranks = tuple(rank for rank in range(self._num_ranks) if rank not in came)
            if ranks:
                what = (
                    f"rank{'s' * (len(ranks) > 1)} {abridge(ranks)} did not meet the others within"
                    f" {waited_s:.0f} s of a planned change"
                )
                names = self._table.names_of(ranks)
                return RankFault(ranks, what, RankFailed(what, ranks[0]), nodes=names)
        return None

    def _can_repair(self, fault: RankFault) -> bool:
        """Return True if the ranks of a fault are to be replaced."""
        if self._has_finished() or self._is_requested:
            return False
        if self._can_go_back():
            return True
        if not fault.is_transient:
            return False
        mirror = self._mirror
        futile = mirror.count_futile(mirror.newest_step())
        has_left = futile < MAX_FUTILE_RESTARTS and mirror.recoveries < self._limit
        return has_left or not fault.is_new

    def _last_error(self, fault: RankFault) -> RankFailed:
        """Return the error of a run that ends by a fault, with what other ranks have reported
        meanwhile.
        """
        self._note_ring()
        # of the numbers of the run, which other nodes would not change
        is_numeric = fault.error.exit_code in (NonFiniteError.exit_code, DriftError.exit_code)
        if self._replicas.dp not in self._proven and not self._is_requested and not is_numeric:
            return NodesLost(
                f"with dp {self._replicas.dp}, as many replicas as the nodes that are left hold, the run"
                f" has taken no step: {fault.error}. The same command on enough nodes resumes it",
                fault.error.rank,
            )
        failed = [rank for rank in fault.ranks if rank in self._exits and self._exits[rank].code]
        if self._table.lost or not failed:
            return fault.error
        if fault.error.exit_code == HangError.exit_code:
            return fault.error
        return self._error_of(failed[0], self._exits[failed[0]].code)

    def _error_of(self, rank: int, code: int) -> RankFailed:
        """Return the error of a rank that has ended with ``code``."""
        records = self._records()
        if not records and code == UNKNOWN_EXIT:
            return server_gone("and all ranks of its node with it", rank)
        return build_error(rank, code, records, self._directory / "logs")

    def _records(self) -> list[FailureRecord]:
        """Return the failure records of all ranks, causes first."""
        found = [each.record() for each in self._exits.values()]
        return causes_first(each for each in found if each is not None)

    # -----------------------------------------------------------------------------------------------------
    # recoveries

    def _repair(self, fault: RankFault) -> None:
        """Order new processes for the ranks of a fault, and announce the next generation.

        All ranks are replaced if some have not met since the start or the last recovery: they wait
        in a rendezvous that nothing can end; and in another layout.

        Raises:
            NodesLost: no spare node is left for a lost one, and no smaller layout is possible.
        """
        begun_s, mirror = time.monotonic(), self._mirror
        if self._can_go_back():
            self._go_back(fault, begun_s)
            return
        if fault.is_new:
            log_failure(fault.error, self._directory)
            mirror.count_failure(mirror.newest_step())
        is_partial = self._have_met() and self._recovery is None
        spares, change = self._fit_nodes()
        self._growth.give_up()  # a node from before it is lost
        replaced = fault.ranks if is_partial and not change else tuple(range(self._num_ranks))
        how = "replaced in place" if is_partial and not change else "all ranks start anew"
        where = f" on {', '.join(spares)}" if spares else ""
        where += f" with {change}" if change else ""
        tell(
            f"meshwright: {fault.what}; {how}{where}, recovery {mirror.recoveries} of {self._limit}"
        )
        self._begin(RankRecovery(fault, replaced, begun_s))

    def _begin(self, recovery: RankRecovery) -> None:
        """Begin a recovery, or a planned change."""
        self._mirror.generation += 1
        self._recovery = recovery
        self._order(recovery.replaced, is_recovery=True)

    def _follow(self, recovery: RankRecovery) -> None:
        """Note the phases that all ranks have completed; print and record a complete recovery."""
        for phase in PHASES:
            if phase not in recovery.times:
                if self._notes.count(phase) < self._num_ranks:
                    return
                recovery.times[phase] = round(time.monotonic() - recovery.begun_s, 3)
        self._recovery = None
        self._note_ring()
        if self._growth.before is not None:
            self._growth.before, self._growth.grown_s = None, time.monotonic()
            self._growth.suspects.difference_update(self._table.names_of(range(self._num_ranks)))
        change, self._settled = self._settled.describe_change(self._replicas), self._replicas
        if change:
            self._growth.changed_s = time.monotonic()
        times = ", ".join(f"{phase} {value:.2f} s" for phase, value in recovery.times.items())
        begin = "the nodes were there" if recovery.is_planned else "the failure was seen"
        tell(
            f"meshwright: {'grown' if recovery.is_planned else 'recovered'}: {times} after {begin}"
        )
        line = {
            "at": datetime.now().astimezone().isoformat(sep=" ", timespec="seconds"),
            "generation": self._mirror.generation,
            "what": recovery.fault.what,
            "nodes": recovery.fault.nodes,
            "replaced": len(recovery.replaced),
            "change": change,
            "planned": recovery.is_planned,
            "step": self._notes.first_step(),
            "detected_s": round(recovery.fault.detected_s, 3),
            **{f"{phase}_s": value for phase, value in recovery.times.items()},
        }
        with contextlib.suppress(OSError):
            append_synced(self._directory / RECOVERIES, (json.dumps(line) + "\n").encode())

    def _order(self, ranks: Collection[int], is_recovery: bool) -> None:
        """Order new processes for some ranks, and announce the generation to the others. With new
        processes for all of them, nodes without ranks end those that they had.
        """
        generation, has_all = self._mirror.generation, len(ranks) == self._num_ranks
        for rank in ranks:
            self._exits.pop(rank, None)
            self._generation_of[rank] = generation
        for number in [*self._table.blocks, *(self._table.spares() if has_all else ())]:
            own = self._table.ranks_of(number)
            order = Order(
                generation=generation,
                port=self._port,
                num_ranks=self._num_ranks,
                ranks=tuple(own),
                begin=tuple(rank for rank in own if rank in ranks),
                is_recovery=is_recovery,
                clears=self._clears,
            )
            self._table.nodes[number].link.send(order)
        # also ranks that the layout has no more
        replaced = range(self._counts.configured.num_ranks) if has_all else ranks
        self._notes.announce(generation, replaced, self._table.take_gone())
        self._clears = False

    # -----------------------------------------------------------------------------------------------------
    # nodes

    def _gather(self) -> None:
        """Block until the agents of enough nodes have come, and a little longer for the others.

        Raises:
            MissingRanksError: too few have come within ``launch.timeout_s``.
        """
        needed = self._place.num_nodes - self._place.num_spares
        limit_s, grace_s = time.monotonic() + self._timeout_s, None
        while len(self._table.nodes) < self._place.num_nodes:
            self._listen(BEAT_S)
            now = time.monotonic()
            if len(self._table.nodes) < needed:
                grace_s = None
                if now > limit_s:
                    raise self._missing(needed)
            elif grace_s is None:
                grace_s = now + SPARE_GRACE_S
            elif now > grace_s:
                tell(
                    f"meshwright: {len(self._table.nodes)} of {self._place.num_nodes} nodes have come, and"
                    f" {needed} are needed: starting without the others"
                )
                break
        self._table.blocks = sorted(self._table.nodes)[:needed]

    def _missing(self, needed: int) -> MissingRanksError:
        missing = self._table.missing()
        return MissingRanksError(
            "MW-LAUNCH-120",
            f"the agents of {len(self._table.nodes)} nodes have come within {self._timeout_s:g} s, and the"
            f" ranks need {needed}: not of node{'s' * (len(missing) > 1)} {abridge(missing)}. Does"
            f" `meshwright train` run there, and does its network reach {self._place.host}:"
            f"{self._place.port}?",
        )

    def _note_ring(self) -> None:
        """Note the nodes that hold the mirror, once all ranks have taken a step on them."""
        if self._have_stepped():
            self._ring = [self._table.nodes[number] for number in self._table.blocks]
            self._proven.add(self._replicas.dp)

    def _fit_nodes(self) -> tuple[list[str], str]:
        """Put a spare node in the place of each that is lost, or go on with fewer replicas. Return the
        names of these spares, and what changes in the layout.

        Raises:
            NodesLost: there are too few nodes for any permitted layout.
        """
        self._note_ring()
        dead, suspects = self._table.lost_blocks(), self._growth.suspects
        trusted = [node for node in self._table.alive() if node.name not in suspects]
        spares = [node.number for node in trusted if node.number in self._table.spares()]
        if len(dead) <= len(spares):
            return self._table.replace_lost(sorted(spares)), ""
        try:
            replicas = self._counts.find_most(len(trusted))
        except NoReplicas as error:
            if suspects:  # rather than end the run
                suspects.clear()
                return self._fit_nodes()
            self._stop()
            names = ", ".join(self._table.nodes[number].name for number in dead)
            raise NodesLost(
                f"{names} lost, and no spare node is left: the run ends. It cannot go on with fewer"
                f" replicas: {error}. The same command on enough nodes resumes from the newest"
                " checkpoint",
                self._table.ranks_of(dead[0])[0],
            ) from None
        self._growth.judge(has_shrunk=True)
        return [], self._change_replicas(replicas, self._choose_nodes(replicas, trusted))

    def _choose_nodes(self, replicas: Replicas, nodes: Collection[Node]) -> list[int]:
        """Return those of some nodes to use for a layout: such that the mirror is whole on them."""
        ring = [node.number if node in nodes else None for node in self._ring]

        def rank(node: Node) -> tuple[bool, bool, int]:
            is_suspect = node.name in self._growth.suspects
            return node.number not in self._table.blocks, is_suspect, node.number

        in_order = [node.number for node in sorted(nodes, key=rank)]
        return choose_nodes(ring, in_order, self._counts.num_nodes(replicas))

    def _change_replicas(self, replicas: Replicas, nodes: Sequence[int]) -> str:
        """Put the ranks of another layout on these nodes; return what changes."""
        change = self._replicas.describe_change(replicas)
        self._table.place_ranks(nodes, replicas.num_ranks)
        self._replicas = replicas
        self._growth.changed_s = time.monotonic()
        self._exits.clear()
        self._generation_of.clear()
        return change

    # -----------------------------------------------------------------------------------------------------
    # planned changes

    def _can_grow(self) -> bool:
        """Return True if a node waits, the run has taken a step, and the last change is long enough ago."""
        is_smaller = self._replicas.dp < self._counts.configured.dp
        if not (is_smaller and self._table.spares() and self._growth.is_due()):
            return False
        if self._is_requested or self._has_finished() or not self._have_stepped():
            return False
        return self._mirror.has_step()  # switched off, a change would cost steps

    def _grow(self) -> None:
        """Start all ranks anew with more replicas, if the nodes hold them. No failure is counted."""
        nodes = [self._table.nodes[number] for number in self._table.blocks]
        begun_s, before = time.monotonic(), (self._replicas, nodes)
        try:
            replicas = self._counts.find_most(len(self._table.alive()), above=self._replicas.dp)
        except NoReplicas:
            return
        self._listen(0.0)  # the check of a layout takes a while: a signal may have come, or a fault
        are_there = len(self._table.alive()) >= self._counts.num_nodes(replicas)
        if self._is_requested or self._table.lost or self._exits or not are_there:
            return
        self._note_ring()
        self._growth.judge(has_shrunk=False)
        change = self._change_replicas(replicas, self._choose_nodes(replicas, self._table.alive()))
        self._growth.before = before
        now = [self._table.nodes[number] for number in self._table.blocks]
        names = [node.name for node in now if node not in nodes]
        what = f"node{'s' * (len(names) > 1)} {', '.join(names)} can take ranks"
        tell(f"meshwright: {what}; all ranks start anew with {change}")
        fault = RankFault((), what, RankFailed(what, 0), is_new=False, nodes=tuple(names))
        ranks = tuple(range(self._num_ranks))
        self._begin(RankRecovery(fault, ranks, begun_s, is_planned=True))

    def _can_go_back(self) -> bool:
        """Return True if a growth is under way, and the nodes from before it are there."""
        if self._growth.before is None:
            return False
        alive = self._table.alive()  # one that was lost and has come back has no mirror
        return all(node in alive for node in self._growth.before[1])

    def _go_back(self, fault: RankFault, begun_s: float) -> None:
        """Give up a growth that has failed: a node that has come must not endanger the run. No failure
        is counted, and the pause before the next growth is twice as long.
        """
        assert self._growth.before is not None
        log_failure(fault.error, self._directory)
        replicas, nodes = self._growth.before
        self._growth.give_up()
        failed = fault.nodes or self._table.names_of(fault.ranks)
        self._growth.suspects.update(failed)
        self._growth.suspects.difference_update(node.name for node in nodes)
        change = self._change_replicas(replicas, [node.number for node in nodes])
        tell(f"meshwright: {fault.what}; all ranks start anew as before, with {change}")
        self._begin(RankRecovery(fault, tuple(range(self._num_ranks)), begun_s))

    # -----------------------------------------------------------------------------------------------------
    # messages

    def _listen(self, limit_s: float | None = None) -> None:
        """Wait for something to happen, and take it in."""
        if limit_s is None:
            is_recovering = self._recovery is not None
            limit_s = RECOVERY_POLL_S if is_recovering else self._table.own.agent.poll_s()
        for node, message in self._table.listen(limit_s):
            self._take(node, message)

    def _take(self, node: Node, message: NodeMessage) -> None:
        """Take in a message of a node. Exits of processes that were replaced are left out."""
        if isinstance(message, Exit):
            is_here = message.rank in self._table.ranks_of(node.number)
            if is_here and message.generation == self._generation_of[message.rank]:
                self._exits[message.rank] = message
        elif isinstance(message, Signalled):
            self._is_requested = True
        elif isinstance(message, Stopped):
            self._stopped.add(node.number)

    def _stop(self) -> None:
        """End all ranks on all nodes; block until they have ended, or their nodes are lost."""
        self._stopped = {0}
        for node in sorted(self._table.alive(), reverse=True):
            node.link.send(Stop())  # the own ranks last: that blocks
        limit_s = time.monotonic() + 2 * SHUTDOWN_S
        while time.monotonic() < limit_s and {
            node.number for node in self._table.alive()
        }.difference(self._stopped):
            self._listen(BEAT_S / 10)
        self._listen(0.0)

    def close(self, exit_code: int) -> None:
        """Send the end of the run to all agents, and wait until they have it."""
        self._table.close(exit_code)
