"""Hardware of a cluster: rates of a device and of its links, from a small TOML file.

configs/clusters/{a100,h100,h200,b200}.toml     data sheets, and the rates that large products reach
meshwright calibrate --out FILE                 measured on this machine, with curves by size
meshwright calibrate --device cuda --out FILE   measured on one GPU of this machine
"""

from __future__ import annotations

import bisect
import difflib
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Literal, Self, TypeAlias, get_args

from pydantic import Field, ValidationError, field_validator, model_validator

from meshwright.config import Section
from meshwright.errors import ConfigError
from meshwright.system.bounded import MAX_TOML_BYTES, parse_toml, read_text
from meshwright.system.packages import own_folder

Message: TypeAlias = Literal["all_reduce", "all_gather", "reduce_scatter", "send"]
"""A kind of messages that ``calibrate`` measures."""
PerSecond: TypeAlias = Annotated[float, Field(ge=1.0, le=1e21)]
"""Rate of a device or link, bounded so that times are finite; the other types likewise."""
Amount: TypeAlias = Annotated[float, Field(ge=1.0, le=1e21)]
Seconds: TypeAlias = Annotated[float, Field(ge=0.0, le=3600.0)]
Share: TypeAlias = Annotated[float, Field(ge=1e-9, le=1.0)]
Bytes: TypeAlias = Annotated[int, Field(gt=0, le=2**60)]
Devices: TypeAlias = Annotated[int, Field(gt=0, le=2**20)]


class Link(Section):
    """Link of one device, in one direction."""

    bytes_per_s: PerSecond
    latency_s: Seconds


class Ring(Link):
    """Rate and latency per hop of an all-reduce over a ring of one length,
    while all other rings run at once.
    """

    size: int = Field(ge=2)
    """Ring inside a node: number of its ranks. Ring across nodes, with one rank in each:
    number of nodes.
    """


class Rate(Section):
    """Rate of operations of one size; times between sizes are interpolated linearly."""

    size: Amount
    """FLOPs of a product, bytes of another operation."""
    per_s: PerSecond


class Hardware(Section):
    """A cluster of equal nodes of equal devices."""

    name: str
    kind: str = Field(default="cuda", pattern="^(cuda|cpu)$")
    measured: bool = False
    """True if the rates were measured on the GPU itself, and are not those of a data sheet."""
    devices_per_node: Devices
    devices_per_domain: Devices | None = None
    """Number of devices that ``node_link`` connects, of several nodes (an NVLink domain); None:
    those of one node.
    """
    memory_bytes: Bytes
    """Memory of a device."""
    reserved_bytes: int = Field(default=0, ge=0)
    """Part of ``memory_bytes`` that is used before the first tensor."""
    host_memory_bytes: Bytes = 2 * 2**40
    """Memory of a node's host for ``parallel.offload``."""
    host_memory_bytes_per_s: PerSecond = 200e9
    """Memory bandwidth of a node's host,
    shared by its devices (half of two sockets' data sheet).
    """
    processors: Devices
    """Processors (SMs) of a device, each on one tile of a product. CPU: cores of a node,
    shared by its ranks.
    """
    memory_bytes_per_s: PerSecond
    flops_per_s: dict[str, PerSecond]
    """Dense peak by dtype. Without float16: that of bfloat16."""
    product_share: Share = 1.0
    """Fraction of ``flops_per_s`` that the largest products reach."""
    attention_share: Share = 0.4
    """Fraction of the peak that a fused attention kernel reaches in forward;
    causal attention has half the FLOPs.
    """
    torch_attention_shares: tuple[Share, Share] | None = None
    """Fractions of the peak that torch's own attention reaches, in forward and backward; None:
    as the usual kernel.
    """
    attention_backward_share: Share | None = None
    """``attention_share`` of backward, if both were measured on the device; None: published rates,
    fitted constants.
    """
    node_link: Link
    cluster_link: Link
    node_send: Link | None = None
    """One message between two devices of a node, if it was measured; None: ``node_link``."""
    cluster_send: Link | None = None
    """One message between two devices of different nodes, if it was measured; None:
    ``cluster_link``.
    """
    node_rings: list[Ring] = []
    """Measured rings inside a node, shortest first; empty: ``node_link`` whatever their length."""
    cluster_rings: list[Ring] = []
    """Measured rings across nodes, shortest first; empty:
    ``cluster_link`` whatever their length.
    """
    host_link: Link = Link(bytes_per_s=25e9, latency_s=10e-6)
    """Link to host memory, each way."""
    operation_s: Seconds = 0.0
    """Overhead in seconds of each operation, where nothing hides it (CPU)."""
    whole_share: Share = 1.0
    """Fraction of the measured rates (``products``, ``copies``) that a whole layer reaches."""
    products: list[Rate] = []
    """Measured products, smallest first; empty:
    the formula of ``PerformanceModel.product_share``.
    """
    other_products: dict[str, list[Rate]] = {}
    """Measured products of dtypes whose curve is another, by dtype."""
    copies: list[Rate] = []
    """Measured elementwise operations, smallest first; empty: ``memory_bytes_per_s``."""
    messages: dict[Message, Link] = {}
    """Measured links by kind of message, carried by CPU cores; latency per hop. Empty:
    the links above.
    """

    @field_validator("flops_per_s")
    @classmethod
    def _as_fast_as_bfloat16(cls, rates: dict[str, float]) -> dict[str, float]:
        """Add float16: devices compute it as fast as bfloat16."""
        return (
            {**rates, "float16": rates["bfloat16"]}
            if "bfloat16" in rates and "float16" not in rates
            else rates
        )

    @field_validator("products", "copies", "node_rings", "cluster_rings")
    @classmethod
    def _smallest_first(cls, curve: list[Rate] | list[Ring]) -> list[Rate] | list[Ring]:
        sizes = [rate.size for rate in curve]
        if any(a >= b for a, b in pairwise(sizes)):
            raise ValueError(
                f"sizes have to rise, these are {', '.join(f'{size:g}' for size in sizes)}"
            )
        return curve

    @field_validator("other_products")
    @classmethod
    def _each_smallest_first(cls, curves: dict[str, list[Rate]]) -> dict[str, list[Rate]]:
        for curve in curves.values():
            cls._smallest_first(curve)
        return {dtype: curve for dtype, curve in curves.items() if curve}

    @model_validator(mode="after")
    def _leaves_memory(self) -> Self:
        if self.reserved_bytes >= self.memory_bytes:
            raise ValueError(
                f"reserved_bytes {self.reserved_bytes:,} leave nothing of memory_bytes"
                f" {self.memory_bytes:,}"
            )
        return self

    def attention_flops_per_s(self, dtype: str) -> float:
        """Return the peak of attention kernels: for 16 bits that of bfloat16, where it is set."""
        of_16_bits = dtype in ("bfloat16", "float16") and "bfloat16" in self.flops_per_s
        return float(self.flops_per_s["bfloat16" if of_16_bits else dtype])

    @property
    def linked_devices(self) -> int:
        """Number of neighbouring devices that ``node_link`` connects."""
        return max(self.devices_per_node, self.devices_per_domain or 1)

    @property
    def usable_bytes(self) -> int:
        """Bytes of a device that tensors can use."""
        return self.memory_bytes - self.reserved_bytes

    def check_dtype(self, dtype: str) -> None:
        """Check that the compute rate for ``dtype`` is set.

        Raises:
            ConfigError: ``flops_per_s`` has no such dtype.
        """
        if dtype not in self.flops_per_s:
            dtypes = ", ".join(self.flops_per_s) or "none"
            raise ConfigError(
                "MW-PLANNER-001",
                f"hardware {self.name}: [flops_per_s] has no {dtype}, needed for train.dtype ="
                f' "{dtype}"; it has '
                f"{dtypes}: add the rate, or set"
                f" --train.dtype={next(iter(self.flops_per_s), 'float32')}",
            )


def interpolated_seconds(curve: list[Rate], size: float) -> float:
    """Interpolate the seconds of an operation from measured sizes; beyond the last,
    use its rate.
    """
    times = [rate.size / rate.per_s for rate in curve]
    if size >= curve[-1].size:
        return size / curve[-1].per_s
    at = bisect.bisect_left([rate.size for rate in curve], size)
    if at == 0:
        return times[0]  # the start-up time, the same for all small operations
    share = (size - curve[at - 1].size) / (curve[at].size - curve[at - 1].size)
    return times[at - 1] + share * (times[at] - times[at - 1])


def known() -> list[str]:
    """Return the names that ``--cluster`` accepts besides paths."""
    folder = own_folder("configs") / "clusters"
    return sorted(
        entry.name.removesuffix(".toml")
        for entry in folder.iterdir()
        if entry.name.endswith(".toml")
    )


def read_hardware(name: str) -> Hardware:
    """Read a hardware description by name, or from a file.

    Raises:
        ConfigError: no such name or file, or the file is invalid.
    """
    return _parse(hardware_text(name), name)


def hardware_text(name: str) -> str:
    """Return the text of a hardware file by name or path.

    Raises:
        ConfigError: no such name or file, or it cannot be read.
    """
    if name.lower() in known():
        folder = own_folder("configs") / "clusters"
        return (folder / f"{name.lower()}.toml").read_text(encoding="utf-8")
    path = Path(name)
    if not path.is_file():
        close = difflib.get_close_matches(path.stem.lower(), known(), 1)
        hint = f"did you mean {close[0]}? " if close else ""
        problem = (
            "this is a folder"
            if name and path.is_dir()
            else "no hardware of that name, and no such file"
        )
        raise ConfigError(
            "MW-PLANNER-002",
            f"--cluster {name or repr(name)}: {problem}; {hint}known are {', '.join(known())}; or"
            " name a TOML file, such as `meshwright calibrate --out FILE.toml` writes",
        )
    try:
        return read_text(path, MAX_TOML_BYTES)
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise ConfigError(
            "MW-PLANNER-003", f"--cluster {name}: cannot be read ({reason})"
        ) from None


def _parse(text: str, name: str) -> Hardware:
    try:
        values = parse_toml(text)
        return Hardware.model_validate(values, strict=False)
    except ValidationError as error:
        raise ConfigError.join(
            [
                ConfigError(
                    "MW-PLANNER-004",
                    f"{name}: {_key_problem(each['loc'], each['type'], each['msg'])}",
                )
                for each in error.errors()
            ]
        ) from None
    except ValueError as error:
        raise ConfigError("MW-PLANNER-005", f"{name}: not TOML: {error}") from None


def _key_problem(place: tuple[int | str, ...], kind: str, message: str) -> str:
    """Describe a validation error at one key."""
    if place[-1:] == ("[key]",):
        place, kind = place[:-1], "extra_forbidden"
    key, last = ".".join(map(str, place)), str(place[-1]) if place else ""
    if not key:
        return message.removeprefix("Value error, ")
    if kind == "missing":
        return f"{key} is missing"
    if kind == "extra_forbidden":
        names = {*Hardware.model_fields, *Ring.model_fields, *Rate.model_fields, *get_args(Message)}
        close = difflib.get_close_matches(last, sorted(names), 1)
        return f"{key}: there is no such key" + (f"; did you mean {close[0]}?" if close else "")
    return f"{key}: {message[0].lower()}{message[1:]}"
