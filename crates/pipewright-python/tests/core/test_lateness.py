"""A step and its prediction: the causes of its lateness, and what other plans would gain."""

import json
import random

import pipewright_pp as pw
import pytest


def simulated(name, ranks, microbatches, costs, **options):
    """A step at some costs."""
    return pw.schedule(name, ranks=ranks, microbatches=microbatches, **options).lower(["reduce-grad", "send-recv"]).simulate(costs)


def written(*rows):
    """A step of a trace: for each rank its actions with their start and end in milliseconds."""
    events = [
        {"name": action, "ph": "X", "pid": rank + 1, "tid": rank + 1, "ts": 1e3 * start, "dur": 1e3 * (end - start), "args": {"action": action}}
        for rank, row in enumerate(rows)
        for action, start, end in row
    ]
    return pw.read_trace(json.dumps({"displayTimeUnit": "ms", "traceEvents": events}))


def check(measured, predicted, expected):
    """Compares two steps, whose causes have to be these, with their times in thousandths."""
    found = pw.compare_timelines(measured, predicted)
    assert sum(cause.seconds for cause in found.causes) == pytest.approx(found.late_s, abs=1e-9)
    assert [(cause.kind, cause.rank, cause.stage, cause.from_rank, round(1e3 * cause.seconds)) for cause in found.causes] == expected
    return found


PLAN = simulated("gpipe", 2, 2, pw.Costs(forward=0.01, backward=0.02, hop=0.001))


def test_a_step_as_predicted_has_no_cause():
    found = check(PLAN, PLAN, [])
    assert found.explain() == "The step takes 0.092, and 0.092 were predicted: 0 more (0%)."
    assert {action.why for action in found.actions} == {""}
    assert all(action.late_s == 0 for action in found.actions)


def test_a_slower_kind_of_a_stage_is_named():
    measured = simulated("gpipe", 2, 2, pw.Costs(forward=[0.01, 0.015], backward=0.02, hop=0.001))
    found = check(measured, PLAN, [("action", 1, 1, None, 10)])
    assert found.explain().splitlines()[1] == "- F of stage 1 on rank 1: 0.01 more (100% of the lateness)"
    why = {action.action: action.why for action in found.actions}
    assert (why["1F0"], why["0B0"], why["0F0"]) == ("slower action", "waits for 1B0 of rank 1", "")


def test_a_slower_rank_is_named():
    measured = simulated("gpipe", 2, 2, pw.Costs(forward=[0.01, 0.015], backward=[0.02, 0.03], hop=0.001))
    found = check(measured, PLAN, [("rank", 1, None, None, 30)])
    assert str(found.causes[0]).startswith("all actions of rank 1, which take 1.5 times as long: 0.03 more")
    assert found.ranks[1]["slower"] == pytest.approx(0.03)


def test_slower_messages_are_named():
    measured = simulated("gpipe", 2, 2, pw.Costs(forward=0.01, backward=0.02, hop=0.006))
    found = check(measured, PLAN, [("link", 1, None, 0, 5), ("link", 0, None, 1, 5)])
    assert found.ranks[1]["link"] == pytest.approx(0.006)
    assert found.explain().splitlines()[1] == "- messages from rank 0 to rank 1: 0.005 more (50% of the lateness)"


def test_one_slow_link_and_a_gap_of_the_host_are_named():
    measured = written(
        [("0F0", 0, 10), ("0SEND_F0", 10, 10), ("0F1", 10, 20), ("0SEND_F1", 20, 20), ("0RECV_B0", 20, 58), ("0B0", 58, 78), ("0RECV_B1", 78, 78), ("0B1", 78, 98)],
        [("1RECV_F0", 0, 17), ("1F0", 17, 27), ("1RECV_F1", 27, 27), ("1F1", 27, 37), ("1B0", 40, 57), ("1SEND_B0", 57, 57), ("1B1", 57, 77), ("1SEND_B1", 77, 77)],
    )  # fmt: skip
    found = check(
        measured, PLAN, [("link", 1, None, 0, 6), ("action", 1, 1, None, -3), ("host", 1, None, None, 3)]
    )
    by_name = {action.action: action for action in found.actions}
    assert by_name["1B0"].why == "gap of the host"
    assert by_name["1B0"].measured_start == pytest.approx(0.04)
    assert by_name["1B0"].predicted_start == pytest.approx(0.031)
    assert found.ranks[1] == pytest.approx({"slower": -0.003, "message": 0.01, "link": 0.007, "host": 0.003})


def test_a_backward_in_halves_is_compared_with_a_whole_one():
    halves = pw.schedule("gpipe", ranks=2, microbatches=2).simulate(pw.Costs(forward=0.01, input_backward=0.01, weight_backward=0.01, hop=0.001))
    found = pw.compare_timelines(PLAN, halves)
    assert all(action.predicted_s == pytest.approx(0.02) for action in found.actions if "B" in action.action)


def test_actions_that_the_prediction_lacks_are_named():
    fewer = simulated("gpipe", 2, 1, pw.Costs(forward=0.01, backward=0.02, hop=0.001))
    found = pw.compare_timelines(PLAN, fewer)
    assert {cause.kind for cause in found.causes} >= {"missing"}
    assert next(action for action in found.actions if action.action == "0F1").why == "not in the prediction"
    assert sum(cause.seconds for cause in found.causes) == pytest.approx(found.late_s)


@pytest.mark.parametrize("seed", range(40))
def test_the_causes_add_up_to_the_lateness(seed):
    choice = random.Random(seed)
    name = choice.choice(["gpipe", "1f1b", "interleaved1f1b", "zbvzerobubble", "dualpipev", "zb-h1", "hanayo"])
    ranks = choice.choice([2, 4])
    schedule = pw.schedule(name, ranks=ranks, microbatches=2 * ranks)

    def times():
        return [choice.uniform(0.5, 3) for _ in range(schedule.stages)]

    costs = pw.Costs(forward=times(), input_backward=times(), weight_backward=times(), hop=choice.uniform(0, 1))
    found = pw.compare_timelines(schedule.simulate(costs), schedule.simulate("F=1,I=1,W=1,hop=0.1"))
    assert sum(cause.seconds for cause in found.causes) == pytest.approx(found.late_s)
    assert any(action.is_critical and action.measured_start == 0 for action in found.actions)
    found.gains()


def test_gains_keep_the_memory_and_are_what_the_simulator_says():
    uneven = pw.Costs(forward=[1, 2, 1, 1], backward=[2, 4, 2, 2], hop=0.1)
    step = simulated("1f1b", 4, 8, uneven)
    gains = {gain.change: gain for gain in pw.compare_timelines(step, step).gains()}
    even = simulated("1f1b", 4, 8, pw.Costs(forward=1.25, backward=2.5, hop=0.1))
    assert gains["an even cut"].step_s == pytest.approx(even.makespan)
    assert gains["an even cut"].saved_s == pytest.approx(step.makespan - even.makespan)
    smaller = simulated("1f1b", 4, 16, pw.Costs(forward=[0.5, 1, 0.5, 0.5], backward=[1, 2, 1, 1], hop=0.1))
    assert gains["16 microbatches of half the size"].step_s == pytest.approx(smaller.makespan)
    assert gains["16 microbatches of half the size"].peak == 2
    assert max(gain.peak for gain in gains.values()) <= 4
    assert not {"the order gpipe", "the order zb-h2"} & set(gains)
    ordered = pw.compare_timelines(step, step).gains()
    assert [gain.saved_s for gain in ordered] == sorted((gain.saved_s for gain in ordered), reverse=True)


def test_a_better_order_is_found():
    step = simulated("gpipe", 4, 8, "F=1,I=1,W=1,hop=0.1")
    gains = pw.compare_timelines(step, step).gains()
    assert gains[0].change.startswith("the order zb")
    assert str(gains[0]) == f"{gains[0].change}: {gains[0].step_s:.3g}, {gains[0].saved_s:.3g} less ({gains[0].peak:g} activations at most)"


def test_steps_of_other_pipelines_are_refused():
    with pytest.raises(pw.CostsError, match="the measured step has 2 ranks, and the prediction has 4; predict the same pipeline"):
        pw.compare_timelines(PLAN, simulated("gpipe", 4, 2, "F=1,B=2"))
