"""Private names of torch: each is named where it is used,
and exists in the torch that is installed.
"""

from __future__ import annotations

import ast
import contextlib
import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from meshwright.data_parallel.fsdp import FsdpLayers, FsdpUnits
from meshwright.mesh.grid import Grid
from meshwright.mesh.mesh import open_mesh
from meshwright.watch.hang.flight_recorder import DUMPS
from meshwright_launch.pool import RankPool
from tests.support.private_torch import (
    DOCUMENT,
    SETTLED,
    declared,
    declared_in,
    document,
    is_in,
    private_attributes,
    sources,
    unnamed,
)
from tests.test_architecture import private_names

RELEASE = tuple(map(int, torch.__version__.split(".")[:2]))
FSDP = "torch.distributed.fsdp._fully_shard"


def missing_in_fsdp(names: list[str]) -> list[str]:
    """Return the attributes that objects of FSDP2 lack after a step of two layers in bfloat16."""
    layers = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    kind = torch.bfloat16
    group = open_mesh(Grid(dp=2), "cpu").replicas
    fsdp = FsdpLayers(
        *(layers, group, kind, torch.device("cpu")),
        offload=False,
        ignored=set(),
        units=FsdpUnits(),
    )
    layers[1](layers[0](torch.randn(2, 4, dtype=kind, requires_grad=True))).sum().backward()
    unit = next(fsdp.units())
    objects = {
        "FSDPModule": fsdp._root,
        "FSDPState": fsdp._state,
        "FSDPStateContext": fsdp._state._state_ctx,
        "FSDPParamGroup": unit,
        "FSDPCommContext": unit.comm_ctx,
        "FSDPParam": unit.fsdp_params[0],
    }
    owners = {name: objects[name.split(".")[-2]] for name in names}
    assert all(
        type(owner).__name__.startswith(("FSDP", name.split(".")[-2]))
        for name, owner in owners.items()
    )
    return [name for name, owner in owners.items() if not hasattr(owner, name.rpartition(".")[2])]


def compiled() -> nn.Module:
    """Return a module to which torch.compile is applied."""
    module = nn.Linear(2, 2)
    module.compile(backend="eager")
    return module


OBJECTS: dict[str, Callable[[], Any]] = {
    "torch.Tensor": lambda: torch.zeros(2, requires_grad=True),
    "torch.UntypedStorage": lambda: torch.zeros(2).untyped_storage(),
    "torch.ScriptObject": lambda: torch.ScriptObject,
    "torch.nn.Module": compiled,
    "torch._ops.OpOverload": lambda: torch.ops.aten.add.Tensor,
}
"""Class -> makes an object that has the attributes of an instance."""


def assert_async() -> bool:
    """False raises, True does not."""
    torch._assert_async(torch.tensor(True))
    with pytest.raises(RuntimeError):
        torch._assert_async(torch.tensor(False))
    return True


def mode_stack() -> bool:
    """Modes that are entered are on it."""

    class Mode(torch.overrides.TorchFunctionMode):
        pass

    with Mode() as mode:
        return (
            mode in torch.overrides._get_current_function_mode_stack()
            and torch._C._len_torch_function_stack() == 1
        )


def runs_in_backward() -> bool:
    """The task of a backward has a number, and none outside;
    a parameter's node is among those that run.
    """
    weight, tasks = nn.Parameter(torch.ones(2)), []
    node = torch.autograd.graph.get_gradient_edge(weight).node

    def note(_: torch.Tensor) -> None:
        tasks.append((torch._C._current_graph_task_id(), torch._C._will_engine_execute_node(node)))

    loss = (weight * 2).sum()
    loss.register_hook(note)
    loss.backward()
    return tasks[0][0] >= 0 and tasks[0][1] and torch._C._current_graph_task_id() == -1


def fake_tensors() -> bool:
    """A fake mode makes fake tensors, and is left within the block."""
    fakes = importlib.import_module("torch._subclasses.fake_tensor")
    with fakes.FakeTensorMode():
        is_fake = isinstance(torch.zeros(2), fakes.FakeTensor)
        with fakes.unset_fake_temporarily():
            return is_fake and type(torch.zeros(2)) is torch.Tensor


def hooks() -> bool:
    """Hooks on a parameter's gradient are in its attributes."""
    weight = nn.Parameter(torch.ones(2))
    weight.register_hook(lambda gradient: gradient)
    weight.register_post_accumulate_grad_hook(lambda parameter: None)
    return bool(weight._backward_hooks) and bool(weight._post_accumulate_grad_hooks)


def transforms() -> bool:
    """Functorch's transforms are seen."""
    seen = []

    def note(x: torch.Tensor) -> torch.Tensor:
        seen.append(torch._C._are_functorch_transforms_active())
        return x

    torch.func.vmap(note)(torch.ones(2, 2))
    return seen == [True] and not torch._C._are_functorch_transforms_active()


EXERCISES: dict[str, Callable[[], bool]] = {
    "torch._assert_async": assert_async,
    "torch.overrides._get_current_function_mode_stack": mode_stack,
    "torch._C._len_torch_function_stack": mode_stack,
    "torch._C._current_graph_task_id": runs_in_backward,
    "torch._C._will_engine_execute_node": runs_in_backward,
    "torch._C._are_functorch_transforms_active": transforms,
    "torch._subclasses.fake_tensor.FakeTensor": fake_tensors,
    "torch._subclasses.fake_tensor.FakeTensorMode": fake_tensors,
    "torch._subclasses.fake_tensor.unset_fake_temporarily": fake_tensors,
    "torch.Tensor._backward_hooks": hooks,
    "torch.Tensor._post_accumulate_grad_hooks": hooks,
    "torch.nn.Module._compiled_call_impl": lambda: compiled()._compiled_call_impl is not None,
    "torch.nn.modules.batchnorm._BatchNorm": lambda: isinstance(
        nn.BatchNorm1d(2), nn.modules.batchnorm._BatchNorm
    ),
    "torch.nn.modules.batchnorm._NormBase": lambda: isinstance(
        nn.InstanceNorm1d(2), nn.modules.batchnorm._NormBase
    ),
    "torch.nn.modules.conv._ConvNd": lambda: isinstance(
        nn.Conv1d(2, 2, 1), nn.modules.conv._ConvNd
    ),
}
"""Name -> whether it does what it is used for. Others only have to exist here;
the rooms' own tests use them.
"""
RECORDERS = {f"torch._C._distributed_c10d.{name}" for name in DUMPS}
"""A build has that of NCCL, or that of other backends."""


def exists(name: str) -> bool:
    """Return whether torch has a name: of a module, of a class, or of an object of a class."""
    owner, _, attribute = name.rpartition(".")
    with contextlib.suppress(ImportError):
        importlib.import_module(owner)
    if owner in OBJECTS:
        return hasattr(OBJECTS[owner](), attribute)
    found: Any = torch
    for part in owner.split(".")[1:]:
        if not hasattr(found, part):
            return False
        found = getattr(found, part)
    return hasattr(found, attribute)


def missing_here(rank: int, world_size: int, names: list[str]) -> list[str]:
    """Return the names that the installed torch lacks, or that do not do what they are used for."""
    of_fsdp = [name for name in names if name.startswith(FSDP)]
    found = missing_in_fsdp(of_fsdp)
    for name in names:
        if name not in of_fsdp and not (exists(name) and EXERCISES.get(name, lambda: True)()):
            found.append(name)
    return found


def test_the_installed_torch_has_every_private_name(pool: RankPool) -> None:
    """The message lists the names that a release has moved, with the files to mend."""
    used = {
        name: [file for file, versions in files.items() if is_in(versions, RELEASE)]
        for name, files in declared().items()
    }
    names = [name for name, files in used.items() if files and name not in RECORDERS]
    assert len(names) > 40
    missing = pool.run(missing_here, 2, names)[0]
    assert not missing, (
        f"torch {torch.__version__} lacks { ({name: used[name] for name in missing}) }"
    )
    assert any(exists(name) for name in RECORDERS)
    assert all(
        exists(name) for name in SETTLED if not name.endswith(("_", "_pytree", "_python_dispatch"))
    )


def test_a_missing_attribute_of_fsdp_is_seen(pool: RankPool) -> None:
    names = [
        f"{FSDP}._fsdp_param.FSDPParam._no_such_attribute",
        f"{FSDP}._fsdp_param.FSDPParam.sharded_param",
    ]
    assert pool.run(missing_here, 2, names)[0] == names[:1]


def test_the_installed_torch_was_read() -> None:
    versions = [each for files in declared().values() for each in files.values()]
    assert any(is_in(each, RELEASE) for each in versions), (
        f"no file has read torch {torch.__version__}"
    )


def test_every_private_name_is_named() -> None:
    """A file that reads one names it, with versions, in its PRIVATE_TORCH: attributes of objects,
    and dotted names.
    """
    files = sources()
    assert unnamed(files) == {}
    for path, tree in files.items():
        named = [f"{name}." for name in declared_in(path, tree)]
        unknown = [
            name
            for name in private_names(tree)
            if not any(each.startswith(f"{name}.") for each in named)
        ]
        assert not unknown, f"{path.name}: {unknown}"


def test_what_counts_as_private() -> None:
    source = "a._b\nself._c\ngetattr(d, '_e', None)\nf.__g__\nh._i()._j\n"
    assert private_attributes(ast.parse(source)) == {"_b", "_e", "_i", "_j"}
    assert (
        is_in("2.11-2.14", (2, 11)) and not is_in("2.11-2.14", (2, 15)) and is_in("2.15", (2, 15))
    )


def test_a_missing_name_is_seen() -> None:
    assert not exists("torch._C._no_such_name") and not exists("torch.no_such_module._name")
    assert not exists("torch.nn.Module._no_such_attribute")


def test_the_page_has_the_names() -> None:
    assert document() == DOCUMENT.read_text(), (
        "`python -m tests.support.private_torch` writes it anew"
    )
