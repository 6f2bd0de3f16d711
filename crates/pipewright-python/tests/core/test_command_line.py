"""The package gives the texts and the numbers that the command line prints.

`golden/make.py` has written the golden data with the binary.
"""

import json
import pathlib

import pytest

import pipewright_pp as pw

FOLDER = pathlib.Path(__file__).parent / "golden"
GOLDEN = json.loads((FOLDER / "command_line.json").read_text())
PROFILE = FOLDER / "profile.toml"
NAMES = sorted(GOLDEN["schedules"])


def test_all_schedules_are_listed():
    assert sorted(entry["name"] for entry in pw.schedules()) == NAMES
    assert all(entry["summary"] for entry in pw.schedules())


@pytest.mark.parametrize("name", NAMES)
def test_rows_and_lowered_rows(name):
    schedule = pw.schedule(name, ranks=4, microbatches=8)
    csv = GOLDEN["schedules"][name]["csv"]
    assert schedule.csv() == csv["compute"]
    assert schedule.lower(level="comms").csv() == csv["comms"]
    assert schedule.lower(level="full").csv() == csv["full"]
    read = pw.read_csv(csv["compute"], slices=schedule.slices)
    assert read.csv() == csv["compute"]
    assert read.rows == schedule.rows
    assert read.stage_to_rank == schedule.stage_to_rank


@pytest.mark.parametrize("name", NAMES)
def test_predictions(name):
    costs = pw.Costs.parse(GOLDEN["costs"])
    golden = GOLDEN["schedules"][name]
    program = pw.schedule(name, ranks=4, microbatches=8, costs=costs).lower()
    assert program.validate() == {}
    timeline = program.simulate(costs)
    assert timeline.summary == golden["simulate"]
    assert timeline.makespan == golden["simulate"]["makespan"]
    assert timeline.bubble_fraction == golden["simulate"]["bubble_fraction"]
    assert timeline.peak_activations == golden["simulate"]["peak_activations"]
    plain = pw.schedule(name, ranks=4, microbatches=8).lower(level="comms")
    assert plain.simulate(logical=True).summary == golden["logical"]


def test_predictions_with_exchanges():
    costs = pw.Costs.parse(GOLDEN["exchange_costs"])
    schedule = pw.schedule("dualpipev", ranks=4, microbatches=8, costs=costs)
    assert schedule.lower().simulate(costs).summary == GOLDEN["exchanges"]
    assert pw.read_csv(schedule.csv()).simulate(costs).summary == GOLDEN["exchanges"]


def test_predictions_at_a_profile():
    program = pw.schedule("1f1b", ranks=4, microbatches=8).lower()
    assert program.simulate(profile=PROFILE).summary == GOLDEN["profile"]
    chosen = program.simulate(profile=pw.Profile(PROFILE), boundaries=[4, 8, 12], recompute="0,1")
    assert chosen.summary == GOLDEN["profile_recompute"]
    assert chosen.peak_bytes == GOLDEN["profile_recompute"]["peak_bytes"]


def test_plans():
    plan = pw.plan(PROFILE, ranks=4, microbatches=16, memory="8GiB", data_parallel=1, time_limit=600)
    golden = GOLDEN["plan"]
    assert (plan.gap, plan.lower_bound_s, plan.stopped) == (golden["gap"], golden["lower_bound_s"], False)
    assert len(plan.plans) == len(golden["plans"])
    keys = ("name", "ranks", "microbatches", "microbatch_size", "boundaries", "data_parallel", "predicted_step_s")
    keys += ("bubble_fraction", "peak_bytes")
    for ours, printed in zip(plan.plans, golden["plans"]):
        assert {key: getattr(ours, key) for key in keys} == {key: printed[key] for key in keys}
        assert ours.schedule.stage_to_rank == printed["stage_to_rank"]
        assert ours.program().validate() == {}
        assert ours.simulate().makespan == pytest.approx(ours.predicted_step_s, rel=1e-9)
        assert ours.simulate().peak_bytes == ours.peak_bytes
