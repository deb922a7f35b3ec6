"""Who started this process, and where its peers are."""

from __future__ import annotations

import socket

import pytest

from meshwright.errors import MeshError
from meshwright_launch.environment import (
    Launcher,
    check_port,
    expand_hosts,
    launch_environment,
    port_of_job,
    read_place,
    torch_variables,
)
from tests.support.errors import has_code

SRUN = {
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_NTASKS": "8",
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_STEP_TASKS_PER_NODE": "4(x2)",
    "SLURM_JOB_NODELIST": "gpu[07-10]",
    "SLURM_STEP_NODELIST": "gpu[09-10]",
}


@pytest.mark.parametrize(
    ("env", "launcher"),
    [
        ({}, Launcher.NONE),
        ({"MASTER_PORT": "29500"}, Launcher.NONE),
        ({"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}, Launcher.TORCHRUN),
        (SRUN, Launcher.SLURM),
        ({**SRUN, "RANK": "0", "WORLD_SIZE": "2"}, Launcher.TORCHRUN),  # torchrun inside srun
        # a batch script
        ({name: value for name, value in SRUN.items() if "STEP" not in name}, Launcher.NONE),
        # srun --pty bash in a job of 8 tasks
        ({**SRUN, "SLURM_STEP_NUM_TASKS": "1"}, Launcher.NONE),
    ],
)
def test_who_started_this_process(env: dict[str, str], launcher: Launcher) -> None:
    assert launch_environment(env) is launcher


def test_half_an_environment_is_told() -> None:
    with pytest.raises(MeshError, match=r"RANK = '3' alone", check=has_code("MW-LAUNCH-025")):
        launch_environment({"RANK": "3"})
    with pytest.raises(MeshError, match="LOCAL_RANK = 'x'", check=has_code("MW-SYSTEM-008")):
        read_place({"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "x"})
    with pytest.raises(
        MeshError, match="RANK = 2 and WORLD_SIZE = 2", check=has_code("MW-LAUNCH-027")
    ):
        read_place({"RANK": "2", "WORLD_SIZE": "2"})


def test_srun_is_translated_for_torch() -> None:
    variables = torch_variables(SRUN)
    assert variables == {
        "RANK": "5",
        "WORLD_SIZE": "8",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "4",
        "MASTER_ADDR": "gpu09",
        "MESHWRIGHT_NODES": "gpu09,gpu10",
        "MASTER_PORT": str(port_of_job("4711", "0")),
    }
    assert read_place(variables) == (5, 8, 1, 4)
    uneven = {
        **SRUN,
        "SLURM_STEP_TASKS_PER_NODE": "4,3",
        "MASTER_ADDR": "head",
        "MASTER_PORT": "1234",
    }
    assert torch_variables(uneven)["LOCAL_WORLD_SIZE"] == "0"
    assert (torch_variables(uneven)["MASTER_ADDR"], torch_variables(uneven)["MASTER_PORT"]) == (
        "head",
        "1234",
    )
    with pytest.raises(MeshError, match="MASTER_ADDR", check=has_code("MW-LAUNCH-031")):
        torch_variables({"SLURM_PROCID": "0", "SLURM_STEP_ID": "0", "SLURM_NTASKS": "2"})


def test_neighbouring_jobs_and_steps_meet_elsewhere() -> None:
    ports = [port_of_job(str(job), str(step)) for job in range(1000, 1100) for step in range(4)]
    assert len(set(ports)) == len(ports) and min(ports) > 1024 and max(ports) < 32768


@pytest.mark.parametrize(
    ("nodelist", "hosts"),
    [
        ("n1", ["n1"]),
        ("n[1-3]", ["n1", "n2", "n3"]),
        ("n[001-003,099]-ib,login", ["n001-ib", "n002-ib", "n003-ib", "n099-ib", "login"]),
        ("r[1-2]c[08-09]", ["r1c08", "r1c09", "r2c08", "r2c09"]),
        ("a-b[9-11],c", ["a-b9", "a-b10", "a-b11", "c"]),
        ("", []),
    ],
)
def test_host_names_are_written_out(nodelist: str, hosts: list[str]) -> None:
    assert expand_hosts(nodelist) == hosts


@pytest.mark.parametrize("nodelist", ["n[a-b]", "n[0-9999999999]", "n[1-]", "n[]"])
def test_a_list_that_slurm_does_not_write_is_a_message(nodelist: str) -> None:
    with pytest.raises(MeshError, check=has_code("MW-LAUNCH-096")):
        expand_hosts(nodelist)
    with pytest.raises(MeshError, check=has_code("MW-LAUNCH-095")):
        port_of_job("abc", "0")


@pytest.mark.parametrize(
    ("nodelist", "code"),
    [
        ("n[1-99999]x[1-99999]", "MW-LAUNCH-098"),
        ("n[" + ",".join(["1-99999"] * 3000) + "]", "MW-LAUNCH-098"),
        (",".join(["n[1-99999]"] * 50), "MW-LAUNCH-098"),
        ("n[1-2]" * 40, "MW-LAUNCH-098"),
        ("n[1-[2-3]]", "MW-LAUNCH-097"),
        ("[" * 60_000, "MW-LAUNCH-097"),
        ("n[5-1]", "MW-LAUNCH-096"),
        (f"n[1-{'9' * 5000}]", "MW-LAUNCH-096"),
    ],
)
def test_a_list_of_too_many_nodes_is_refused_at_once(nodelist: str, code: str) -> None:
    with pytest.raises(MeshError, check=has_code(code)) as caught:
        expand_hosts(nodelist)
    assert len(str(caught.value)) < 300


def test_every_variable_of_srun_is_a_number() -> None:
    for name in ("SLURM_STEP_NUM_TASKS", "SLURM_RESTART_COUNT"):
        for text in ("9" * 5000, "many", "-1", "\u0663"):
            with pytest.raises(MeshError, match=name, check=has_code("MW-SYSTEM-008")):
                launch_environment({**SRUN, name: text})
    for name in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        with pytest.raises(MeshError, match=name, check=has_code("MW-SYSTEM-008")):
            read_place({"RANK": "0", "WORLD_SIZE": "1", name: "9" * 5000})
    assert (
        torch_variables({**SRUN, "SLURM_STEP_TASKS_PER_NODE": "9" * 5000})["LOCAL_WORLD_SIZE"]
        == "0"
    )


def test_a_taken_port_is_told() -> None:
    with socket.socket() as holder:
        holder.bind(("", 0))
        holder.listen()
        port = holder.getsockname()[1]
        with pytest.raises(
            MeshError, match=rf"port {port} \(MASTER_PORT\)", check=has_code("MW-LAUNCH-029")
        ):
            check_port(str(port))
    assert check_port(str(port)) == port
    for text in ("", "x", "0", "70000", "-1"):
        with pytest.raises(MeshError, match="is not a port", check=has_code("MW-LAUNCH-028")):
            check_port(text)
