"""The architecture as rules: which room may import which, and how long a function may be.

A room is a folder or a file right below ``framework/meshwright``; other packages have bands of
their own. All imports count, also inside functions. Tables that allow more than a rule does hold
what is left of older code: they only shrink. ``make sizes`` prints the sizes, which have no limit:
limits were met by packing lines.
"""

from __future__ import annotations

import ast
import functools
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from tests.support import reading_path, sizes
from tests.support.prose import findings
from tests.support.reading_path import READING_PATH
from tests.support.sources import PACKAGES, ROOT, dotted, files, module_of

ROUTER_TOKENS = "meshwright.expert_parallel.router_tokens"
"""The one file of an axis that other axes import: a router is cut by tp and cp."""
GROUND = {"errors", "system", "terminal", "kernels"}
WORDS = {"parameters", "seeding", "current"}
WORD_ARROWS = {("seeding", "current"): "dropouts draw by the samples of the micro-batch"}
AXES = {"tensor_parallel", "context_parallel", "expert_parallel", "pipeline", "data_parallel"}
CORE: dict[str, set[str]] = {
    "config": set(),
    "placement": set(),
    "adapters": {"config", "placement"},
    "model": {"adapters", "config", "fp8", "mesh", "placement"},
    "mesh": set(),
    "fp8": {"config", "mesh", "placement"},
    "schedule": {"config"},
    "optimizer": {"config", "mesh"},
    "tensor_parallel": {"mesh", "model", "fp8", "placement"},
    "context_parallel": {"config", "mesh", "model", "placement"},
    "expert_parallel": {"mesh", "placement"},
    "pipeline": {"config", "mesh", "model", "placement", "schedule"},
    "data_parallel": {"mesh", "optimizer"},
}
"""Room of the core -> rooms that it may import besides GROUND and WORDS."""
TYPE_ARROWS = {
    ("pipeline", "data_parallel"): "the executor calls each stage's Replica",
}
"""Imports under TYPE_CHECKING from a room that may not be imported: an annotation names the class
itself, instead of a Protocol that repeats it.
"""
NOT_BELOW = {
    "meshwright": PACKAGES.keys() - {"meshwright"},
    "meshwright_models": PACKAGES.keys() - {"meshwright_models"},
    "meshwright_launch": {"meshwright_plan", "meshwright_interop"},
    "meshwright_plan": {"meshwright_interop"},
    "meshwright_interop": {"meshwright_plan"},
}
"""Package -> packages that it may not import."""
SERVICES = {"data", "checkpoint", "run", "tracking", "watch"}
SERVICE_ARROWS = {
    ("run", "checkpoint"): "a run on disk is made of checkpoints",
}
"""Imports between services that are left; a service imports no other one."""
PRODUCT = {"verify", "inference", "doctor"}
"""Commands of the trainer itself; only launch imports them."""
JOINING = {"parts", "blueprint", "traits", "build", "step", "train"}
FORMER = {"launch"}
"""Former name of a module, which runs the present one."""
FOR_SERVICES = {"parts", "blueprint"}
"""Joining modules whose types the services name."""

PURE = (
    *(
        "meshwright.schedule",
        "meshwright.mesh.grid",
        "meshwright.mesh.placement",
        "meshwright.pipeline.partition",
    ),
    *("meshwright.mesh.expert_groups", "meshwright.context_parallel.order"),
    *(
        "meshwright.errors",
        "meshwright.config",
        "meshwright_interop.configs",
        "meshwright.run.directory",
    ),
    *(
        "meshwright.system",
        "meshwright.terminal",
        "meshwright.mesh.activity",
        "meshwright.watch.hang.heartbeat",
    ),
    *(
        "meshwright.watch.hang.diagnosis",
        "meshwright.watch.hang.status",
        "meshwright_launch.status",
    ),
    "meshwright_plan.picture",
)
"""No torch: planning and the command line run where there is none,
and start at once where there is.
"""

FSDP_DOOR = "meshwright.data_parallel.fsdp"
"""It may say what torch's fully_shard is made of; collectives go by our groups there too."""
FSDP = ("torch.distributed.fsdp", "torch.distributed.device_mesh", "torch.distributed.tensor")
DCP_DOOR = "meshwright_interop.dcp"
"""It writes torch's distributed checkpoint format, in one process, without a group."""

HUGGINGFACE = "meshwright_interop.huggingface"
HALVES = (f"{HUGGINGFACE}.convert", f"{HUGGINGFACE}.restructure")
"""Neither knows the other, and what both stand on knows neither."""
TRANSFORMERS_DOOR = f"{HUGGINGFACE}.restructure.library"

SETTLED = ("torch.utils._pytree", "torch.utils._python_dispatch", "torch.ops.aten")
"""Private by name alone: torch's own packages outside its core use them,
and every release has them.
"""

FAKES = {"meshwright.mesh.fake"}

MEGATRON_DOORS = ("meshwright.tensor_parallel.megatron", "meshwright.data.indexed")


FUNCTION_LINES, PARAMETERS = 60, 7
LONG_FUNCTIONS: dict[str, int] = {}
"""Functions above that length, with their lines; none is left."""
MANY_PARAMETERS = {
    "framework/meshwright/data/huggingface.py:build": 8,
    "models/meshwright_models/gpt2.py:build": 17,
    "models/meshwright_models/llama.py:build": 34,
    "models/meshwright_models/t5.py:build": 17,
}
FACE = "meshwright"
"""The public API: names of any room and of launch, imported when they are used."""
README_LINES = 200
PROSE = 0
"""Docstrings of the packages that break a rule of tests/support/prose.py."""
PROSE_OF_TESTS = 800
"""Those of tests: fewer with every file that is written anew."""


def modules() -> dict[str, Path]:
    """Return every module of the packages: dotted name -> file."""
    return {module_of(path): path for path in files()}


def room_of(module: str) -> str:
    """meshwright.mesh.grid -> mesh; meshwright_models.gpt2 -> meshwright_models."""
    parts = module.split(".")
    return parts[1] if parts[0] == FACE and len(parts) > 1 else parts[0]


def package_of(module: str) -> str:
    """Return the top package of a module."""
    return module.partition(".")[0]


def below(module: str, *tops: str) -> bool:
    """Whether a module is one of these or lies inside one."""
    return any(module == top or module.startswith(top + ".") for top in tops)


def imports(tree: ast.AST, module: str, is_package: bool) -> Iterator[str]:
    """Everything that a module imports or names: ``from a import b`` counts as a.b,
    ``torch.distributed.x`` too.
    """
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                package = module.split(".") if is_package else module.split(".")[:-1]
                base = ".".join([*package[: len(package) - node.level + 1], *filter(None, [base])])
            yield from (f"{base}.{alias.name}" for alias in node.names)
        elif (
            isinstance(node, ast.Attribute)
            and node.attr == "distributed"
            and isinstance(node.value, ast.Name)
        ):
            if node.value.id == "torch":
                yield "torch.distributed"
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            name = (
                node.func.attr
                if isinstance(node.func, ast.Attribute)
                else getattr(node.func, "id", "")
            )
            if name in ("import_module", "__import__") and isinstance(node.args[0].value, str):
                yield node.args[0].value


@functools.cache
def parsed(source: str) -> ast.Module:
    """The syntax tree of a source, made once for all tests: none changes it."""
    return ast.parse(source)


def tree_of(path: Path) -> ast.Module:
    """The syntax tree of a file."""
    return parsed(path.read_text())


@functools.cache
def imports_of(module: str, path: Path) -> frozenset[str]:
    """What a module of ours imports or names."""
    return frozenset(imports(tree_of(path), module, path.name == "__init__.py"))


@functools.cache
def function_nodes(path: Path) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    """The functions of a file."""
    return [
        node
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]


def violations(module: str, source: str, is_package: bool = False) -> list[str]:
    """Return what a module imports and may not, each with the rule."""
    package, room, found = package_of(module), room_of(module), []
    for name in sorted(set(imports(parsed(source), module, is_package))) if module != FACE else ():
        at_door = module == FSDP_DOOR and below(name, *FSDP)
        at_door |= module == DCP_DOOR and below(name, "torch.distributed.checkpoint")
        if (
            below(name, "torch.distributed")
            and not at_door
            and not below(module, "meshwright.mesh", "meshwright_launch")
        ):
            found.append(f"{module} imports {name}: only framework/meshwright/mesh may")
        if below(name, "torch") and below(module, *PURE):
            found.append(
                f"{module} imports {name}: it is pure, and must run where there is no torch"
            )
        if below(name, "megatron") and module not in MEGATRON_DOORS:
            found.append(f"{module} imports {name}: only {' and '.join(MEGATRON_DOORS)} may")
        if below(name, "transformers") and module != TRANSFORMERS_DOOR:
            found.append(f"{module} imports {name}: only {TRANSFORMERS_DOOR} may")
        if below(module, HUGGINGFACE) and below(
            name, *(half for half in HALVES if not below(module, half))
        ):
            found.append(f"{module} imports {name}: the halves of {HUGGINGFACE} stand apart")
        if below(name, *NOT_BELOW[package]):
            found.append(
                f"{module} imports {name}: {package} imports none of"
                f" {', '.join(sorted(NOT_BELOW[package]))}"
            )
        is_ours = (
            package == FACE
            and below(name, "meshwright")
            and room_of(name) not in (room, "meshwright")
            and not (room in AXES and below(name, ROUTER_TOKENS))
        )
        is_type = (room, room_of(name)) in TYPE_ARROWS and name in for_types(parsed(source))
        if is_ours and not is_type and (why := forbidden(room, room_of(name))):
            found.append(f"{module} imports {name}: {why}")
    return found


def for_types(tree: ast.Module) -> set[str]:
    """Return the names of ours that are imported for type checkers only."""
    blocks = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
    ]
    return {name for block in blocks for name in imports(block, "", False)}


def forbidden(room: str, other: str) -> str | None:
    """Return why one room of framework may not import another; None: it may."""
    if other in GROUND:
        is_below = room in GROUND and room not in ("system", "kernels") and other != "errors"
        return f"{room} is below {other}" if is_below else None
    if room in PRODUCT:
        return f"{room} and {other} are commands, which stand apart" if other in PRODUCT else None
    if other in PRODUCT | {"train"}:
        return f"nothing in the trainer imports {other}"
    if room in GROUND | WORDS:
        if (room, other) in WORD_ARROWS:
            return None
        return f"{room} is a word or the ground that every room stands on"
    if room in CORE:
        allowed = CORE[room] | WORDS
        return (
            None if other in allowed else f"{room} may import {', '.join(sorted(allowed | GROUND))}"
        )
    if room in SERVICES:
        if other in SERVICES:
            return (
                None
                if (room, other) in SERVICE_ARROWS
                else f"{room} and {other} are services, which stand apart"
            )
        return f"{room} is called by {other}" if other in JOINING - FOR_SERVICES else None
    return None if room in JOINING | FORMER else f"{room} has no rule: add it to CORE or SERVICES"


def at_import(tree: ast.Module) -> ast.Module:
    """The tree without functions, which run later. Imports for type checkers stay: a reader, an
    editor and a drawing follow them too.
    """

    class Later(ast.NodeTransformer):
        def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
            return None

        def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> None:
            return None

    return ast.fix_missing_locations(Later().visit(tree))


def cycle(graph: dict[str, set[str]]) -> list[str] | None:
    """One cycle as a list that ends where it starts, or None."""
    done: set[str] = set()

    def walk(node: str, path: list[str]) -> list[str] | None:
        if node in path:
            return [*path[path.index(node) :], node]
        if node in done:
            return None
        for other in sorted(graph.get(node, ())):
            found = walk(other, [*path, node])
            if found:
                return found
        done.add(node)
        return None

    return next(filter(None, (walk(node, []) for node in sorted(graph))), None)


def private_names(tree: ast.Module) -> set[str]:
    """Return the private names of torch that a module imports or reads, such as torch._C.x;
    not those of SETTLED.
    """
    names, short = set[str](), dict[str, str]()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            base = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
            short |= {alias.asname or alias.name: f"{base}{alias.name}" for alias in node.names}
            names |= {f"{base}{alias.name}" for alias in node.names}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and (text := dotted(node)):
            first, _, rest = text.partition(".")
            names.add(f"{short.get(first, first)}.{rest}")
    return {
        name
        for name in names
        if below(name, "torch")
        and not below(name, *SETTLED)
        and any(re.match(r"_(?!_|foreach_)", part) for part in name.split("."))
    }


def test_private_names_of_torch_are_in_one_file_of_a_room() -> None:
    """A release of torch that moves one then changes one file. Tools, and FAKES,
    run on torch's fakes and are apart.
    """
    files = defaultdict(set)
    for module, path in modules().items():
        if package_of(module) == FACE and module not in FAKES and private_names(tree_of(path)):
            files[room_of(module)].add(module)
    several = {room: sorted(found) for room, found in files.items() if len(found) > 1}
    assert files and not several, several


def test_a_private_name_of_torch_is_seen() -> None:
    source = (
        "from torch.a._b import c\ntorch._C.d()\ntorch.utils._pytree.e\ntorch._foreach_add_\nf._g\n"
    )
    assert private_names(ast.parse(source)) == {"torch.a._b.c", "torch._C", "torch._C.d"}
    aliased = (
        "import torch.distributed as dist\nfrom torch import cuda\ndist.x._y()\ncuda._z\ncuda.z\n"
    )
    assert private_names(ast.parse(aliased)) == {"torch.distributed.x._y", "torch.cuda._z"}


def known(name: str, names: dict[str, Path]) -> str | None:
    """The module that an imported name is, or is in; None when it is not one of ours."""
    while name and name not in names:
        name = name.rpartition(".")[0]
    return name or None


def arrows() -> Iterator[tuple[str, str]]:
    """Yield (module, other module) of every import between our modules."""
    names = modules()
    for module, path in names.items():
        for name in imports_of(module, path):
            other = known(name, names)
            if other and other != module:
                yield module, other


def test_every_import_keeps_to_the_rules() -> None:
    found = [
        line
        for module, path in modules().items()
        for line in violations(module, path.read_text(), path.name == "__init__.py")
    ]
    assert not found, "\n".join(found)


def test_the_tables_keep_axes_apart_and_the_core_below() -> None:
    for axis in AXES:
        assert not CORE[axis] & AXES
    assert not set().union(*CORE.values()) & (SERVICES | JOINING | PRODUCT)


def test_what_is_allowed_between_services_and_for_types_is_still_there() -> None:
    between = {(room_of(a), room_of(b)) for a, b in arrows()}
    allowed = SERVICE_ARROWS.keys() | TYPE_ARROWS.keys()
    assert allowed <= between, f"no longer needed: {allowed - between}"


def functions() -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    """Yield ("framework/meshwright/build.py:build", node) of every function."""
    for path in modules().values():
        for node in function_nodes(path):
            yield f"{path.relative_to(ROOT)}:{node.name}", node


def num_parameters(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Return the parameters of a function without ``self``."""
    arguments = [*function.args.posonlyargs, *function.args.args]
    own = bool(arguments) and arguments[0].arg in ("self", "cls")
    return len(arguments) + len(function.args.kwonlyargs) - own


def over(sizes: dict[str, int], limit: int, allowed: dict[str, int]) -> list[str]:
    """Return what is over its limit, and what is allowed more than it needs."""
    found = [f"{name}: {size}, at most {allowed.get(name, limit)}" for name, size in sizes.items()]
    large = [
        line
        for line, (name, size) in zip(found, sizes.items(), strict=True)
        if size > allowed.get(name, limit)
    ]
    loose = [
        f"{name} needs no exception any more" for name in allowed if sizes.get(name, 0) <= limit
    ]
    return large + loose


def num_lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Return the lines of a function's body, without its docstring."""
    has_docstring = ast.get_docstring(function) is not None
    statements = function.body[1:] if has_docstring else function.body
    return (function.end_lineno or 0) - statements[0].lineno + 1 if statements else 0


def test_functions_are_short() -> None:
    sizes: dict[str, int] = defaultdict(int)
    for name, node in functions():
        sizes[name] = max(sizes[name], num_lines(node))
    assert not over(sizes, FUNCTION_LINES, LONG_FUNCTIONS)


def test_functions_take_few_parameters() -> None:
    sizes: dict[str, int] = defaultdict(int)
    for name, node in functions():
        sizes[name] = max(sizes[name], num_parameters(node))
    assert not over(sizes, PARAMETERS, MANY_PARAMETERS)


@pytest.mark.long
def test_sizes_are_printed() -> None:
    """``make sizes`` counts every room of the core, and each file once."""
    printed = {line[:34].strip(): line[34:].split() for line in sizes.table(CORE).splitlines()}
    assert CORE.keys() <= printed.keys()
    assert int(printed["meshwright"][0]) == sum(1 for _ in files("meshwright"))
    assert 0 < int(printed["reading path"][1]) < int(printed["core of the trainer"][1])


def shared_names(trees: Mapping[str, ast.Module]) -> dict[str, list[str]]:
    """Return public class names, of nested classes too, that several files have."""
    files = defaultdict(list)
    for path, tree in trees.items():
        for name in {node.name for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}:
            files[name].append(path)
    return {
        name: found for name, found in files.items() if len(found) > 1 and not name.startswith("_")
    }


def test_a_class_name_means_one_thing() -> None:
    assert not shared_names({str(path): tree_of(path) for path in modules().values()})


def test_a_class_name_of_two_files_is_seen() -> None:
    one, two = "class A: ...\nclass _B: ...\n", "class C:\n    class A: ...\nclass _B: ...\n"
    assert shared_names({"one": ast.parse(one), "two": ast.parse(two)}) == {"A": ["one", "two"]}


def test_docstrings_open_with_a_verb_or_a_noun() -> None:
    found = [finding for path in modules().values() for finding in findings(path)]
    assert len(found) <= PROSE, "\n".join(map(str, found))


def test_docstrings_of_tests_are_not_worse_than_they_were() -> None:
    found = [
        finding for path in sorted((ROOT / "tests").rglob("*.py")) for finding in findings(path)
    ]
    assert not [finding for finding in found if "support" in finding.path.parts]
    assert len(found) <= PROSE_OF_TESTS, "\n".join(map(str, found))


def test_the_readme_is_read_at_one_sitting() -> None:
    readme = (ROOT / "README.md").read_text()
    assert len(readme.splitlines()) <= README_LINES
    missing = [path for path in READING_PATH if f"`{path}`" not in readme]
    assert not missing, f"the reading path in the README lacks {missing}"
    assert reading_path.described() == list(READING_PATH)
    text = reading_path.DOCUMENT.read_text()
    assert reading_path.counted(text) == text, (
        "python -m tests.support.reading_path counts the lines anew"
    )
    index = (ROOT / "docs" / "README.md").read_text()
    assert all(
        path.name in index for path in (ROOT / "docs").glob("*.md") if path.name != "README.md"
    )


@pytest.mark.parametrize(
    ("source", "count"),
    [
        ('def f():\n    """What it does."""', 1),
        ('def f():\n    """Return it."""', 0),
        ('def test_it():\n    """A damaged file is passed over."""', 0),
        ('@pytest.fixture\ndef f():\n    """A place."""', 0),
        ('class A:\n    """Who knows."""', 2),
        ('class A:\n    """A place."""\n    x: int\n    """Of it."""', 1),
        (
            (
                'class A:\n    """A place."""\n    @property\n    def x(self):\n        """Its'
                ' width."""'
            ),
            0,
        ),
    ],
)
def test_prose_that_breaks_a_rule_is_found(source: str, count: int, tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text(f'"""A module."""\n{source}\n')
    assert len(findings(tmp_path / "a.py")) == count


def test_sizes_over_a_limit_are_found() -> None:
    assert over({"a": 301, "b": 300}, 300, {}) == ["a: 301, at most 300"]
    assert over({"a": 310}, 300, {"a": 309}) == ["a: 310, at most 309"]
    assert over({"a": 300}, 300, {"a": 309}) == ["a needs no exception any more"]
    function = ast.parse("class A:\n    def f(self, a, *, b): ...").body[0].body[0]  # type: ignore[attr-defined]
    assert num_parameters(function) == 2


def test_no_import_cycles_between_modules() -> None:
    names = modules()
    graph: dict[str, set[str]] = {}
    for module, path in names.items():
        tree = at_import(ast.parse(path.read_text()))
        found = {known(name, names) for name in imports(tree, module, path.name == "__init__.py")}
        graph[module] = {name for name in found if name and name != module}
    assert cycle(graph) is None


def test_no_import_cycles_between_rooms() -> None:
    names = modules()
    graph: dict[str, set[str]] = {}
    for module, path in names.items():
        found = {known(name, names) for name in imports_of(module, path)}
        rooms = {room_of(name) for name in found if name} - {room_of(module), "meshwright"}
        graph.setdefault(room_of(module), set()).update(rooms)
    assert cycle(graph) is None


@pytest.mark.parametrize(
    ("module", "source", "said"),
    [
        (
            "meshwright.pipeline.stage",
            "import torch.distributed as dist",
            "only framework/meshwright/mesh",
        ),
        (
            "meshwright.tensor_parallel.unsplit",
            "from meshwright.expert_parallel import plan",
            "tensor_parallel may import",
        ),
        ("meshwright.step", "from torch import distributed", "only framework/meshwright/mesh"),
        (
            "meshwright.step",
            "import torch\ntorch.distributed.barrier()",
            "only framework/meshwright/mesh",
        ),
        (
            "meshwright_models.gpt2",
            "from torch.distributed import get_rank",
            "only framework/meshwright/mesh",
        ),
        ("meshwright.schedule.build", "def f():\n    import torch", "it is pure"),
        ("meshwright.mesh.grid", "from torch import Tensor", "it is pure"),
        ("meshwright.train", "import meshwright_models.gpt2", "imports none of"),
        (
            "meshwright.train",
            "import importlib\nimportlib.import_module('meshwright_launch.pool')",
            "imports none of",
        ),
        ("meshwright_models.gpt2", "from meshwright.errors import ModelError", "imports none of"),
        (
            "meshwright.pipeline.stage",
            "from meshwright.tensor_parallel import plan",
            "pipeline may import",
        ),
        (
            "meshwright.pipeline.stage",
            "from meshwright import data_parallel",
            "pipeline may import",
        ),
        ("meshwright.pipeline.stage", "from ..data_parallel import buckets", "pipeline may import"),
        ("meshwright.pipeline.stage", "from meshwright.watch import drift", "pipeline may import"),
        (
            "meshwright.data_parallel.replica",
            "def f():\n    from meshwright.parts import Parts",
            "data_parallel may",
        ),
        ("meshwright.checkpoint.save", "from meshwright.run.lock import RunLock", "services"),
        ("meshwright.data.causal", "from meshwright.build import build", "is called by build"),
        (
            "meshwright.run.resume",
            "from meshwright.train import train",
            "nothing in the trainer imports train",
        ),
        (
            "meshwright.step",
            "from meshwright.verify import run",
            "nothing in the trainer imports verify",
        ),
        ("meshwright.verify.run", "from meshwright.doctor import rank", "which stand apart"),
        ("meshwright.verify.run", "import meshwright_plan.planner", "imports none of"),
        ("meshwright_launch.cli", "from meshwright_interop import dcp", "imports none of"),
        ("meshwright_plan.report.run", "from meshwright_interop import configs", "imports none of"),
        ("meshwright.terminal.output", "from meshwright.config import load", "ground"),
        ("meshwright.seeding", "from meshwright.mesh import grid", "word"),
        ("meshwright.context.keys", "from meshwright.mesh import grid", "has no rule"),
        (
            "meshwright.pipeline.stage",
            "if TYPE_CHECKING:\n    from meshwright.tensor_parallel import plan",
            "pipeline may import",
        ),
        (
            "meshwright.pipeline.stage",
            "from meshwright.data_parallel.replica import Replica",
            "pipeline may import",
        ),
        (
            "meshwright.data.causal",
            "from megatron.core.datasets import indexed_dataset",
            "only meshwright.tensor",
        ),
        ("meshwright_launch.cli", "import megatron.core", "only meshwright.tensor"),
        (
            f"{HUGGINGFACE}.convert.exporting",
            "def f():\n    import transformers",
            f"only {HUGGINGFACE}.restr",
        ),
        (
            f"{HUGGINGFACE}.convert.exporting",
            f"from {HUGGINGFACE}.restructure import export",
            "stand apart",
        ),
        (f"{HUGGINGFACE}.restructure.export", "from ..convert import side_files", "stand apart"),
        (f"{HUGGINGFACE}.writing", f"from {HUGGINGFACE}.convert import side_files", "stand apart"),
    ],
)
def test_a_broken_rule_is_found(module: str, source: str, said: str) -> None:
    assert any(said in line for line in violations(module, source))


def test_what_is_allowed_passes() -> None:
    assert not violations(
        "meshwright.mesh.mesh",
        "import torch.distributed as dist\nfrom meshwright.errors import MeshError",
    )
    assert not violations(
        "meshwright.train",
        "from meshwright.pipeline import stage\nfrom meshwright.data import order",
    )
    assert not violations("meshwright.watch.drift", "from meshwright.parts import Parts")
    assert not violations(
        "meshwright.pipeline.executor",
        "if TYPE_CHECKING:\n    from meshwright.data_parallel.replica import Replica",
    )
    assert not violations("meshwright.verify.run", "from meshwright.step import take_step")
    assert not violations(
        "meshwright_plan.commands.plans", "from meshwright_launch.arguments import common"
    )
    assert not violations(
        "meshwright.tensor_parallel.megatron", "from megatron.core import tensor_parallel"
    )
    assert not violations("meshwright_launch.pool", "import torch.distributed")
    assert not violations(TRANSFORMERS_DOOR, "import transformers")
    assert not violations(
        f"{HUGGINGFACE}.convert.exporting", "from ..rules import Rule\nfrom . import side_files"
    )


def test_a_cycle_is_found() -> None:
    assert cycle({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == ["b", "c", "b"]
    assert cycle({"a": {"b", "c"}, "b": {"c"}, "c": set()}) is None
    later = ast.parse(
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import a\ndef f():\n    import"
        " b\nimport c"
    )
    assert list(imports(at_import(later), "m", False)) == ["typing.TYPE_CHECKING", "c", "a"]
