"""Sink for wandb, which runs in a separate process.

The run never imports wandb. Its exit hooks, uploads and network access are in a child process
(``wandb_child.py``) that receives the records through a pipe and can be killed. A dead network or a
stuck service blocks one thread of this process, and does not delay its exit. wandb logs every run
to disk first. ``wandb sync <run directory>/wandb/<run>`` uploads data that was not sent in time.

    this process, the sink's thread                          the child
    hello: id, project, mode, directory, config   ------->   wandb.init, within a time limit
                                      "ready"     <-------   (or the error: it is started again, offline)
    row and metrics, a JSON line each             ------->   run.log
    finish                                        ------->   run.finish; the pipe's end without it marks the run failed
"""

from __future__ import annotations

import configparser
import contextlib
import json
import netrc
import os
import secrets
import socket
import string
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from enum import StrEnum
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from meshwright.config import RunConfig
from meshwright.errors import UserError
from meshwright.system.atomic import write_atomic
from meshwright.system.bounded import MIB, read_text, why_unusable
from meshwright.system.secret_text import without_user
from meshwright.terminal.output import Warn
from meshwright.tracking.jsonl import num_repeated
from meshwright.tracking.names import MAX_ID_BYTES, display_name, project_name
from meshwright.tracking.record import StepRecord, metrics
from meshwright.tracking.tracker import never_raising, warn_on_stderr

CHILD = Path(__file__).with_name("wandb_child.py")
PUBLIC_SERVER = "https://api.wandb.ai"
CONNECT_LIMIT_S = 2.0
OFFLINE_LIMIT_S = 60.0
"""Time limit of an offline start in seconds; generous, for slow disks."""


class WandbMode(StrEnum):
    """Mode of wandb from the configuration; auto is resolved to one of the others."""

    AUTO = "auto"
    ONLINE = "online"
    OFFLINE = "offline"
    OFF = "off"


def choose_mode(wanted: WandbMode, environment: Mapping[str, str]) -> tuple[WandbMode, str | None]:
    """Return the mode to use, and the reason if it is offline without having been requested.

    auto: online with a key and a server that answers within two seconds, otherwise offline;
    ``WANDB_MODE`` may request offline or disabled. online: offline only without a key. It never
    prompts on the terminal.
    """
    if wanted in (WandbMode.OFF, WandbMode.OFFLINE):
        return wanted, None
    requested = environment.get("WANDB_MODE", "").lower()
    if wanted is WandbMode.AUTO and requested in ("disabled", "offline", "dryrun"):
        return (WandbMode.OFF if requested == "disabled" else WandbMode.OFFLINE), None
    server = base_url(environment)
    if not has_key(server, environment):
        return (
            WandbMode.OFFLINE,
            f"no key for {server}: log in with `wandb login` or set WANDB_API_KEY",
        )
    if wanted is WandbMode.AUTO and not is_reachable(server):
        return WandbMode.OFFLINE, f"{server} did not answer within {CONNECT_LIMIT_S:g} s"
    return WandbMode.ONLINE, None


def base_url(environment: Mapping[str, str]) -> str:
    """Return the server: ``WANDB_BASE_URL``, else the one saved by `wandb login --host`,
    else the public one.

    Without the user name and password of the URL: wandb does not log in with them, and writes the
    URL to its log.
    """
    if url := environment.get("WANDB_BASE_URL"):
        return without_user(url).rstrip("/")
    saved = configparser.ConfigParser()
    directory = Path(environment.get("WANDB_CONFIG_DIR") or Path("~/.config/wandb").expanduser())
    with contextlib.suppress(configparser.Error, OSError, UnicodeDecodeError):
        saved.read_string(read_text(directory / "settings", MIB))
    return without_user(saved.get("default", "base_url", fallback=PUBLIC_SERVER)).rstrip("/")


def has_key(server: str, environment: Mapping[str, str]) -> bool:
    """Return True if wandb will find a key: ``WANDB_API_KEY``, or an entry in netrc.
    Only its presence is checked.
    """
    if environment.get("WANDB_API_KEY"):
        return True
    path = environment.get("NETRC")
    if path:
        places = [Path(path)]
    else:
        places = [Path("~/.netrc").expanduser(), Path("~/_netrc").expanduser()]
    for place in places:
        with contextlib.suppress(OSError, netrc.NetrcParseError, UnicodeDecodeError):
            if (
                why_unusable(place, MIB) is None
                and urlsplit(server).hostname in netrc.netrc(str(place)).hosts
            ):
                return True
    return False


def is_reachable(server: str, limit_s: float = CONNECT_LIMIT_S) -> bool:
    """Return True if the server, or the proxy before it, accepts a connection.
    A thread bounds the DNS look-up.
    """
    url = urlsplit(server)
    scheme = url.scheme or "https"
    proxy = urllib.request.getproxies().get(scheme)
    if proxy and not urllib.request.proxy_bypass(url.hostname or ""):
        url = urlsplit(proxy if "//" in proxy else "//" + proxy)
    answered = threading.Event()

    def connect() -> None:
        address = (url.hostname or "", url.port or (80 if scheme == "http" else 443))
        with contextlib.suppress(OSError), socket.create_connection(address, timeout=limit_s):
            answered.set()

    thread = threading.Thread(target=connect, name="wandb reachable", daemon=True)
    thread.start()
    thread.join(limit_s)
    return answered.is_set()


def run_id(run_directory: Path) -> str:
    """Return the id in ``<run directory>/wandb_run_id``; created by the first call."""
    path = run_directory / "wandb_run_id"
    with contextlib.suppress(FileNotFoundError):
        if stored := read_text(path, MAX_ID_BYTES).strip():
            return stored
    new = "".join(secrets.choice(string.ascii_lowercase + string.digits) for _ in range(8))
    run_directory.mkdir(parents=True, exist_ok=True)
    write_atomic(path, new + "\n", is_durable=False)
    return new


class WandbSink:
    """Sink that logs each record as a row. A resumed run continues under the same id, which is
    stored with the run. A row's number is the step, plus the records of repeated steps before:
    unique, also over a run's offline files. ``config`` is uploaded as a whole. No environment
    variable, command line, host name or code is uploaded. ``init_limit_s`` bounds an online start,
    after which it starts offline. ``finish_limit_s`` bounds the end.
    """

    def __init__(
        self,
        run_directory: Path,
        config: RunConfig,
        *,
        init_limit_s: float = 30.0,
        finish_limit_s: float = 10.0,
        warn: Warn = warn_on_stderr,
    ) -> None:
        self.run_directory = run_directory
        self.config = config
        self.mode = WandbMode(config.tracking.wandb)
        self.init_limit_s = init_limit_s
        self.finish_limit_s = finish_limit_s
        self._warn = never_raising(warn)
        self._child: subprocess.Popen[bytes] | None = None
        self._repeated: int | None = None

    @property
    def _upload_later(self) -> str:
        return f"; `wandb sync {self.run_directory / 'wandb'}/offline-run-*` uploads it later"

    def open(self) -> None:
        """Start the child and wait until wandb is ready.
        Raises UserError if an offline start fails too.
        """
        self.mode, why = choose_mode(self.mode, os.environ)
        if why:
            self._warn(f"wandb writes offline ({why}){self._upload_later}")
        if self.mode is WandbMode.OFF:
            return
        if find_spec("wandb") is None:
            raise UserError(
                "MW-TRACKING-008",
                'wandb is not installed: pip install wandb, or set tracking.wandb = "off"',
            )
        failure = self._start(self.mode)
        if failure and self.mode is WandbMode.ONLINE:
            self._warn(f"wandb writes offline ({failure}){self._upload_later}")
            self.mode = WandbMode.OFFLINE
            failure = self._start(self.mode)
        if failure:
            raise UserError(
                "MW-TRACKING-006",
                f'wandb did not start ({failure}). tracking.wandb = "off" leaves it out.',
            )

    def write(self, record: StepRecord) -> None:
        """Send the record to the child; blocks while the pipe is full.
        Raises UserError if the child has died.
        """
        if self._child is None:
            return
        try:
            # `open` may run before that of metrics.jsonl, which moves records
            if self._repeated is None:
                self._repeated = num_repeated(self.run_directory)
            self._send(
                {
                    "row": record.step + self._repeated,
                    "metrics": {"step": record.step} | metrics(record),
                }
            )
        except BrokenPipeError as error:
            raise UserError(
                "MW-TRACKING-007",
                f"wandb's process ended before step {record.step}; see {self.run_directory}/wandb",
            ) from error

    def close(self, failed: bool = False) -> None:
        """Finish wandb and end the child, with a kill after ``finish_limit_s``.
        ``wandb sync`` can upload the rest.
        """
        child = self._child
        if child is None:
            return
        with _killed_after(child, self.finish_limit_s) as is_late:
            with contextlib.suppress(BrokenPipeError):
                self._send({"finish": {"failed": failed}})
            child.wait()
        self._stop()
        if is_late():
            message = (
                f"wandb did not finish within {self.finish_limit_s:g} s; send the rest with `wandb"
                " sync`"
            )
            self._warn(f"{message} {self.run_directory / 'wandb'}/*run-*")

    def _start(self, mode: WandbMode) -> str | None:
        """Start a child in this mode. Return the error, or None when it is ready."""
        self.run_directory.mkdir(parents=True, exist_ok=True)
        limit_s = self.init_limit_s if mode is WandbMode.ONLINE else OFFLINE_LIMIT_S
        tracking = self.config.tracking
        # an empty entity, group, list of tags or notes: the child takes WANDB_ENTITY,
        # WANDB_RUN_GROUP, ...
        hello = {
            "id": run_id(self.run_directory),
            "project": project_name(self.config.tracking, "WANDB_PROJECT", os.environ),
            "entity": tracking.entity,
            "group": tracking.group,
            "tags": tracking.tags,
            "notes": tracking.notes,
            "name": display_name(self.config.run, "WANDB_NAME", os.environ),
            "mode": str(mode),
            "directory": str(self.run_directory.resolve()),
            "config": self.config.model_dump(mode="json"),
            "init_limit_s": limit_s,
            "finish_limit_s": self.finish_limit_s,
        }
        # -P: the child's directory stays out of its import path, where this file would hide the
        # real wandb.
        child = self._child = subprocess.Popen(
            [sys.executable, "-P", str(CHILD)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            # wandb would take its server from a file wandb/settings of the working directory
            cwd="/",
            env=_child_environment(self.run_directory),
            start_new_session=True,  # Ctrl-C must reach the run only; the child ends with the pipe
        )
        assert child.stdout is not None
        with _killed_after(child, limit_s) as is_late:
            with contextlib.suppress(BrokenPipeError):
                self._send(hello)
            answer = child.stdout.readline().decode(errors="replace").strip()
        if answer == "ready" and not is_late():
            return None
        self._stop()
        return f"no answer within {limit_s:g} s" if is_late() else answer or "its process ended"

    def _send(self, message: Mapping[str, Any]) -> None:
        """Send a message to the child. Blocks while the pipe is full.
        Raises BrokenPipeError if the child has died.
        """
        assert self._child is not None and self._child.stdin is not None
        self._child.stdin.write(json.dumps(message, default=str).encode() + b"\n")
        self._child.stdin.flush()

    def _stop(self) -> None:
        """Kill and reap the child if it is still alive. wandb's service ends with it."""
        child, self._child = self._child, None
        if child is None:
            return
        child.kill()
        child.wait()
        for pipe in (child.stdin, child.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()


@contextlib.contextmanager
def _killed_after(child: subprocess.Popen[bytes], limit_s: float) -> Iterator[Callable[[], bool]]:
    """Kill the child after ``limit_s``, which unblocks any pipe or wait inside this context.

    Yields a function that returns True if the kill was needed.
    """
    late = threading.Event()

    def kill() -> None:
        late.set()
        child.kill()

    timer = threading.Timer(limit_s, kill)
    timer.daemon = True
    timer.start()
    try:
        yield late.is_set
    finally:
        timer.cancel()


def _child_environment(run_directory: Path) -> dict[str, str]:
    """Return the child's environment, with key and proxies, without another process's service.
    It is stored nowhere.
    """
    environment = {name: value for name, value in os.environ.items() if name != "WANDB_SERVICE"}
    environment.setdefault("WANDB_CACHE_DIR", str((run_directory / "wandb" / "cache").resolve()))
    environment.setdefault("WANDB_ERROR_REPORTING", "false")
    environment["WANDB_BASE_URL"] = base_url(environment)
    return environment
