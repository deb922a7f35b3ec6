"""Command ``meshwright kubernetes``: the JobSet of a run, as YAML for ``kubectl apply``.

    CONFIG, nodes, devices per node, image
      -> refused here: degrees that do not fill the nodes, names and values that Kubernetes does not
      take -> a JobSet with one indexed Job: one pod per node, each with one torchrun; pod 0 is the
      rendezvous
    a rank fails
      -> its pod ends with the rank's exit code (launch/meshwright_launch/pod.py)
      -> a failure that would recur fails Job and JobSet; after any other the JobSet restarts all
      pods

A JobSet (jobset.sigs.k8s.io) rather than a PyTorchJob: it needs no operator for torch, and it
restarts all pods together, as the ranks of a run must. A failed run resumes from its newest
checkpoint, on a volume that all pods share.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping
from typing import Any

import yaml

from meshwright.config import RunConfig, Train, load
from meshwright.errors import UserError
from meshwright.mesh import Grid
from meshwright.run.directory import check_not_moved
from meshwright.system.host import JOBSET
from meshwright.terminal.output import tell
from meshwright_launch.restarts import RECURRING_EXIT_CODES
from meshwright_launch.slurm import resolve_for_nodes
from meshwright_launch.slurm_values import check_lines

PORT = 29400
LABEL = r"[a-z0-9]([a-z0-9-]{0,40}[a-z0-9])?"
"""A name of Kubernetes, short enough for the names of the pods."""
RECURRING = {"containerName": "ranks", "operator": "In", "values": [*RECURRING_EXIT_CODES]}
"""Rule of the Job: exit codes of a pod with which it fails at once,
for the reason PodFailurePolicy.
"""
FAIL_TOO = {
    "name": "recurring",
    "action": "FailJobSet",
    "onJobFailureReasons": ["PodFailurePolicy"],
}
"""Rule of the JobSet: fail with such a Job. Without the rule it would restart that Job as well."""
PATTERNS = {
    "name": (
        rf"(?![0-9]){LABEL}",
        "up to 42 lower-case letters, digits and dashes, a letter first",
    ),
    "namespace": (LABEL, "lower-case letters, digits and dashes"),
    "claim": (LABEL, "the name of a PersistentVolumeClaim"),
    "image": (r"[A-Za-z0-9][A-Za-z0-9./:@_-]*", "an image such as registry/team/train:1.0"),
    "memory": (r"[0-9]+(Ki|Mi|Gi|Ti)", "a size such as 512Gi"),
    "mount": (r"/[A-Za-z0-9_./-]*", "an absolute path of letters, digits and ./_-"),
}
"""Option -> (pattern of its value, description of that pattern)."""


def kubernetes(options: argparse.Namespace, overrides: list[str]) -> int:
    """Print the JobSet of a run.

    Raises:
        UserError: the degrees do not fill the nodes, or a value is not valid in Kubernetes.
    """
    config, _ = resolve_for_nodes(
        load(options.config, overrides), options.nodes, options.devices_per_node
    )
    check_not_moved(config.run, options.config, overrides)
    print(render(config, overrides, options), end="")
    tell(
        "`meshwright kubernetes ... | kubectl apply -f -` starts it; the image needs meshwright and"
        " the run's files"
    )
    return 0


def render(config: RunConfig, overrides: list[str], options: argparse.Namespace) -> str:
    """Return the JobSet as YAML. ``config``: resolved; ``overrides``:
    configuration keys that `train` gets too.
    """
    name = options.name or _name_of(config.run.name)
    _check_values(vars(options) | {"name": name})
    check_lines(options.config, *overrides)
    job = {
        "parallelism": options.nodes,
        "completions": options.nodes,
        "completionMode": "Indexed",
        "backoffLimit": 0,
        "podFailurePolicy": {"rules": [{"action": "FailJob", "onExitCodes": RECURRING}]},
        "template": {"spec": _pod(name, config.train, overrides, options)},
    }
    metadata = {"name": name}
    if options.namespace:
        metadata["namespace"] = options.namespace
    jobset = {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": metadata,
        "spec": {
            "network": {"enableDNSHostnames": True, "subdomain": name},
            "failurePolicy": {"maxRestarts": options.max_restarts, "rules": [FAIL_TOO]},
            "replicatedJobs": [{"name": "nodes", "replicas": 1, "template": {"spec": job}}],
        },
    }
    grid = Grid.of(config.parallel.degrees)
    ranks = f"{grid} = {grid.size} ranks"
    text: str = yaml.safe_dump(jobset, sort_keys=False, width=120)
    return f"# {ranks} on {options.nodes} nodes\n{text}"


def _name_of(run_name: str) -> str:
    """Return the name of a run's JobSet."""
    return re.sub(r"[^a-z0-9]+", "-", f"run-{run_name}".lower())[:42].strip("-")


def _check_values(values: Mapping[str, Any]) -> None:
    """Raise :class:`UserError` for an option whose value is not valid in Kubernetes."""
    for key, (pattern, allowed) in PATTERNS.items():
        if values[key] is not None and not re.fullmatch(pattern, values[key]):
            raise UserError(
                "MW-LAUNCH-068",
                f"--{key} {values[key]!r} is not valid in Kubernetes: give {allowed}",
            )


def _pod(
    name: str, train: Train, overrides: list[str], options: argparse.Namespace
) -> dict[str, Any]:
    """Return the specification of the pod of a node."""
    resource = "cpu" if train.device == "cpu" else "nvidia.com/gpu"
    limits = {resource: options.devices_per_node}
    if options.memory:
        limits["memory"] = options.memory
    # NCCL's buffers between the ranks of a node
    volumes: list[dict[str, Any]] = [{"name": "shm", "emptyDir": {"medium": "Memory"}}]
    mounts = [{"name": "shm", "mountPath": "/dev/shm"}]
    container = {
        "name": "ranks",
        "image": options.image,
        "command": ["python3", "-P", "-m", "meshwright_launch.pod"],
        "args": [_literal(word) for word in _torchrun(name, options)] + _train(options, overrides),
        "env": [{"name": "PYTHONUNBUFFERED", "value": "1"}, {"name": JOBSET, "value": name}],
        "resources": {"limits": limits},
        "volumeMounts": mounts,
    }
    if options.claim is not None:
        volumes.append({"name": "shared", "persistentVolumeClaim": {"claimName": options.claim}})
        mounts.append({"name": "shared", "mountPath": options.mount})
        container["workingDir"] = options.mount
    return {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": 60,
        "containers": [container],
        "volumes": volumes,
    }


def _torchrun(name: str, options: argparse.Namespace) -> list[str]:
    """Return torchrun's arguments, which are equal on all pods: all but ``--node-rank``."""
    return [
        f"--nnodes={options.nodes}",
        f"--nproc-per-node={options.devices_per_node}",
        f"--master-addr={name}-nodes-0-0.{name}",
        f"--master-port={PORT}",
    ]


def _train(options: argparse.Namespace, overrides: list[str]) -> list[str]:
    """Return torchrun's node rank, in which Kubernetes expands the pod's index,
    and the ranks' command.
    """
    words = [options.config, *overrides, *["--trust-code"] * options.trust_code]
    return [
        "--node-rank=$(JOB_COMPLETION_INDEX)",
        "-m",
        "meshwright_launch",
        "train",
        *map(_literal, words),
    ]


def _literal(word: str) -> str:
    """Return a word in which Kubernetes expands no $(VARIABLE)."""
    return word.replace("$", "$$")
