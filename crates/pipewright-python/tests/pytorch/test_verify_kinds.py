"""Tests that `verify` names each kind of fault, and that a mistake or a lost rank is a sentence and never a hang."""

import copy
import doctest
import importlib
import os
import re
import socket
import threading
import time

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

import pipewright_pp.torch as pt
from kinds import KINDS, all_kinds, mistakes
from pipewright_pp.torch.exchange import Exchange
from pipewright_pp.torch.matching import match
from pipewright_pp.torch.records import Parameter, StageRecord
from pipewright_pp.torch.sketches import _signs, add, difference, parts_of_sum, sketch


@pytest.fixture(scope="module")
def reports(run_ranks):
    """The reports of both ranks by name."""
    return run_ranks(2, all_kinds)


@pytest.mark.parametrize("name", KINDS)
def test_a_kind_is_named(reports, name):
    for of_rank in reports:
        first = of_rank[name].first
        assert (first and (first.fault, first.stage, first.microbatch, first.action)) == KINDS[name][1], str(of_rank[name])


#: What a caller may do wrong, and a part of the message that both ranks get.
MISTAKES = {
    "stages": "a list of PipelineStage was expected, or a mapping from the indices of stages to modules",
    "no stages": "no rank has stage 0 of replica 0; each stage on one rank was expected",
    "twice": "the ranks [0, 1] have stage 0 of replica 0",
    "no model": "rank 0 has no uncut model; pass the module",
    "not a model": "the uncut model is a int; a torch.nn.Module was expected",
    "meta": "0.0.weight of the uncut model is on the device meta and has no values",
    "batch on another device": "the uncut model is on cpu, and the batch on meta; move both to one device",
    "no tensor": "the inputs are str; a tensor, a tuple or a dictionary with tensors was expected",
    "few rows": "the batch has 2 rows, and the pipeline computes 4 microbatches",
    "no loss": "the uncut model does not return a loss; pass loss_fn(output, target)",
    "failing loss": "the loss fails on the outputs of the whole batch: ZeroDivisionError: division by zero",
    "not a loss": "loss_fn returns a int that is not a loss",
    "failing": "the step of rank 1 fails: ZeroDivisionError: division by zero",
    "figures": "the step returns a dictionary with ['lose']; the keys loss, losses, grad_norm, tokens were expected",
    "not numbers": "the step returns 'much' as loss; numbers were expected",
    "no forward": "the step runs no forward of a stage",
    "another model": "the parameter 0.0.weight of stage 0, of shape [8, 8], has no counterpart in the uncut model",
    "deadline": "deadline_s is 0; a number above 0 was expected",
    "replica": "replica is 2 of 1",
    "tolerance": "tolerance is -1.0; a number above 0 was expected",
    "waits": "the step of rank 0 has not ended after 1.5 s",
    "text": "deadline_s is '60'; a number above 0 was expected",
    "no number": "replicas is None; a whole number was expected",
    "count": "tokens is 'many'; a whole number was expected",
    "not a step": "step is a int; a function was expected",
    "not a function": "loss_fn is a str; a function was expected",
    "lazy": "0.weight of the uncut model has no values, because it is lazy; run its module once before the step",
    "lazy stage": " has no values, because it is lazy; run its module once before the step",
    "old checkpoint": " only runs without gradients, as in a checkpoint with use_reentrant=True",
    "no text": "the step of rank 1 fails: AssertionError",
}


@pytest.fixture(scope="module")
def messages(run_ranks):
    """The messages of both ranks by name."""
    return run_ranks(2, mistakes)


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_a_sentence_on_all_ranks(messages, name):
    for of_rank in messages:
        assert MISTAKES[name] in of_rank[name]


def test_a_norm_is_reported_once(reports):
    for of_rank in reports:
        assert [finding.fault for finding in of_rank["one norm"].findings] == [pt.Fault.NORM]


def test_another_value_is_compared_with_its_place(reports):
    for of_rank in reports:
        assert "0.weight differs from 1.weight of the uncut model" in str(of_rank["one other weight"])
        assert "0.0.weight differs from 2.0.weight of the uncut model" in str(of_rank["another seed"])


def free_port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def lose(rank, folder, place, method):
    """Rank 1 ends before it calls `verify` or within its step, or raises an error. Rank 0 writes its message and its time."""
    from datetime import timedelta
    from pathlib import Path

    import torch.distributed as dist
    from faults import half, plain

    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", init_method=method, rank=rank, world_size=2, timeout=timedelta(seconds=60))
    model, x, y = plain()
    own = half(model, rank)

    def step():
        if rank == 1 and place != "within":
            raise KeyError("target")
        if rank == 1:
            os._exit(0)
        if place == "while rank 0 uses the store":
            dist.distributed_c10d._get_default_store().get("never")
        dist.recv(torch.empty(1), src=1)

    if rank == 1 and place == "before":
        os._exit(0)
    limit, start = 4 if place in ("before", "within") else 50, time.monotonic()
    try:
        pt.verify(step, model, x, y, stages={rank: own}, loss_fn=torch.nn.functional.mse_loss, deadline_s=limit)
    except pt.VerifyError as error:
        (Path(folder) / f"message {rank}").write_text(f"{error} after {time.monotonic() - start:.0f} s")
    os._exit(0)


LOST = {
    "before": r"rank 1 has not sent its check in time.* after \d s",
    "within": r"the step of rank 0 .* after 1?\d s",
    "while rank 0 waits": r"the step of rank 1 fails: KeyError: 'target' after \d s",
    "while rank 0 uses the store": r"the step of rank 1 fails: KeyError: 'target' after \d s",
}


@pytest.mark.parametrize("place", LOST)
def test_a_lost_rank_is_named(tmp_path, place):
    # Only this store has one request at a time.
    method = f"tcp://127.0.0.1:{free_port()}" if "store" in place else (tmp_path / "rendezvous").as_uri()
    context = torch.multiprocessing.get_context("spawn")
    processes = [context.Process(target=lose, args=(rank, str(tmp_path), place, method)) for rank in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(120)
        assert process.exitcode == 0
    assert re.fullmatch(LOST[place], (tmp_path / "message 0").read_text())


def leave(rank, port, folder):
    """Rank 0 has the store in its process, fails and ends at once. Rank 1 calls `verify` later, and writes its message."""
    from pathlib import Path

    import torch.distributed as dist
    from faults import half, plain

    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    model, x, y = plain()
    time.sleep(rank)
    try:
        pt.verify(lambda: None, None, x, y, stages={rank: half(model, rank)}, deadline_s=10)
    except pt.VerifyError as error:
        (Path(folder) / f"message {rank}").write_text(str(error))
    os._exit(0)


def test_rank_0_stays_until_others_have_read(tmp_path):
    port = free_port()
    context = torch.multiprocessing.get_context("spawn")
    processes = [context.Process(target=leave, args=(rank, port, str(tmp_path))) for rank in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(120)
    assert "rank 0 has no uncut model" in (tmp_path / "message 0").read_text()
    assert (tmp_path / "message 1").read_text().startswith("rank 0: rank 0 has no uncut model")


def test_64_ranks_exchange_and_a_silent_one_is_named():
    store = torch.distributed.HashStore()
    found = [None] * 64

    def talk(rank):
        exchange = Exchange(store, rank, 64, "a", 20)
        exchange.agree("check", None)
        exchange.publish("record", bytes(10_000_000 if rank == 1 else 10))
        found[rank] = len(exchange.receive("record", (rank + 1) % 64, time.monotonic() + 20))
        exchange.close()

    threads = [threading.Thread(target=talk, args=(rank,)) for rank in range(64)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [10_000_000] + [10] * 63
    assert store.num_keys() == 0
    with pytest.raises(pt.VerifyError, match="rank 5 has not sent its record in time") as error:
        Exchange(store, 0, 64, "b", 20).receive("record", 5, time.monotonic() + 0.2)
    assert error.value.rank == 5


def test_64_stages_are_verified():
    torch.manual_seed(1)
    layers = [torch.nn.Linear(4, 4) for _ in range(64)]
    x, y, loss_fn = torch.randn(6, 4), torch.randn(6, 4), torch.nn.functional.mse_loss

    def step(wrong=None):
        for rows, target in zip(x.split(2), y.split(2)):
            value = rows
            for index, layer in enumerate(layers):
                value = layer(value) * (2 if index == wrong else 1)
            (loss_fn(value, target) / 3).backward()

    model = torch.nn.Sequential(*layers)
    stages = dict(enumerate(layers))
    assert pt.verify(step, model, x, y, stages=stages, loss_fn=loss_fn).is_sound
    model.zero_grad()
    report = pt.verify(lambda: step(37), model, x, y, stages=stages, loss_fn=loss_fn)
    assert (report.first.fault, report.first.stage, report.first.action) == (pt.Fault.CROSSED, 38, "38RECV_F0")
    with pytest.raises(pt.PipelineDiffers, match="stage 38, microbatch 0") as error:
        report.raise_if_different()
    assert error.value.findings == report.findings


def test_the_model_and_its_gradients_do_not_change():
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))
    x = torch.randn(8, 4)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.get_rng_state()
    stages = {0: copy.deepcopy(model)}
    loss_fn = lambda output, _: output.square().mean()  # noqa: E731
    pt.verify(lambda: loss_fn(stages[0](x), None).backward(), model, x, stages=stages, loss_fn=loss_fn)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert torch.equal(torch.get_rng_state(), state)
    assert not stages[0]._forward_hooks and not stages[0]._forward_pre_hooks


def test_a_sharded_tensor_and_untested_versions_are_refused(monkeypatch):
    class Sharded(torch.Tensor):
        def full_tensor(self):
            return self

    with pytest.raises(pt.VerifyError, match=r"w is sharded \(a DTensor\); verify the pipeline before FSDP"):
        sketch(torch.randn(3).as_subclass(Sharded), "w")
    monkeypatch.setattr(torch, "__version__", "2.11.0")
    with pytest.raises(pt.UntestedVersion, match="PyTorch 2.11.0 was never tried"):
        pt.verify(lambda: None, None, None, stages={})


@pytest.mark.parametrize("shape", [(), (3,), (7, 300), (5000,), (2, 3, 4000)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_sketch_is_linear_and_sees_each_change(shape, dtype):
    generator = torch.Generator().manual_seed(2)
    one, other = (torch.randn(shape, generator=generator).to(dtype) for _ in range(2))
    both = sketch(one.float() + other.float())
    assert difference(add([sketch(one), sketch(other)]), both) < 1e-5
    assert sketch(one).norm == pytest.approx(float(one.double().norm()), rel=0.2)
    assert difference(sketch(one.clone()), sketch(one)) == 0
    if one.numel() > 1:
        swapped = one.flatten().clone()
        swapped[0], swapped[-1] = one.flatten()[-1], one.flatten()[0]
        assert difference(sketch(swapped.view(shape)), sketch(one)) > 1e-4
        weights, rest = parts_of_sum([sketch(3 * one.float() - other.float())], [[sketch(one)], [sketch(other)]])
        assert weights == pytest.approx([3, -1], abs=1e-4) and rest < 1e-5
    assert difference(sketch(one * float("nan")), sketch(one)) == float("inf")
    before, changed = sketch(one), one.clone()
    kept = sketch(changed)
    changed.zero_()
    assert difference(kept, before) == 0, "a sketch does not change with its tensor"


def test_a_sketch_does_not_depend_on_the_context_of_the_step():
    values = torch.randn(90_000)
    expected = sketch(values)
    _signs.cache_clear()
    with torch.autocast("cpu", torch.bfloat16), torch.device("meta"):
        assert difference(sketch(values), expected) == 0


@pytest.mark.parametrize("count", [20, 5000, 200_000])
def test_infinite_values_are_equal_at_the_same_places(count):
    def mask(*places, value=float("-inf")):
        values = torch.arange(count, dtype=torch.float32)
        values[list(places)] = value
        return sketch(values)

    assert difference(mask(3, 7), mask(3, 7)) == 0
    assert mask(3, 7).norm < float("inf")
    for other in (mask(3), mask(3, 8), mask(3, 7, value=float("inf")), mask(3, 7, value=0.0)):
        assert difference(mask(3, 7), other) == difference(other, mask(3, 7)) == float("inf")
    lowest = torch.finfo(torch.float32).min
    assert difference(mask(*range(15), value=lowest), mask(*range(15), value=lowest)) == 0
    assert difference(mask(*range(15), value=lowest), mask(*range(14), value=lowest)) > 0.1


@pytest.mark.parametrize("name", ["findings", "verify"])
def test_the_examples_of_the_docstrings_run(name):
    result = doctest.testmod(importlib.import_module(f"pipewright_pp.torch.{name}"))
    assert result.attempted > 4 and result.failed == 0


def names_of(own, model, stage=1):
    """The names in the model of the values of a stage."""
    parameters = {name: Parameter(sketch(value), True) for name, value in own.items()}
    record = StageRecord(stage, 0, 0, parameters=parameters)
    return match([record], {name: sketch(value) for name, value in model.items()})[stage]


def test_layers_of_equal_values_get_the_names_in_their_order():
    layers = {f"{index}.{name}": torch.full((2, 2), float(name == "a")) for index in range(6) for name in "ab"}
    own = {name: value for name, value in layers.items() if name[0] in "01"}
    parameters = {name: Parameter(sketch(value), True) for name, value in own.items()}
    records = [StageRecord(stage, 0, 0, parameters=parameters) for stage in range(3)]
    found = match(records, {name: sketch(value) for name, value in layers.items()})
    assert [other for stage in range(3) for other in found[stage].values()] == list(layers)


def test_names_follow_values_and_then_the_module():
    weight, zeros = torch.randn(4, 4), torch.zeros(4)
    model = {"0.weight": torch.randn(4, 4), "0.bias": zeros, "1.weight": weight, "1.bias": zeros}
    assert names_of({"0.weight": weight, "0.bias": zeros}, model) == {"0.weight": "1.weight", "0.bias": "1.bias"}
    assert names_of({"a.weight": weight, "a.bias": zeros + 1}, model) == {"a.weight": "1.weight", "a.bias": "1.bias"}
    assert names_of({"1.weight": weight + 1}, model) == {"1.weight": "1.weight"}
    with pytest.raises(pt.VerifyError, match="the parameter b of stage 1, of shape \\[2\\], has no counterpart"):
        names_of({"b": torch.zeros(2)}, model)
