"""Place of an agent: from Slurm's variables, or from those that other schedulers set."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from meshwright.config import RunConfig
from meshwright.errors import ConfigError, MeshError
from meshwright_launch.cli import main
from meshwright_launch.environment import Launcher
from meshwright_launch.node_place import NodePlace, check_agent, find_place
from tests.support.errors import has_code

BY_HAND = {
    "MESHWRIGHT_NNODES": "3",
    "MESHWRIGHT_NODE_RANK": "2",
    "MESHWRIGHT_NPROC_PER_NODE": "8",
    "MESHWRIGHT_SPARES": "1",
    "MASTER_ADDR": "n0",
    "MASTER_PORT": "29500",
}
SLURM = {
    "MESHWRIGHT_NPROC_PER_NODE": "4",
    "SLURM_PROCID": "1",
    "SLURM_NODEID": "1",
    "SLURM_STEP_ID": "0",
    "SLURM_JOB_ID": "10",
    "SLURM_NTASKS": "2",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NODELIST": "h[4-5]",
}


def test_by_hand_and_by_slurm() -> None:
    place = find_place(Launcher.NONE, BY_HAND)
    assert place == NodePlace(2, 3, 8, 1, "n0", 29_500) and place.num_ranks == 16
    place = find_place(Launcher.SLURM, SLURM)
    assert place is not None and place[:5] == (1, 2, 4, 0, "h4") and place.num_ranks == 8
    assert place.port > 1024


def test_other_launchers_start_ranks() -> None:
    assert find_place(Launcher.NONE, {}) is None
    assert find_place(Launcher.TORCHRUN, BY_HAND) is None
    without = {name: value for name, value in SLURM.items() if name[:4] != "MESH"}
    assert find_place(Launcher.SLURM, without) is None


def test_one_node_needs_no_address() -> None:
    """Nor listens for other agents."""
    assert find_place(Launcher.NONE, {"MESHWRIGHT_NPROC_PER_NODE": "2"}) == NodePlace(0, 1, 2)


@pytest.mark.parametrize("missing", ["MESHWRIGHT_NODE_RANK", "MASTER_ADDR", "MASTER_PORT"])
def test_what_is_missing_is_named(missing: str) -> None:
    env = {name: value for name, value in BY_HAND.items() if name != missing}
    with pytest.raises(MeshError, match=missing, check=has_code("MW-LAUNCH-117")):
        find_place(Launcher.NONE, env)


@pytest.mark.parametrize(
    ("name", "value"),
    [("MESHWRIGHT_NODE_RANK", "3"), ("MESHWRIGHT_SPARES", "3"), ("MASTER_PORT", "0")],
)
def test_numbers_out_of_range(name: str, value: str) -> None:
    with pytest.raises(MeshError, match=name, check=has_code("MW-SYSTEM-008")):
        find_place(Launcher.NONE, {**BY_HAND, name: value})


def test_an_agent_needs_a_mirror() -> None:
    place = find_place(Launcher.NONE, BY_HAND)
    keys = {"run": {"directory": "r"}, "data": {"builder": "nobody:asks"}}
    mirrored = RunConfig.model_validate(
        {**keys, "launch": {"max_restarts": 1}, "watch": {"mirror": True}}
    )
    check_agent(mirrored, place)
    check_agent(RunConfig.model_validate(keys), None)
    with pytest.raises(ConfigError, check=has_code("MW-LAUNCH-118")):
        check_agent(RunConfig.model_validate(keys), place)


def test_spares_need_agents(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The job script starts one task on each node, and the job outlives a node."""
    demo = str(Path(__file__).parents[2] / "configs" / "demo.toml")
    monkeypatch.chdir(tmp_path)
    words = ["slurm", demo, "--nodes=2", "--devices-per-node=4", "--spares=2"]
    mirror = ["--watch.mirror=true", "--launch.max_restarts=3"]
    assert main(words) == 2 and "MW-LAUNCH-123" in capsys.readouterr().err
    assert main([*words, *mirror, "--torchrun"]) == 2
    assert "--spares 2 and --torchrun" in capsys.readouterr().err
    assert main([*words, *mirror]) == 0
    script = capsys.readouterr().out
    assert "#SBATCH --nodes=2-4\n" in script and "#SBATCH --no-kill\n" in script
    assert "--ntasks-per-node=1\n" in script and "--no-kill --kill-on-bad-exit=0 --wait=0" in script
    assert "MESHWRIGHT_SPARES=$((SLURM_JOB_NUM_NODES - 2))" in script
    assert main([*words[:-1], "--force"]) == 0 and "no-kill" not in capsys.readouterr().out
    # without spare nodes the run goes on with fewer replicas
    assert main([*words[:-1], "--spares=0", *mirror, "--force"]) == 0
    script = capsys.readouterr().out
    assert "#SBATCH --nodes=2\n" in script and "#SBATCH --no-kill\n" in script
    assert "--no-kill --kill-on-bad-exit=0 --wait=0" in script


COMMANDS = {
    "srun": """#!/bin/bash
while [ "$1" != bash ]; do shift; done
SLURM_NODEID=0 bash -c "$3" _ bash -c "$FIRST" &
SLURM_NODEID=1 bash -c "$3" _ bash -c "$SECOND" &
wait %1; CODE=$?
wait %2 && exit "$CODE"
""",
    "scontrol": """#!/bin/sh
[ "$1" = requeue ] && echo "$SLURM_NODEID" >> requeued
[ "$1" = show ] && echo "$UP" | tr ' ' '\\n'
""",
    "squeue": "#!/bin/sh\necho nodes\n",
    "sleep": '#!/bin/sh\nexec /bin/sleep "0.$1"\n',
}
"""Commands that the job script calls. The last exit code is srun's; a second's sleep lasts a tenth."""
LOST = "exit 94"
ENDS = 'echo {} > "$MESHWRIGHT_EXIT_FILE"; exit {}'


def run_job(place: Path, first: str, second: str, up: str, *words: str) -> int:
    """Run the job's script, with two agents that end in these ways; return its exit code."""
    demo = str(Path(__file__).parents[2] / "configs" / "demo.toml")
    words = ("--nodes=2", "--devices-per-node=4", "--spares=1", *words)
    assert main(["slurm", demo, *words, "--watch.mirror=true", "--launch.max_restarts=3"]) == 0
    (place / "bin").mkdir(exist_ok=True)
    for name, text in COMMANDS.items():
        (place / "bin" / name).write_text(text)
        (place / "bin" / name).chmod(0o755)
    environment = {
        "PATH": f"{place / 'bin'}:/usr/bin:/bin",
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_NUM_NODES": "3",
        "SLURMD_NODENAME": "n0",
        "FIRST": first,
        "SECOND": second,
        "UP": up,
    }
    command = ["/bin/bash", "runs/demo/slurm/job.sbatch"]
    return subprocess.run(command, env=environment, capture_output=True, timeout=20).returncode


@pytest.mark.parametrize(
    ("first", "second", "code"),
    [
        ("kill -9 $$", LOST, 137),
        ("exit 1", LOST, 1),
        (f"/bin/sleep 1; {ENDS.format(0, 0)}", LOST, 0),
        (f"/bin/sleep 1; {ENDS.format(0, 0)}", "kill -9 $$", 0),
        (ENDS.format(85, 85), "exit 85", 85),
    ],
    ids=["first killed", "first failed", "cut off", "second killed", "on request"],
)
def test_a_job_ends_whichever_agent_does(
    first: str, second: str, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It does not wait for its time limit beside a healthy first node."""
    monkeypatch.chdir(tmp_path)
    assert run_job(tmp_path, first, second, "n0 n1", "--no-requeue") == code
    assert not (tmp_path / "requeued").exists()


def test_a_job_without_its_first_node_is_requeued(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By another node, once; such failures count like others."""
    monkeypatch.chdir(tmp_path)
    for start in range(1, 5):
        (tmp_path / "requeued").unlink(missing_ok=True)
        run_job(tmp_path, f"/bin/sleep 0.4; {ENDS.format(0, 0)}", LOST, "n1")
        assert (tmp_path / "requeued").read_text().split() == ["1"], start
    assert run_job(tmp_path, ENDS.format(0, 0), "exit 0", "n0 n1") == 93
