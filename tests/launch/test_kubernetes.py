"""The JobSet: valid by its schema, the ranks of the plan,
and no value that becomes something else.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from meshwright_launch.cli import main

ROOT = Path(__file__).parents[2]
DEMO = str(ROOT / "configs" / "demo.toml")
SCHEMA = json.loads((Path(__file__).parent / "jobset.schema.json").read_text())
JOB = ["--nodes=2", "--devices-per-node=4", "--image=team/train:1.0"]


def rendered(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    assert main(["kubernetes", DEMO, *JOB, *words]) == 0
    found: dict[str, Any] = yaml.safe_load(capsys.readouterr().out)
    jsonschema.Draft202012Validator(SCHEMA).validate(found)
    return found


def pods_of(jobset: dict[str, Any]) -> dict[str, Any]:
    (job,) = jobset["spec"]["replicatedJobs"]
    spec: dict[str, Any] = job["template"]["spec"]
    assert spec["parallelism"] == spec["completions"] == 2 and spec["completionMode"] == "Indexed"
    pods: dict[str, Any] = spec["template"]["spec"]
    return pods


def test_one_torchrun_on_each_node_meets_at_pod_0(capsys: pytest.CaptureFixture[str]) -> None:
    jobset = rendered(
        capsys, "--claim=runs", "--memory=64Gi", "--namespace=ours", "--train.device=cuda"
    )
    (container,) = pods_of(jobset)["containers"]
    name, words = jobset["metadata"]["name"], container["args"]
    assert {"name": "MESHWRIGHT_JOBSET", "value": name} in container["env"]
    assert name == "run-demo" and jobset["metadata"]["namespace"] == "ours"
    assert jobset["spec"]["network"] == {"enableDNSHostnames": True, "subdomain": name}
    assert {"--nnodes=2", "--nproc-per-node=4", f"--master-addr={name}-nodes-0-0.{name}"} <= set(
        words
    )
    assert words[-5:] == ["-m", "meshwright_launch", "train", DEMO, "--train.device=cuda"]
    assert container["resources"]["limits"] == {"nvidia.com/gpu": 4, "memory": "64Gi"}
    assert (
        container["workingDir"] == "/work" and container["volumeMounts"][1]["mountPath"] == "/work"
    )


def test_a_failure_that_would_recur_fails_the_jobset_and_any_other_restarts_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    jobset = rendered(capsys, "--max-restarts=7")
    (job,) = jobset["spec"]["replicatedJobs"]
    (rule,) = job["template"]["spec"]["podFailurePolicy"]["rules"]
    assert rule["action"] == "FailJob"
    assert rule["onExitCodes"] == {"containerName": "ranks", "operator": "In", "values": [2, 17]}
    assert (
        pods_of(jobset)["containers"][0]["name"] == "ranks"
        and pods_of(jobset)["restartPolicy"] == "Never"
    )
    policy = jobset["spec"]["failurePolicy"]
    assert policy["maxRestarts"] == 7 and [each["action"] for each in policy["rules"]] == [
        "FailJobSet"
    ]
    assert policy["rules"][0]["onJobFailureReasons"] == ["PodFailurePolicy"]
    # any other exit code fails the Job, for another reason
    assert job["template"]["spec"]["backoffLimit"] == 0


def test_torchrun_takes_its_arguments(capsys: pytest.CaptureFixture[str]) -> None:
    from torch.distributed.run import get_args_parser

    words = pods_of(rendered(capsys))["containers"][0]["args"]
    options = get_args_parser().parse_args(
        [word.replace("$(JOB_COMPLETION_INDEX)", "1") for word in words]
    )
    assert (
        options.node_rank == 1 and options.module and options.training_script == "meshwright_launch"
    )
    assert options.training_script_args == ["train", DEMO]


def test_without_gpus_there_are_cpus(capsys: pytest.CaptureFixture[str]) -> None:
    (container,) = pods_of(rendered(capsys, "--train.device=cpu"))["containers"]
    assert container["resources"]["limits"] == {"cpu": 4} and "workingDir" not in container


def expand(word: str) -> str:
    """Kubernetes' expansion of arguments, without any variable that is set."""
    return re.sub(r"\$\$|\$\((\w+)\)", lambda found: "$" if found[0] == "$$" else "EXPANDED", word)


@pytest.mark.parametrize(
    "value",
    ["$(PATH)", "$$(PATH)", "a: b'\"# {{ 1 }}", "- x", "*a", "!!python/object:os.system", "é"],
)
def test_every_value_arrives_as_it_is(value: str, capsys: pytest.CaptureFixture[str]) -> None:
    (container,) = pods_of(rendered(capsys, f"--run.directory={value}"))["containers"]
    assert expand(container["args"][-1]) == f"--run.directory={value}"


@pytest.mark.parametrize(
    "word",
    [
        *(
            "--name=a b",
            "--name=9a",
            "--name=" + "a" * 43,
            "--namespace=A",
            "--claim=a/b",
            "--image=a b",
            "--image=-x",
        ),
        *("--memory=lots", "--mount=work", "--mount=/a b", "--run.directory=a\nb"),
    ],
)
def test_a_value_that_is_none_of_kubernetes_is_refused(
    word: str, capsys: pytest.CaptureFixture[str]
) -> None:
    value = word.partition("=")[2]
    assert main(["kubernetes", DEMO, *JOB, word]) == 2
    told = capsys.readouterr()
    assert not told.out and "MW-LAUNCH-" in told.err and "Traceback" not in told.err
    assert word.startswith("--run.") or f"{value!r} is not valid in Kubernetes: give " in told.err


def test_degrees_that_do_not_fill_the_nodes_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["kubernetes", DEMO, *JOB, "--nodes=3", "--parallel.dp=2"]) == 2
    assert "3 nodes x 4 devices = 12 ranks" in capsys.readouterr().err
