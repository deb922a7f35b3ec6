"""A real Slurm on the hosts: slurmctld in ctl, a slurmd on each host, munge between them."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.cluster.hosts import CONTROL, Hosts, call, until

NEEDS = ("slurmctld", "slurmd", "sbatch", "munged")
DEVICES = 8
"""CPUs that each node says it has."""

CONFIGURATION = """
ClusterName=meshwright
SlurmctldHost=ctl({control})
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
# a job that was requeued waits for cred_expire before it may start again
AuthInfo=socket={place}/run/munge.sock,cred_expire=5
SlurmctldPidFile={place}/run/slurmctld.pid
SlurmdPidFile={place}/run/slurmd.%n.pid
StateSaveLocation={place}/state
SlurmdSpoolDir={place}/spool/%n
SlurmctldLogFile={place}/log/slurmctld.log
SlurmdLogFile={place}/log/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin={task_plugin}
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
JobCompType=jobcomp/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/backfill
SchedulerParameters=batch_sched_delay=0,sched_min_interval=0,sched_interval=1,bf_interval=1
ReturnToService=2
SlurmdParameters=config_overrides
SlurmdTimeout={timeout_s}
MessageTimeout=10
KillWait=10
UnkillableStepTimeout=30
JobRequeue=1
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
NodeName=DEFAULT CPUs={devices} RealMemory=6000 State=UNKNOWN
{nodes}
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP PriorityTier=1 GraceTime=30
PartitionName=high Nodes=ALL MaxTime=INFINITE State=UP PriorityTier=10 PreemptMode=OFF
"""


def why_not() -> str | None:
    """Why there can be no Slurm here; None: there can."""
    missing = [program for program in NEEDS if shutil.which(program) is None]
    packages = "slurmctld slurmd slurm-client munge iproute2"
    return f"there is no {', '.join(missing)} here: apt-get install {packages}" if missing else None


class Slurm:
    """Within: it is up, and all nodes are idle. Commands run as a user's on ``ctl``,
    the login node.
    """

    def __init__(
        self,
        hosts: Hosts,
        *,
        timeout_s: int = 30,
        devices: int = DEVICES,
        task_plugin: str = "task/none",
    ) -> None:
        """``task_plugin``: with ``task/affinity`` tasks are bound to CPUs,
        and ``devices`` is at most the machine's.
        """
        self.hosts = hosts
        self._devices, self._task_plugin = devices, task_plugin
        self.place = hosts.root / "slurm"
        self._timeout_s = timeout_s
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> Slurm:
        for name in ("state", "log", "run", "spool"):
            (self.place / name).mkdir(parents=True, exist_ok=True)
        # munged wants its socket where all may look
        for directory in (self.place, self.place / "run"):
            directory.chmod(0o755)
        nodes = "\n".join(
            f"NodeName={name} NodeAddr={self.hosts.address(name)}" for name in self.hosts.names
        )
        self.configuration.write_text(
            CONFIGURATION.format(
                control=self.hosts.address(CONTROL),
                place=self.place,
                nodes=nodes,
                devices=self._devices,
                task_plugin=self._task_plugin,
                timeout_s=self._timeout_s,
            )
        )
        # looking for a plugin fails where /sys/fs/cgroup is not mounted; v1 needs nothing when it
        # is not used
        (self.place / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
        key = self.place / "munge.key"
        key.write_bytes(secrets.token_bytes(128))
        key.chmod(0o600)
        try:
            self._start_munge(key)
            self.start_controller(clean=True)
            for name in self.hosts.names:
                self.start_node(name)
            until(
                lambda: self.states() == dict.fromkeys(self.hosts.names, "idle"),
                "all nodes are idle",
            )
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        for daemon in self._daemons.values():
            self._kill_below(daemon, signal.SIGKILL)
            daemon.kill()
            daemon.wait()
        with contextlib.suppress(FileNotFoundError, ProcessLookupError, ValueError):
            os.kill(int((self.place / "run" / "munged.pid").read_text()), signal.SIGTERM)

    @property
    def configuration(self) -> Path:
        return self.place / "slurm.conf"

    @property
    def environment(self) -> dict[str, str]:
        return os.environ | {"SLURM_CONF": str(self.configuration)}

    def _start_munge(self, key: Path) -> None:
        files = {
            "key-file": key,
            "socket": self.place / "run" / "munge.sock",
            "pid-file": self.place / "run" / "munged.pid",
            "log-file": self.place / "log" / "munged.log",
            "seed-file": self.place / "munge.seed",
        }
        call("munged", "--force", *(f"--{name}={path}" for name, path in files.items()))

    def start_controller(self, *, clean: bool = False) -> None:
        """``clean``: without the jobs that it knew."""
        words = ["slurmctld", "-D", *(["-c"] if clean else [])]
        log = self.place / "log" / "ctl.out"
        self._daemons[CONTROL] = self.hosts.start(CONTROL, *words, log=log, env=self.environment)
        until(lambda: "is UP" in self.command("scontrol", "ping").stdout, "slurmctld answers")

    def stop_controller(self) -> None:
        """As when its machine is restarted."""
        daemon = self._daemons.pop(CONTROL)
        self._kill_below(daemon, signal.SIGTERM)
        daemon.wait(60)

    def start_node(self, name: str) -> None:
        """Its slurmd; again after a crash."""
        (self.place / "spool" / name).mkdir(parents=True, exist_ok=True)
        log = self.place / "log" / f"{name}.out"
        self._daemons[name] = self.hosts.start(
            name, "slurmd", "-D", "-N", name, log=log, env=self.environment
        )

    @staticmethod
    def _kill_below(daemon: subprocess.Popen[bytes], signum: int) -> None:
        """nsenter forks: the daemon is its child."""
        found = subprocess.run(
            ["pgrep", "-P", str(daemon.pid)], capture_output=True, text=True, check=False
        )
        for pid in found.stdout.split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signum)

    def command(self, *words: str, **options: Any) -> subprocess.CompletedProcess[str]:
        """Run on the login node."""
        return self.hosts.run(
            CONTROL, *words, env=self.environment | options.pop("env", {}), **options
        )

    def states(self) -> dict[str, str]:
        """Of the nodes, such as idle, allocated, down*."""
        told = self.command("sinfo", "-h", "-N", "-p", "main", "-o", "%N %T").stdout
        return dict(line.split() for line in told.splitlines() if len(line.split()) == 2)

    def submit(self, *words: str) -> str:
        """Return the number of a job."""
        done = self.command("sbatch", "--parsable", *words)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def job(self, number: str) -> dict[str, Any]:
        """Return what Slurm knows of a job."""
        told = self.command("scontrol", "show", "job", number, "-o").stdout
        return dict(word.split("=", 1) for word in told.split() if "=" in word)

    def state(self, number: str) -> str:
        """Such as PENDING, RUNNING, COMPLETED."""
        return str(self.job(number).get("JobState", "GONE"))

    def wait(self, number: str, states: Sequence[str], limit_s: float = 180.0) -> str:
        """Until a job is in one of these; which one."""
        until(
            lambda: self.state(number) in states,
            f"job {number} is {states}, {self.state(number)}",
            limit_s,
            0.1,
        )
        return self.state(number)
