"""Measures the link between two ranks of a pipeline. Imports PyTorch."""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch
import torch.distributed as dist

from pipewright_pp.torch.profile_keys import Link


def measure_link(group: Any, *, message_bytes: int, device: torch.device, repetitions: int) -> Link:
    """Returns the latency and the bandwidth between the first two ranks of a group. All ranks of the group call it.

    Two ranks send tensors of four bytes and of `message_bytes` back and forth. The times are medians.
    """
    small = _one_way(group, 1, device, repetitions)
    large_elements = max(message_bytes // 4, 1024)
    large = _one_way(group, large_elements, device, repetitions)
    seconds = max(large - small, 1e-9)
    return Link(latency_s=small, bytes_per_s=4 * (large_elements - 1) / seconds)


def _one_way(group: Any, elements: int, device: torch.device, repetitions: int) -> float:
    """Returns half the time in which a tensor goes to the second rank and another one comes back."""
    tensor = torch.zeros(elements, device=device)
    rank = dist.get_rank(group)
    samples = []
    dist.barrier(group)
    for _ in range(repetitions + 2):
        start = time.perf_counter()
        if rank == 0:
            dist.send(tensor, group=group, group_dst=1)
            dist.recv(tensor, group=group, group_src=1)
        elif rank == 1:
            dist.recv(tensor, group=group, group_src=0)
            dist.send(tensor, group=group, group_dst=0)
        if device.type != "cpu":
            torch.accelerator.synchronize(device)
        samples.append((time.perf_counter() - start) / 2)
    result = torch.tensor([statistics.median(samples[2:])], dtype=torch.float64, device=device)
    dist.broadcast(result, group=group, group_src=0)
    return result.item()
