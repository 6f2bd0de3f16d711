"""Tests of profiles: sizes, kinds of layers, times that grow with the work, and layers that are not a chain."""

import time
from dataclasses import replace

import pipewright_pp as pw
import pytest
from pipewright_pp.torch import ChainError, Link, profile
from pipewright_pp.torch.profile_keys import Layers, ProfileParts, merge_equal, profile_keys


def layer(kind="block", forward=1.0, activations=8):
    """A layer with a time and the bytes of its activations."""
    return Layers(kind, 1, forward, 1.0, 1.0, 1.5, 0.0, 4, 16, activations)


def test_layers_of_a_kind_get_their_mean_and_neighbours_one_entry():
    given = [("a", layer(forward=1.0)), ("a", layer(forward=3.0, activations=6)), ("b", layer("head")), ("a", layer(forward=2.0))]
    merged = merge_equal(given)
    assert [(one.kind, one.count, one.forward_s, one.activation_bytes) for one in merged] == [
        ("block", 2, 2.0, 8),
        ("head", 1, 1.0, 8),
        ("block", 1, 2.0, 8),
    ]


def test_keys_are_those_that_a_profile_has():
    parts = ProfileParts([layer()], Link(1e-5, 1e9), "a machine", rows=2, threads=1, assumed=("link.latency_s",))
    keys = pw.Profile(profile_keys(parts)).to_dict()
    assert keys["rows"] == 2 and keys["assumed"] == ["link.latency_s"]
    assert keys["device"]["threads_per_rank"] == 1 and "memory_bytes" not in keys["device"]
    assert keys["layers"][0]["weight_activation_bytes"] == keys["layers"][0]["activation_bytes"] == 8


def test_a_whole_backward_takes_at_most_its_halves_and_at_least_one():
    for whole, expected in [(1.5, 1.5), (0.5, 1.0), (2.5, 2.0)]:
        parts = ProfileParts([replace(layer(), backward_s=whole)], Link(1e-5, 1e9), "a machine", rows=2)
        assert pw.Profile(profile_keys(parts)).to_dict()["layers"][0]["backward_s"] == expected


def model(torch, width=64):
    """An embedding, two equal blocks, and a head that is wider."""
    block = lambda: torch.nn.Sequential(torch.nn.Linear(width, width), torch.nn.Tanh())  # noqa: E731
    return [torch.nn.Embedding(10, width), block(), block(), torch.nn.Linear(width, 64 * width)]


def measured(torch, layers, **options):
    """The entries of the measured profile for two rows of three tokens."""
    ids = torch.zeros(2, 3, dtype=torch.long)
    return profile(layers, ids, repetitions=3, warmup=1, **options).to_dict()


def test_the_profile_of_a_model_has_its_sizes(torch):
    keys = measured(torch, model(torch), optimizer=torch.optim.AdamW, memory_bytes=1 << 30)
    found = [(entry["kind"], entry["count"], entry["output_bytes"], entry["parameter_bytes"]) for entry in keys["layers"]]
    hidden = 2 * 3 * 64 * 4
    assert found == [
        ("Embedding", 1, hidden, 10 * 64 * 4),
        ("Sequential", 2, hidden, (64 * 64 + 64) * 4),
        ("Linear", 1, 64 * hidden, (64 * 64 * 64 + 64 * 64) * 4),
    ]
    # The token ids; the input of a block and the result of its tanh, of which the second block shares its input; nothing new.
    assert [entry["activation_bytes"] for entry in keys["layers"]] == [2 * 3 * 8, 2 * hidden, 0]
    assert keys["rows"] == 2 and keys["device"]["memory_bytes"] == 1 << 30
    assert keys["assumed"] == ["link.latency_s", "link.bytes_per_s"]


def test_times_have_the_work_of_their_actions(torch):
    backwards = []

    class Slow(torch.autograd.Function):
        """Takes some time in the forward and in the backward, and writes down that its backward ran."""

        @staticmethod
        def forward(context, x, name, forward_s, backward_s):
            context.name, context.seconds = name, backward_s
            time.sleep(forward_s)
            return x.clone()

        @staticmethod
        def backward(context, gradient):
            backwards.append(context.name)
            time.sleep(context.seconds)
            return gradient, None, None, None

    class Layer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(64))

        def forward(self, x):
            return Slow.apply(x, "input", 0.02, 0.03) * Slow.apply(self.weight, "weight", 0.0, 0.04)

    embedding, slow = measured(torch, [model(torch)[0], Layer()], optimizer=torch.optim.SGD)["layers"]
    assert embedding["input_backward_s"] == 0 and embedding["weight_backward_s"] > 0
    assert slow["forward_s"] >= 0.02 and slow["input_backward_s"] >= 0.03 and slow["optimizer_s"] > 0
    assert slow["weight_backward_s"] >= 0.04 and slow["backward_s"] >= 0.07
    assert backwards.count("input") == backwards.count("weight"), "I leaves weights out, W inputs, and B has both"


def test_the_loss_is_part_of_the_last_layer(torch):
    calls = []

    def loss_fn(output, target):
        calls.append(target)
        return output.square().mean()

    layers = model(torch)
    keys = measured(torch, layers, loss_fn=loss_fn, target="the target", link=Link(1e-6, 1e9))
    assert set(calls) == {"the target"} and keys["layers"][-1]["output_bytes"] == 4
    assert keys["link"]["latency_s"] == 1e-6 and keys.get("assumed", []) == []
    assert all(parameter.grad is None for layer in layers for parameter in layer.parameters())


def test_a_profile_is_planned(torch):
    plan = pw.plan(profile(model(torch), torch.zeros(2, 3, dtype=torch.long), repetitions=2, warmup=1), ranks=2, microbatches=4)
    assert plan.predicted_step_s > 0


def test_a_layer_may_change_its_input_in_place(torch):
    layers = [torch.nn.Linear(3, 4), torch.nn.ReLU(inplace=True), torch.nn.Linear(4, 4)]
    entries = profile(layers, torch.zeros(2, 3), repetitions=1, warmup=0).to_dict()["layers"]
    assert [entry["kind"] for entry in entries] == ["Linear", "ReLU", "Linear"]
    assert entries[1]["input_backward_s"] > 0


def refused(torch, message, layers, example=None, layer=None, **options):
    """Checks the error for layers that cannot be measured."""
    given = torch.zeros(2, 3, dtype=torch.long) if example is None else example
    with pytest.raises(ChainError, match=message) as error:
        profile(layers, given, **{"repetitions": 1, "warmup": 0} | options)
    assert error.value.layer == layer


def test_layers_that_are_not_a_chain_are_refused(torch):
    layers = model(torch)
    refused(torch, "there are no layers", [])
    refused(torch, "repetitions is 0", layers, repetitions=0)
    refused(torch, "warmup is -20; a number from 0 was expected", layers, warmup=-20)
    refused(torch, "the example is an empty tuple", layers, ())
    wrong = [layers[0], torch.nn.Linear(7, 7)]
    refused(torch, r"layer 1 \(Linear\) does not run on \[2, 3, 64\], the output of the layer before it", wrong, layer=1)

    class Dictionary(torch.nn.Module):
        def forward(self, x):
            return {"x": x}

    refused(torch, r"layer 1 \(Dictionary\) returns \['dict'\]; a tensor or a tuple of tensors", [layers[0], Dictionary()], layer=1)
