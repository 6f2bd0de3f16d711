"""The back ends of a process group: PyTorch can have one for each type of device."""

from __future__ import annotations

from typing import Any


def backends_of(distributed: Any, group: Any) -> dict[str, str]:
    """Returns the back end of a group for each type of device, such as `{"cpu": "gloo", "cuda": "nccl"}`."""
    entries = (entry.split(":", 1) for entry in str(distributed.get_backend_config(group)).lower().split(","))
    return {entry[0].strip(): entry[1].strip() for entry in entries if len(entry) == 2}


def device_of_messages(torch: Any, group: Any, of_layers: Any) -> Any:
    """Returns the device whose tensors the processes of a group exchange: the layers' if its back end sends from there.

    Gloo sends tensors of the processor.
    """
    backends = backends_of(torch.distributed, group)
    if backends.get(of_layers.type, "gloo") != "gloo":
        return of_layers
    others = (device for device, backend in backends.items() if backend != "gloo")
    return torch.device("cpu" if "gloo" in backends.values() else next(others, "cpu"))
