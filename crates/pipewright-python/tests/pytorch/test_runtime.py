"""Tests of plans and schedules that PyTorch executes: gradients and losses are equal to the model without a pipeline.

Ranks are Gloo processes.
"""

import pipewright_pp as pw
import pytest
from pipewright_pp.torch import PlanMismatch, annotate, program_for, program_of, schedule, stages, timeline_of, versions
from pipewright_pp.torch.agreement import Part, compare

LAYERS, WIDTH, ROWS = 8, 6, 8


def layers_of(torch):
    """The layers of a small model; the same in every process."""
    torch.manual_seed(7)
    block = lambda: torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.Tanh())  # noqa: E731
    return [block() for _ in range(LAYERS)]


def batch_of(torch):
    """Inputs and targets, one row for each microbatch."""
    generator = torch.Generator().manual_seed(3)
    return torch.randn(ROWS, WIDTH, generator=generator), torch.randn(ROWS, WIDTH, generator=generator)


def loss_fn(output, target):
    """The mean loss of a microbatch."""
    return ((output - target) ** 2).mean()


def step(runtime, of_rank, inputs, targets):
    """Takes a step; returns the losses, on the rank of the last stage."""
    held = {stage.stage_index for stage in of_rank}
    is_last = of_rank[0].num_stages - 1 in held
    losses = []
    runtime.step(
        *([inputs] if 0 in held else []), target=targets if is_last else None, losses=losses if is_last else None
    )
    return [loss.item() for loss in losses]


def gradients(of_rank, boundaries):
    """The gradients of this rank's parameters by layer and name in the layer."""
    first = [0, *boundaries]
    named = {}
    for stage in of_rank:
        for path, parameter in stage.submod.named_parameters():
            layer, name = path.split(".", 1)
            named[first[stage.stage_index] + int(layer), name] = parameter.grad
    return named


def train(rank, plan_text, boundaries, options):
    """Executes one step of a schedule on this rank; returns the losses and the gradients."""
    import torch

    plan = pw.read_csv(plan_text)
    of_rank = stages(plan, layers_of(torch), boundaries=boundaries)
    runtime = schedule(plan, of_rank, loss_fn, **options)
    inputs, targets = batch_of(torch)
    return step(runtime, of_rank, inputs, targets), gradients(of_rank, boundaries)


def expected(torch):
    """The losses and the gradients of the model without a pipeline."""
    layers = layers_of(torch)
    inputs, targets = batch_of(torch)
    model = torch.nn.Sequential(*layers)
    losses = [loss_fn(model(row), target) for row, target in zip(inputs.split(1), targets.split(1))]
    sum(losses).div(ROWS).backward()
    named = {(index, name): value.grad for index, layer in enumerate(layers) for name, value in layer.named_parameters()}
    return [loss.item() for loss in losses], named


def check(torch, results):
    """Compares the results of all ranks with the model without a pipeline."""
    losses, named = expected(torch)
    found = {key: value for _, of_rank in results for key, value in of_rank.items()}
    assert sorted(found) == sorted(named)
    for key, value in named.items():
        torch.testing.assert_close(found[key], value, rtol=1e-5, atol=1e-7, msg=lambda text, key=key: f"{key}: {text}")
    (reported,) = [of_rank for of_rank, _ in results if of_rank]
    assert reported == pytest.approx(losses, rel=1e-6)


#: Schedules with the first layers of their stages.
SCHEDULES = {
    "1f1b": [5],
    "zb-h1": [3],
    "zbvzerobubble": [1, 2, 7],
    "interleavedzerobubble": [2, 3, 6],
    "dualpipev": [2, 4, 6],
}
PASSES = ["reduce-grad=deferred", "send-recv", "wait-send=1"]


def all_of_two_ranks(rank, folder):
    """Everything that the tests compare of two ranks, by name. Traces are written into the folder."""
    made = {name: pw.schedule(name, ranks=2, microbatches=ROWS) for name in SCHEDULES}
    results = {name: train(rank, made[name].csv(), cut, {}) for name, cut in SCHEDULES.items()}
    if versions.load()[1].has_waits:
        results["program"] = train(rank, made["1f1b"].lower(passes=PASSES).csv(), [4], {})
    trace(rank, folder)
    refused = {"mismatches": mismatches(rank), "differing": differing(rank), "failing": failing(rank)}
    return results | refused | {"recorded": record(rank)}


@pytest.fixture(scope="module")
def two_ranks(run_ranks, tmp_path_factory):
    """The results of both ranks by name."""
    folder = tmp_path_factory.mktemp("traces")
    results = run_ranks(2, all_of_two_ranks, str(folder))
    traces = [folder / f"{rank}.json" for rank in range(2)]
    return {name: [of_rank[name] for of_rank in results] for name in results[0]} | {"traces": traces}


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_schedule_of_pipewright_computes_the_same_in_pytorch(torch, two_ranks, name):
    check(torch, two_ranks[name])


def test_three_ranks_compute_the_same(torch, run_ranks):
    text = pw.schedule("zb-greedy", ranks=3, microbatches=ROWS).csv()
    check(torch, run_ranks(3, train, text, [1, 4], {}))


def test_a_program_with_messages_is_executed_as_it_is(torch, two_ranks):
    if "program" not in two_ranks:
        pytest.skip("only tables of PyTorch 2.15 have waits")
    check(torch, two_ranks["program"])


def record(rank):
    """Runs PyTorch's own 1F1B with names of its actions; returns the names in the order of execution."""
    import torch
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B
    from torch.profiler import ProfilerActivity, profile

    layers = layers_of(torch)[rank * 3 : rank * 3 + 3]
    of_rank = [PipelineStage(torch.nn.Sequential(*layers), rank, 2, torch.device("cpu"))]
    runtime = annotate(Schedule1F1B(of_rank[0], 4, loss_fn=loss_fn))
    step(runtime, of_rank, *batch_of(torch))
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        step(runtime, of_rank, *batch_of(torch))
    ranges = sorted((event.time_range.start, event.name) for event in profiler.events() if event.name.startswith("PP:"))
    return [name.removeprefix("PP:") for _, name in ranges], program_of(runtime).rows[rank]


def test_the_single_stage_1f1b_runs_in_the_order_that_is_read(two_ranks):
    for recorded, read in two_ranks["recorded"]:
        computes = [cell for cell in read if cell.strip("0123456789") in ("F", "B")]
        assert [cell for cell in recorded if cell.strip("0123456789") in ("F", "B")] == computes
        assert {cell for cell in recorded if "_" in cell} == {cell for cell in read if "_F" in cell or "_B" in cell}


def trace(rank, folder):
    """Profiles a step of a schedule with two stages on each rank; writes the trace of this rank."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    plan = pw.schedule("zbvzerobubble", ranks=2, microbatches=ROWS)
    of_rank = stages(plan, layers_of(torch), boundaries=[2, 4, 6])
    runtime = schedule(plan, of_rank, loss_fn)
    step(runtime, of_rank, *batch_of(torch))
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        step(runtime, of_rank, *batch_of(torch))
    profiler.export_chrome_trace(f"{folder}/{rank}.json")


def test_the_traces_of_a_step_are_its_timeline(two_ranks, tmp_path):
    timeline = timeline_of(two_ranks["traces"])
    executed = program_for(pw.schedule("zbvzerobubble", ranks=2, microbatches=ROWS))
    events = timeline.events
    found = sorted(zip(events["rank"], events["action"]))
    waits = versions.load()[1].has_waits
    cells = [(rank, cell) for rank, row in enumerate(executed.rows) for cell in row if waits or "WAIT" not in cell]
    assert found == sorted(cells)
    starts = {action: start for action, start in zip(events["action"], events["start"])}
    ends = {action: end for action, end in zip(events["action"], events["end"])}
    for action, end in ends.items():
        stage, message = action[0], action[1:]
        if message.startswith("RECV_"):
            sender = int(stage) + (-1 if message.startswith("RECV_F") else 1)
            assert end >= starts[f"{sender}{message.replace('RECV', 'SEND')}"] - 1e-9, action
    assert 0 < timeline.bubble_fraction < 1
    timeline.view(tmp_path / "step.html")
    assert "measured" in (tmp_path / "step.html").read_text()


def mismatches(rank):
    """The messages of the errors for plans, layers, stages and groups that do not fit each other."""
    import torch

    layers = layers_of(torch)
    plan = pw.schedule("1f1b", ranks=2, microbatches=4)
    wide = pw.schedule("1f1b", ranks=3, microbatches=4)
    other = pw.schedule("zbvzerobubble", ranks=2, microbatches=4)
    fitting = stages(plan, layers, boundaries=[4])
    no_waits = plan.lower(passes=["reduce-grad", "send-recv"])
    offloads = pw.schedule("gpipe", ranks=2, microbatches=4).lower(passes=[*PASSES, "offload"])
    descending = pw.Program([["0F1", "0F0", "0B1", "0B0"], ["1F1", "1F0", "1B1", "1B0"]])
    tries = {
        "no plan": lambda: stages("1f1b", layers),
        "no cut": lambda: stages(plan, layers),
        "boundaries": lambda: stages(plan, layers, boundaries=[2, 4]),
        "empty stage": lambda: stages(plan, layers, boundaries=[8]),
        "not a module": lambda: stages(plan, [*layers, 7], boundaries=[4]),
        "group": lambda: stages(wide, layers, boundaries=[2, 4]),
        "no stages": lambda: schedule(plan, [], loss_fn),
        "not a stage": lambda: schedule(plan, layers, loss_fn),
        "other stages": lambda: schedule(other, fitting, loss_fn),
        "no waits": lambda: schedule(no_waits, fitting, loss_fn),
        "offload": lambda: schedule(offloads, fitting, loss_fn),
        "order": lambda: schedule(descending, fitting, loss_fn),
        "slices": lambda: schedule(pw.schedule("seq1f1b", ranks=2, microbatches=4, slices=2), fitting, loss_fn),
    }
    found = {}
    for name, attempt in tries.items():
        try:
            attempt()
        except PlanMismatch as error:
            found[name] = str(error)
    return found


def test_plans_that_do_not_fit_are_refused(two_ranks):
    for found in two_ranks["mismatches"]:
        expected = {
            "no plan": "read a str; a plan was expected",
            "no cut": "a Schedule has no cut; pass the first layers",
            "boundaries": "2 boundaries make 3 stages; the schedule has 2",
            "empty stage": "stage 1 has no layer: the boundaries are [8], and the model has 8 layers",
            "not a module": "layer 8 is 7; a torch.nn.Module was expected",
            "group": "the process group has 2 processes, and the plan has 3 ranks",
            "no stages": "there is no stage",
            "not a stage": "read a Sequential; a torch.distributed.pipelining.PipelineStage was expected",
            "other stages": "the stages are of 2 ranks with 2 stages in total; the plan has 2 ranks with 4 stages",
            "no waits": "the program has no wait for 8 of its sends",
            "offload": "the program has 0OFFLOAD0, and PyTorch's runtime does not move",
            "order": "stage 1 computes the microbatches in the order [1, 0]",
            "slices": "the schedule cuts each microbatch into 2 slices",
        }
        for name, message in expected.items():
            if name != "no waits" or versions.load()[1].has_waits:
                assert message in found.get(name, "no error"), name


def differing(rank):
    """The message of the error if each rank has another plan."""
    import torch

    plan = pw.schedule(["1f1b", "gpipe"][rank], ranks=2, microbatches=4)
    same = pw.schedule("1f1b", ranks=2, microbatches=4)
    tries = [(plan, [4]), (same, [[4], [5]][rank])]
    return [message_of(lambda: schedule(plan, stages(plan, layers_of(torch), boundaries=cut), loss_fn)) for plan, cut in tries]


def message_of(attempt):
    """The message of the `PlanMismatch` that a call raises."""
    try:
        attempt()
    except PlanMismatch as error:
        return str(error)


def test_ranks_with_different_plans_are_refused(two_ranks):
    for tables, cuts in two_ranks["differing"]:
        assert tables.startswith("the ranks [1] execute another program than rank 0; plan on one rank")
        assert cuts.startswith("stage 0 ends before layer 4, and stage 1 begins with layer 5, because ranks have different cuts")


def test_plans_with_different_cuts_or_recomputation_are_refused():
    compare([Part(cut=([4], [])), Part(cut=([4], []))])
    for other in (([5], []), ([4], [1])):
        with pytest.raises(PlanMismatch, match=r"the plans of the ranks \[1\] have another cut or recomputation than rank 0's"):
            compare([Part(cut=([4], [])), Part(cut=other)])
    with pytest.raises(PlanMismatch, match="stage 0 begins with layer 1"):
        compare([Part(layers={0: range(1, 4)})])


def failing(rank):
    """The message of the error if the plan does not fit the stages of rank 1 alone."""
    import torch

    plan = pw.schedule("1f1b", ranks=2, microbatches=4)
    wider = pw.schedule("zbvzerobubble", ranks=2, microbatches=4)
    of_rank = stages(plan, layers_of(torch), boundaries=[4])
    return message_of(lambda: schedule([plan, wider][rank], of_rank, loss_fn))


def test_an_error_of_one_rank_is_raised_on_all(two_ranks):
    first, second = two_ranks["failing"]
    assert second.startswith("the stages are of 2 ranks with 2 stages in total; the plan has 2 ranks with 4 stages")
    assert first == f"rank 1: {second}"


def test_without_a_process_group_the_error_says_so(torch):
    with pytest.raises(PlanMismatch, match="there is no process group; call torch.distributed.init_process_group"):
        stages(pw.schedule("1f1b", ranks=2, microbatches=4), layers_of(torch), boundaries=[4])
