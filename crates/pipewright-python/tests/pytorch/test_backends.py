"""Tests of the back ends of a group: which communicator proves a table, and from where tensors are sent."""

from types import SimpleNamespace

import pytest
from pipewright_pp.torch.backends import device_of_messages
from pipewright_pp.torch.runtime import transport_of

MIXED = "cpu:gloo,cuda:nccl"
GLOO = "cpu:gloo,cuda:gloo,mps:gloo"


def distributed(config):
    """A `torch.distributed` whose groups have these back ends."""
    return SimpleNamespace(get_backend_config=lambda group: config, get_backend=lambda group: config)


@pytest.mark.parametrize(
    "config, device, per_edge, expected",
    [
        (MIXED, "cpu", False, "edge"),
        (MIXED, "cuda", False, "rank"),
        (MIXED, "cuda", True, "edge"),
        (GLOO, "cuda", False, "edge"),
        ("cuda:nccl", "cuda", False, "rank"),
    ],
)
def test_the_communicator_is_that_of_the_device_of_the_stage(config, device, per_edge, expected):
    stage = SimpleNamespace(group=None, device=SimpleNamespace(type=device), p2p_per_edge=per_edge)
    assert transport_of(distributed(config), stage) == expected


@pytest.mark.parametrize(
    "config, layers, expected",
    [
        (MIXED, "cpu", "cpu"),
        (MIXED, "cuda:1", "cuda:1"),
        (GLOO, "cuda:1", "cpu"),
        ("cuda:nccl", "cpu", "cuda"),
        ("cpu:mpi", "cpu", "cpu"),
    ],
)
def test_processes_exchange_tensors_of_a_device_that_their_group_sends_from(config, layers, expected):
    class Device(str):
        @property
        def type(self):
            return self.split(":")[0]

    torch = SimpleNamespace(distributed=distributed(config), device=Device)
    assert device_of_messages(torch, None, Device(layers)) == expected
