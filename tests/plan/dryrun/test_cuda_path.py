"""Ranks take real steps on fake tensors of a CUDA device that does nothing: no GPU,
the code of a GPU run.

What is checked: where the host waits, devices of collectives, and the order of accesses across
streams.
"""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from meshwright.config import RunConfig, resolve
from meshwright.mesh.grid import Grid
from tests.interop.huggingface.architectures import directory
from tests.plan.dryrun.cuda_documents import LENGTH
from tests.plan.dryrun.jobs import configured
from tests.support.cuda.call_site import HIDDEN
from tests.support.cuda.library import compile_library, find_compiler
from tests.support.cuda.process import CudaStep, run_child, run_process
from tests.support.marks import long_row

pytestmark = [
    pytest.mark.skipif(find_compiler() is None, reason="no C++ compiler"),
    pytest.mark.skipif(
        torch.version.cuda is not None, reason="torch is built with CUDA: it has hooks of its own"
    ),
]

WAITS = 1
"""Of the host before the optimizer's launch: it reads the step's sums, to clip by them."""
WAITS_OF = {"dp2 zero3 offload": 3}
"""ZeRO-3 with offload also waits for the gradients of each micro-batch in host memory."""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compile_library(tmp_path_factory.mktemp("library"))


def on_cuda(config: RunConfig) -> RunConfig:
    return config.replace(train={"device": "cuda", "dtype": "bfloat16"})


LAYOUTS: dict[str, dict[str, Any]] = {
    "pp2 dp2 tp2 sequence": {
        "pp": 2,
        "dp": 2,
        "tp": 2,
        "sequence": True,
        "model": "llama",
        "num_layers": 4,
    },
    "pp2 zb_v dp2 zero2": {"schedule": "zb_v", "pp": 2, "dp": 2, "zero": 2, "num_layers": 4},
    "dp2 tp2 zero3": {"dp": 2, "tp": 2, "zero": 3, "model": "llama", "num_layers": 2},
    "one": {},
    "dp2 zero0": {"dp": 2, "zero": 0},
    "dp2 zero1 offload": {"dp": 2, "offload": True},
    "pp4 gpipe": {"schedule": "gpipe", "pp": 4, "num_layers": 4},
    "pp2 interleaved": {"schedule": "interleaved_1f1b", "pp": 2, "num_layers": 4},
    "pp2 zb_h1 tp2": {"schedule": "zb_h1", "pp": 2, "tp": 2, "num_layers": 2},
    "dp2 zero3 offload": {"dp": 2, "zero": 3, "offload": True, "num_layers": 2},
    "pp2 activations": {"pp": 2, "chunks": 4, "num_layers": 6, "away": ["*"]},
    "dp2 tp2 zero3 activations": {
        "dp": 2,
        "tp": 2,
        "zero": 3,
        "model": "llama",
        "num_layers": 2,
        "away": ["*"],
    },
    "dp4 zero2": {"dp": 4, "zero": 2},
    "tp2": {"tp": 2, "model": "llama"},
    "dp2 tp2 muon": {"dp": 2, "tp": 2, "model": "llama", "optimizer": "muon"},
    "dp2 tp2 adafactor": {"dp": 2, "tp": 2, "model": "llama", "optimizer": "adafactor"},
    "pp2 dp2 zero3 muon": {"pp": 2, "dp": 2, "zero": 3, "num_layers": 2, "optimizer": "muon"},
}


@pytest.mark.parametrize(
    "names",
    [
        long_row(["pp2 zb_v dp2 zero2"]),
        pytest.param(
            [name for name in LAYOUTS if "zb_v" not in name], marks=pytest.mark.all_layouts
        ),
    ],
    ids=["some", "others"],
)
def test_layouts(names: list[str], library: Path) -> None:
    """No tensor of a collective in host memory, gradients reduced by autograd's thread,
    few waits of the host.
    """
    jobs, allowed = [], []
    for name in names:
        config = on_cuda(configured(**LAYOUTS[name]))
        ranks = sorted({0, Grid.of(config.parallel.degrees).size - 1})
        jobs += [(config, rank) for rank in ranks]
        allowed += [WAITS_OF.get(name, WAITS)] * len(ranks)
    for (config, _), step, waits in zip(jobs, run_process(library, jobs), allowed, strict=True):
        grid = Grid.of(config.parallel.degrees)
        assert not step.problems
        assert (step.num_collectives > 0) == (grid.size > 1)
        assert (step.num_from_autograd > 0) == (grid.dp * grid.tp > 1)
        assert sum(step.waits.values()) == waits, step
        assert not step.waits_after or config.parallel.offload, step


EXPERTS: dict[str, dict[str, Any]] = {
    "zero1": {"dp": 2, "ep": 2},
    "zero2": {"dp": 2, "ep": 2, "zero": 2},
    "tp2": {"tp": 2, "ep": 2},
    "offload": {"dp": 2, "ep": 2, "offload": True},
    "zero3": {"dp": 2, "ep": 2, "zero": 3},
    "zero3 offload": {"dp": 2, "ep": 2, "zero": 3, "offload": True},
    "zero3 offload, two replicas of experts": {"dp": 4, "ep": 2, "zero": 3, "offload": True},
}


@pytest.mark.long
def test_experts(library: Path) -> None:
    """No further wait of the host, except with ZeRO-3 and offload for the gradients
    of each micro-batch.
    """
    jobs = [
        (
            on_cuda(configured(model="llama", num_layers=2, **layout)).replace(
                model={"options": options}
            ),
            1,
        )
        for layout in EXPERTS.values()
        for options in [
            configured(model="llama", num_layers=2).model.options
            | {"moe": {"num_experts": 4, "top_k": 2}}
        ]
    ]
    for name, step in zip(EXPERTS, run_process(library, jobs), strict=True):
        assert not step.problems and step.num_collectives > 0, (name, step)
        assert sum(step.waits.values()) == (3 if "zero3 offload" in name else WAITS), (name, step)


@pytest.mark.long
def test_a_frozen_base_under_zero3(library: Path) -> None:
    """FSDP gathers a frozen unit that backward does not reach,
    and waits for it by torch.accelerator at the end.
    """
    names, jobs = ("dp2 tp2 zero3", "dp2 zero3 offload"), []
    for name in names:
        adapter = {
            "rank": 3,
            "targets": ["block*.attention.*", "block*.mlp.*"],
            "dora": "offload" in name,
        }
        jobs.append((on_cuda(configured(**LAYOUTS[name])).replace(adapter=adapter), 1))
    for name, step in zip(names, run_process(library, jobs), strict=True):
        assert not step.problems and step.num_from_autograd > 0
        assert sum(step.waits.values()) == WAITS_OF.get(name, WAITS), step


def documents(masks: bool, window: int | None) -> tuple[RunConfig, int]:
    builder = {
        "builder": "tests.plan.dryrun.cuda_documents:build",
        "options": {"masks": masks, "window": window},
    }
    config = RunConfig.model_validate(
        {
            "model": builder,
            "data": {
                "train": "corpus",
                "sequence_length": LENGTH,
                "document_boundaries": window is None,
            },
            "batch": {"micro_batch_size": 1, "chunks": 2},
            "parallel": {"dp": 2},
        }
    )
    return on_cuda(resolve(config, 2)), 0


def sharing_tokens(builder: str, options: dict[str, Any], exchange: str) -> tuple[RunConfig, int]:
    config = RunConfig.model_validate(
        {
            "model": {"builder": builder, "options": options},
            "data": {"train": "corpus", "sequence_length": 64, "document_boundaries": True},
            "batch": {"micro_batch_size": 1, "chunks": 2},
            "parallel": {"cp": 2, "cp_exchange": exchange},
        }
    )
    return on_cuda(resolve(config, 2)), 1


@pytest.mark.torture
@pytest.mark.parametrize("exchange", ["keys", "heads"])
def test_context_parallelism(exchange: str, library: Path, tmp_path: Path) -> None:
    """Exchanges are in stream order with what makes and uses them; the host waits for places alone,
    once on a GPU.
    """
    llama = {
        "vocab_size": 67,
        "hidden_size": 32,
        "num_layers": 2,
        "num_heads": 4,
        "num_kv_heads": 4,
        "ffn_size": 64,
    }
    ours = sharing_tokens(
        "meshwright_models.llama:build", {**llama, "max_sequence_length": 64}, exchange
    )
    theirs = sharing_tokens(f"hf:{directory('qwen2', tmp_path)}", {}, exchange)
    for step in run_process(library, [ours, theirs]):
        assert not step.problems and step.num_collectives > 0 and step.num_from_autograd > 0, step
        assert all(
            where.startswith(("context_parallel/cut.py", "step.py")) for where in step.waits
        ), step


@pytest.mark.long
def test_documents_and_windows_make_no_mask_of_all_pairs(library: Path) -> None:
    """By the tiles of FlexAttention, built without a wait of the host."""
    for step in run_process(library, [documents(False, None), documents(False, 100)]):
        assert not step.problems and sum(step.waits.values()) == WAITS, step


@pytest.mark.long
def test_masks_of_documents_are_large(library: Path) -> None:
    """So that the test above can fail."""
    with pytest.raises(RuntimeError, match=r"attention makes a tensor of [\d,]+ elements"):
        run_process(library, [documents(True, None)])


def kernels(dropouts: int) -> tuple[RunConfig, int]:
    config = RunConfig.model_validate(
        {
            "model": {
                "builder": "tests.plan.dryrun.cuda_kernels:build",
                "options": {"dropouts": dropouts},
            },
            "data": {"train": "in memory", "sequence_length": 16},
            "batch": {"micro_batch_size": 2, "chunks": 2},
            "optimizer": {"name": "adamw8bit", "block_size": 8},
        }
    )
    return on_cuda(resolve(config, 1)), 0


@pytest.mark.long
def test_kernels_are_taken(library: Path) -> None:
    """In each block one per dropout; one per 8-bit parameter."""
    (step,) = run_process(library, [kernels(3)])
    assert not step.problems and sum(step.waits.values()) == WAITS, step


@pytest.mark.long
def test_kernels_that_are_not_taken(library: Path) -> None:
    """So that the test above can fail."""
    with pytest.raises(RuntimeError, match=r"meshwright::dropout ran 3 times, not 4"):
        run_process(library, [kernels(4)])


def faulty(fault: str) -> tuple[RunConfig, int]:
    config = RunConfig.model_validate(
        {
            "model": {
                "builder": "tests.plan.dryrun.cuda_faults:build",
                "options": {"fault": fault},
            },
            "data": {"train": "in memory", "sequence_length": 4},
            "batch": {"micro_batch_size": 2, "chunks": 2},
            "parallel": {"dp": 2},
        }
    )
    return on_cuda(resolve(config, 2)), 0


@pytest.mark.long
def test_faults_of_a_layer_are_named(library: Path) -> None:
    """Once per micro-batch, by file and line."""
    faults = ["item", "branch", "copy", "none", "host collective"]
    steps = dict(zip(faults, run_process(library, list(map(faulty, faults))), strict=True))
    for fault, step in steps.items():
        found = {where: count for where, count in step.waits.items() if "cuda_faults" in where}
        assert sorted(found.values()) == ([2] if fault in ("item", "branch", "copy") else []), (
            fault,
            found,
        )
        assert len(step.off_device) == (2 if fault == "host collective" else 0)
    for problem in steps["host collective"].off_device:
        assert re.fullmatch(r"all_reduce of 4 bytes at cuda_faults.py:\d+", problem)


@pytest.mark.long
def test_a_layer_that_fails_on_cuda_alone(library: Path) -> None:
    with pytest.raises(
        RuntimeError,
        match=r"(?s)the step of rank 0 fails on fake CUDA tensors: .*cuda_faults.py.* devices",
    ):
        run_process(library, [faulty("wrong device")])


SEEDED: dict[str, dict[str, Any]] = {
    "nothing": {
        "pp": 2,
        "dp": 2,
        "tp": 2,
        "sequence": True,
        "zero": 2,
        "model": "llama",
        "num_layers": 2,
    },
    "gradients, ZeRO-1": {"dp": 2, "zero": 1},
    "messages": {"pp": 2, "num_layers": 2},
    "receives that are posted ahead": {"pp": 2, "chunks": 4, "num_layers": 2},
    "keys of a group of heads": {"cp": 2, "model": "llama", "num_layers": 2},
    "offload: copy before the sum": {"dp": 2, "offload": True},
    "gathered weights, ZeRO-3": {"dp": 2, "zero": 3, "model": "llama"},
    "gradients, ZeRO-0": {"dp": 2, "zero": 0},
    "gradients, ZeRO-2": {"dp": 2, "zero": 2},
    "gradients across shard groups": {"dp": 4, "zero": 1, "shard_factor": 2},
    "gradients over tp": {"tp": 2, "sequence": True, "model": "llama", "num_layers": 2},
    "gradients of tied weights": {"pp": 2, "num_layers": 2},
    "all reductions": {"dp": 2},
    "step's sums": {"dp": 2},
    "weights": {"dp": 2},
    "unsharded weights, ZeRO-3": {"dp": 2, "zero": 3, "model": "llama"},
    "gradients, ZeRO-3": {"dp": 2, "zero": 3, "model": "llama"},
    "offload: copy before backward": {"dp": 2, "offload": True},
    "offload: update before the copy": {"dp": 2, "offload": True},
    "offload, ZeRO-3: sum before the copy": {"dp": 2, "zero": 3, "offload": True, "num_layers": 2},
    "activations: copy before they are computed": {"num_layers": 3, "away": ["*"]},
    "activations: use before they are back": {"num_layers": 3, "away": ["*"]},
    "activations: return before the copy": {"num_layers": 3, "away": ["*"]},
    "regions": {"tp": 2, "model": "llama"},
    "column: gradient of the input": {"tp": 2, "model": "llama"},
    "column: gathered input": {"tp": 2, "sequence": True, "model": "llama"},
    "column: gradient of a part of the sequence": {"tp": 2, "sequence": True, "model": "llama"},
    "gradients of keys of a group of heads": {"cp": 2, "model": "llama", "num_layers": 2},
    "heads of all tokens": {"cp": 2, "cp_exchange": "heads", "model": "llama", "num_layers": 2},
}
"""Wait that is left out (tests/plan/dryrun/cuda_broken.py) -> a layout that needs it."""
NAMED = {
    "gradients, ZeRO-1": (
        r"_foreach_norm at optimizer/flat.py:\d+, .* does not wait for reduce_scatter at"
        r" mesh/comm.py"
    ),
    "receives that are posted ahead": (
        r"does not wait for receive at mesh/comm.py:\d+, on the stream of ranks 0, 1"
    ),
    "messages": r"does not wait for receive at mesh/comm.py:\d+, on the stream of ranks 0, 1",
    "offload: copy before the sum": (
        r"copy_ at optimizer/offload.py:\d+, on the stream made at .* reduce_scatter"
    ),
    "gathered weights, ZeRO-3": r"does not wait for all_gather at mesh/comm.py",
    "offload: update before the copy": (
        r"at optimizer/flat.py:\d+, on the host, does not wait for copy_ at"
    ),
    "offload, ZeRO-3: sum before the copy": (
        r"at data_parallel/fsdp_parameter.py:\d+, on the host, does not wait for"
    ),
    "activations: copy before they are computed": (
        r"copy_ at pipeline/offload_copies.py:\d+, on the stream made at"
    ),
    "activations: use before they are back": (
        r"on the compute stream, does not wait for copy_ at pipeline/off"
    ),
    "activations: return before the copy": (
        r"copy_ at pipeline/offload_copies.*does not wait for copy_ at pipeline"
    ),
    "column: gradient of the input": r"does not wait for all_reduce at mesh/comm.py",
    "column: gathered input": r"does not wait for all_gather at mesh/comm.py",
    "column: gradient of a part of the sequence": (
        r"does not wait for reduce_scatter at mesh/comm.py"
    ),
    "keys of a group of heads": (
        r"does not wait for all_gather at mesh/comm.py:\d+, on the stream of ranks 0, 1"
    ),
    "gradients of keys of a group of heads": r"does not wait for reduce_scatter at mesh/comm.py",
    "heads of all tokens": r"does not wait for all_?to_?all\w* at mesh/comm.py",
    "step's sums": (
        r"a value that the host reads at step.py:\d+, on the host, does not wait for all_reduce"
    ),
}


def test_files_that_are_no_place_exist() -> None:
    """A recorder that moves would be the place of every wait."""
    assert all(Path(each).exists() for each in HIDDEN if each != "<")


@pytest.mark.parametrize(
    "names",
    [long_row(list(SEEDED)[:5]), pytest.param(list(SEEDED)[5:], marks=pytest.mark.torture)],
    ids=["some", "others"],
)
def test_a_wait_that_is_left_out_is_a_race(names: list[str], library: Path) -> None:
    """Each one alone, in a process of its own; with all waits there is no race."""
    lines = [
        f"{name}\t0\t{on_cuda(configured(**SEEDED[name])).model_dump_json()}" for name in names
    ]
    done = run_child("tests.plan.dryrun.cuda_broken", library, lines=lines)
    assert done.returncode == 0, done.stderr
    for name, line in zip(names, done.stdout.splitlines(), strict=True):
        races = CudaStep(**json.loads(line)).races
        assert bool(races) == (name != "nothing"), (name, races)
        assert any(re.search(NAMED.get(name, ""), race) for race in races) or name == "nothing", (
            name,
            races,
        )


@pytest.mark.long
def test_a_model_may_print(library: Path) -> None:
    config = on_cuda(configured(model="llama", num_layers=2))
    noisy = config.replace(model={"builder": "tests.plan.dryrun.noisy:build"})
    assert run_process(library, [(noisy, 0)]) == run_process(library, [(config, 0)])


def test_a_rank_without_a_result_is_an_error(
    library: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nothing = subprocess.CompletedProcess([], 0, "", "ended early")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: nothing)
    with pytest.raises(
        RuntimeError, match="the step of rank 3 fails on fake CUDA tensors: ended early"
    ):
        run_process(library, [(on_cuda(configured()), 3)])
