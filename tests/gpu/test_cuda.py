"""The same numbers on CUDA as on CPU, and what only a GPU can show. ``pytest -m gpu``;
skipped where there is none.

One GPU: each case in a process of its own making. Several: the launcher's ranks, joined by NCCL.
"""

from __future__ import annotations

import itertools
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from meshwright.config import Launch, Run, RunConfig
from meshwright.mesh.grid import Grid
from meshwright.schedule.action import COMPUTE
from meshwright.verify import layout_config, parse_layout
from meshwright.verify.compare import compare
from meshwright.verify.rank import merge, run_layout
from meshwright.verify.tolerance import TOLERANCES
from meshwright_launch.local import launch
from tests.framework.verify.cases import References, model_config, size_for
from tests.gpu import on_gpu

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available(), reason="needs a CUDA device, and `pytest -m gpu`"
    ),
]

STEPS = 4
MODELS = ("gpt2", "llama")


def config_for(
    model: str, layout: str = "mbs2", dtype: str = "float32", device: str = "cuda", **options: Any
) -> RunConfig:
    parsed = parse_layout(layout)
    size = size_for(parsed)
    return layout_config(
        model_config(model, size, **options), parsed, size.global_batch, dtype, device
    )


def compiled(config: RunConfig) -> RunConfig:
    return config.model_copy(update={"train": config.train.model_copy(update={"compile": True})})


# -------------------------------------------------------------------------------------------------------------
# one GPU


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
@pytest.mark.parametrize("model", MODELS)
def test_one_gpu_gives_the_numbers_of_one_plain_process_on_cpu(
    model: str, dtype: str, on_device: Callable[..., Any], references: References
) -> None:
    """Initial weights and tokens bit-equal; loss,
    gradients and weights within the bars of the precision.
    """
    size = size_for(parse_layout("mbs2"))
    expected = references.expected(model_config(model, size), size.global_batch, STEPS, dtype)
    found = merge(
        [on_device(run_layout, 0, 1, config_for(model, dtype=dtype).model_dump_json(), STEPS, True)]
    )
    row = compare("cuda", found, found, expected.findings, TOLERANCES[dtype], expected.rounding)
    assert row.passed, row.problems
    assert row.initial_equal and row.samples_equal


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_with_offload_too(
    dtype: str, on_device: Callable[..., Any], references: References
) -> None:
    """The optimizer steps on the host: copies there and back beside the computation."""
    layout = "zero1,offload,mbs2"
    size = size_for(parse_layout(layout))
    expected = references.expected(model_config("gpt2", size), size.global_batch, STEPS, dtype)
    config = config_for("gpt2", layout, dtype=dtype)
    found = merge([on_device(run_layout, 0, 1, config.model_dump_json(), STEPS, True)])
    row = compare("cuda", found, found, expected.findings, TOLERANCES[dtype], expected.rounding)
    assert row.passed, row.problems


@pytest.mark.parametrize("shard", [None, (1, 1, 2), (-1, 2, 3)])
@pytest.mark.parametrize("shape", [(4, 12, 6), (33,), (3, 64, 64)])
def test_dropout_masks_are_those_of_the_cpu(
    shape: tuple[int, ...], shard: tuple[int, int, int] | None, on_device: Callable[..., Any]
) -> None:
    samples = [0, 7, 2**40 + 3]
    assert torch.equal(
        on_device(on_gpu.dropout_mask, "cuda", samples, shape, shard),
        on_gpu.dropout_mask("cpu", samples, shape, shard),
    )


def test_the_timeline_has_every_action_with_its_duration(on_device: Callable[..., Any]) -> None:
    """By CUDA events: in the order of the row,
    none before the one that it follows on the stream.
    """
    actions, spans = on_device(on_gpu.timeline, config_for("gpt2"))
    assert [span.action for span in spans] == actions
    assert all(span.end > span.start for span in spans if span.action.kind in COMPUTE)
    assert all(span.end >= span.start >= 0 for span in spans)
    assert all(after.start >= before.end for before, after in itertools.pairwise(spans))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_optimizer_goes_on_from_its_own_state(
    dtype: str, on_device: Callable[..., Any]
) -> None:
    """Fused AdamW wants its step counts on the device;
    with dropout no kernel of these steps adds in a random order.
    """
    found = on_device(on_gpu.restored_optimizer, config_for("gpt2", dtype=dtype))
    assert found.fused and found.state_on_device and found.steps == 2
    assert found.losses == found.losses_again


@pytest.mark.parametrize("model", MODELS)
def test_a_run_repeats_bit_for_bit_with_deterministic_kernels(
    model: str, on_device: Callable[..., Any]
) -> None:
    """The backward of the fused attention adds in whatever order blocks finish,
    unless torch is told otherwise.
    """
    config = config_for(model, dtype="bfloat16", dropout=0.0)
    first = on_device(on_gpu.losses, config, STEPS, deterministic=True)
    assert [value.hex() for value in first] == [
        value.hex() for value in on_device(on_gpu.losses, config, STEPS, deterministic=True)
    ]


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
def test_compiled_layers_give_the_same_numbers(model: str, on_device: Callable[..., Any]) -> None:
    config = config_for(model, dropout=0.1)
    plain = on_device(on_gpu.losses, config, STEPS)
    assert on_device(on_gpu.losses, compiled(config), STEPS) == pytest.approx(plain, rel=1e-5)


def test_hooks_of_gradients_run_on_the_stream_that_computed_them(
    on_device: Callable[..., Any],
) -> None:
    """c10d orders a reduction after the current stream of the thread that posts it,
    here autograd's own thread.
    """
    same_stream, other_thread = on_device(on_gpu.streams_of_hooks, "cuda")
    assert same_stream and other_thread


def test_weights_lie_where_vector_loads_want_them(on_device: Callable[..., Any]) -> None:
    assert on_device(on_gpu.weights_are_aligned, config_for("gpt2", dtype="bfloat16", ffn_size=35))


def test_peak_memory_is_that_of_the_allocator(on_device: Callable[..., Any]) -> None:
    told, allocated, held = on_device(on_gpu.peaks, config_for("gpt2"))
    assert told == allocated >= held > 0


def test_megatron_core_allocates_where_the_tensors_are(on_device: Callable[..., Any]) -> None:
    assert on_device(on_gpu.device_for_megatron) == (torch.device("cpu"), 0)


@pytest.mark.skipif(
    torch.cuda.device_count() != 1, reason="srun's one device per task needs a machine with one GPU"
)
def test_a_task_of_srun_that_sees_one_gpu_takes_it(on_device: Callable[..., Any]) -> None:
    assert on_device(on_gpu.device_under_srun, 3) == torch.device("cuda", 0)


# --------------------------------------------------------------------------------------------------------
# several GPUs


def by_ranks(work: Callable[[RunConfig], None], config: RunConfig, directory: Path) -> list[Any]:
    """Return what each rank of the launcher has written, by rank."""
    size = Grid.of(config.parallel.degrees).size
    update = {"run": Run(directory=str(directory)), "launch": Launch(processes=size)}
    launch(work, config.model_copy(update=update))
    return [pickle.loads((directory / f"{rank}.pickle").read_bytes()) for rank in range(size)]


def skip_below(num_devices: int) -> None:
    if torch.cuda.device_count() < num_devices:
        pytest.skip(f"needs {num_devices} CUDA devices: torch sees {torch.cuda.device_count()}")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(
    "layout",
    [
        "dp2",
        "dp2,zero0",
        "pp2",
        "pp2,gpipe",
        "tp2",
        "tp2,sequence",
        "dp2,pp2",
        "dp2,zero2,offload",
        "dp2,zero3",
        "dp2,zero3,offload",
        "dp4,zero3,shard2,offload",
        "pp4",
        "dp2,tp2,sequence",
        "pp2,tp2",
        "dp2,pp2,tp2",
        "dp2,pp2,tp2,sequence,gpipe,mbs2",
    ],
)
def test_layouts_over_nccl_give_the_numbers_of_one_plain_process_on_cpu(
    layout: str, model: str, dtype: str, references: References, tmp_path: Path
) -> None:
    parsed = parse_layout(layout)
    skip_below(parsed.size)
    size = size_for(parsed)
    expected = references.expected(model_config(model, size), size.global_batch, STEPS, dtype)
    found = merge(by_ranks(on_gpu.findings_to_file, config_for(model, layout, dtype), tmp_path))
    row = compare(layout, found, found, expected.findings, TOLERANCES[dtype], expected.rounding)
    assert row.passed, row.problems


def test_the_timeline_of_a_pipeline_has_its_communications(tmp_path: Path) -> None:
    skip_below(2)
    for rank, spans in enumerate(
        by_ranks(on_gpu.measured_by_ranks, config_for("gpt2", "pp2"), tmp_path)
    ):
        assert {span.action.kind.value for span in spans} >= {"F", "B", "REDUCE", "STEP"}
        assert any(
            span.action.kind not in COMPUTE and span.action.microbatch is not None for span in spans
        )
        assert all(span.end >= span.start >= 0 and span.rank == rank for span in spans)
