"""Choice and order of this machine's GPUs, set before CUDA first enumerates them."""

from __future__ import annotations

import os

from meshwright.config import Launch, RunConfig, default_world_size
from meshwright.errors import ConfigError

VISIBLE, ORDER = "CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER"


def choose_devices(launch: Launch) -> None:
    """Make CUDA show the GPUs of ``launch.devices`` as 0, 1, ..., in this process and its children.

    Local rank i takes the i-th. The numbers are those of ``nvidia-smi``. If CUDA_VISIBLE_DEVICES is
    set, they are positions in its list instead, and no GPU outside that list is used.

    Raises:
        ConfigError: CUDA_VISIBLE_DEVICES has no such position.
    """
    os.environ.setdefault(ORDER, "PCI_BUS_ID")  # CUDA's default gives number 0 to the fastest GPU
    if not launch.devices:
        return
    wanted = [int(number) for number in launch.devices.split(",")]
    if VISIBLE in os.environ:
        visible = [name.strip() for name in os.environ[VISIBLE].split(",") if name.strip()]
        beyond = [number for number in wanted if number >= len(visible)]
        if beyond:
            raise ConfigError(
                "MW-LAUNCH-014",
                f"launch.devices = {launch.devices!r} names device {beyond[0]}, and"
                f" {VISIBLE}={os.environ[VISIBLE]} has {len(visible)} (numbered from 0, in its"
                " order): name those, or unset it",
            )
        os.environ[VISIBLE] = ",".join(visible[number] for number in wanted)
    else:
        os.environ[VISIBLE] = ",".join(map(str, wanted))


def num_local_ranks(config: RunConfig) -> int:
    """Return the number of ranks to start on this machine, for the devices that it has.

    Raises:
        ConfigError: as :func:`num_devices` does; or there are more ranks than devices.
    """
    available = num_devices(config.launch, config.train.device)
    return default_world_size(config.parallel, config.launch, available)


def num_devices(launch: Launch, device: str) -> int:
    """Return the number of accelerators of this machine that the run may use; 0 on CPU.
    ``device``: ``train.device``.

    Raises:
        ConfigError: the run needs one and there is none, or more are configured than torch sees.
    """
    if device == "cpu":
        return 0
    import torch

    count = torch.cuda.device_count()
    check_devices(launch, count)
    if count == 0 and device == "cuda":
        raise ConfigError(
            "MW-LAUNCH-032",
            "train.device = 'cuda', but torch sees no GPU here: use 'auto' or 'cpu', or a CUDA"
            " build of torch",
        )
    return count


def check_devices(launch: Launch, num_visible: int) -> None:
    """Check that torch sees all of ``launch.devices``; CUDA hides the first missing one,
    and all after it.

    Raises:
        ConfigError: fewer are visible than configured; the message has both numbers.
    """
    wanted = launch.devices.split(",") if launch.devices else []
    if len(wanted) <= num_visible:
        return
    visible = f"the first {num_visible} of them" if num_visible else "no GPU"
    raise ConfigError(
        "MW-LAUNCH-015",
        f"launch.devices = {launch.devices!r} names {len(wanted)}"
        f" GPU{'s' * (len(wanted) > 1)}, and torch sees {visible}: `nvidia-smi -L` lists the GPUs;"
        " on CPU leave launch.devices out",
    )
