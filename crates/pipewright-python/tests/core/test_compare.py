"""Comparisons of schedules that train one model."""

import pathlib

import pytest

import pipewright_pp as pw

PROFILE = pathlib.Path(__file__).parent / "golden" / "profile.toml"
NAMES = ["1f1b", "interleaved1f1b", "zbvzerobubble", "seq1f1b"]


def columns(schedules, *names, **options):
    frame = pw.compare(schedules, **options).frame
    assert set(frame["error"]) == {None}
    return [frame[name] for name in names]


def test_stages_are_parts_of_one_model():
    # With costs of a stage, a schedule with more stages trains a larger model.
    costs = pw.Costs(forward=1, backward=2, hop=0.1)
    of_stage = [pw.schedule(name, ranks=4, microbatches=16).simulate(costs).makespan for name in NAMES[:2]]
    assert of_stage[1] > 1.8 * of_stage[0]
    [makespan, share] = columns(NAMES[:2], "makespan", "stages_per_rank", ranks=4, microbatches=16, costs=costs)
    assert share == [1, 2] and makespan[0] == of_stage[0] and 0.85 < makespan[1] / makespan[0] < 1


def test_costs_of_a_model_are_divided_by_the_stages():
    model = pw.Costs.of_model(forward=8, backward=16, hop=0.1)
    of_rank = pw.Costs(forward=2, backward=4, hop=0.1)
    sizes = {"ranks": 4, "microbatches": 8}
    assert columns(NAMES, "makespan", **sizes, costs=model) == columns(NAMES, "makespan", **sizes, costs=of_rank)
    for name in NAMES:
        schedule = pw.schedule(name, **sizes)
        [[compared]] = columns([schedule], "makespan", costs=model)
        assert schedule.simulate(model).makespan == compared
        assert pw.schedule(name, **sizes, costs=model).simulate().makespan == compared
        assert schedule.lower().simulate(model).makespan == compared


def test_costs_of_a_model_have_a_text():
    costs = pw.Costs.of_model(forward=8, hop=0.5)
    assert costs == pw.Costs.of_model("F=8,hop=0.5") != pw.Costs(forward=8, hop=0.5)
    assert eval(repr(costs), {"Costs": pw.Costs}) == costs
    for problem, call in {
        "one number for each time": lambda: pw.Costs.of_model("F=1:2"),
        "as a text and by name": lambda: pw.Costs.of_model("F=1", hop=1),
    }.items():
        with pytest.raises(ValueError, match=problem):
            call()


def test_an_order_that_depends_on_costs_has_the_costs_of_its_stages():
    sizes = {"ranks": 4, "microbatches": 8}
    model = pw.Costs.of_model("F=4,I=8,W=2,hop=0.2")
    assert pw.schedule("zb-greedy", **sizes, costs=model).rows == pw.schedule("zb-greedy", **sizes, costs="F=1,I=2,W=0.5,hop=0.2").rows
    [compared] = columns(["zb-greedy"], "makespan", **sizes, costs=model)
    assert compared == [pw.schedule("zb-greedy", **sizes, costs=model).simulate().makespan]


def test_different_ranks_need_the_costs_of_a_model():
    schedules = [pw.schedule("1f1b", ranks=ranks, microbatches=16) for ranks in (2, 4, 8)]
    with pytest.raises(ValueError, match="have 2 and 4 ranks, .*Costs.of_model"):
        pw.compare(schedules, costs="F=1,B=2")
    [makespan] = columns(schedules, "makespan", costs=pw.Costs.of_model(forward=8, backward=16))
    # A rank computes 16 microbatches, and the last one waits for a forward and half a backward of each rank before it.
    assert makespan == [16 * 24 / ranks + (ranks - 1) * (8 + 8) / ranks for ranks in (2, 4, 8)]


def test_schedules_programs_and_names_are_compared_alike():
    schedule = pw.schedule("1f1b", ranks=2, microbatches=4)
    items = ["1F1B", schedule, schedule.lower(), pw.read_csv(schedule.csv())]
    frame = pw.compare(items, ranks=2, microbatches=4, costs="hop=0.1").frame
    rows = list(zip(*(frame[name] for name in frame if name != "name")))
    assert len(set(rows)) == 1 and frame["name"][:2] == ["1f1b", "1f1b"]


def test_a_profile_gives_seconds_and_bytes():
    frame = pw.compare(NAMES[:2], ranks=2, microbatches=4, profile=PROFILE).frame
    for name, makespan, peak in zip(frame["name"], frame["makespan"], frame["peak_bytes"]):
        predicted = pw.schedule(name, ranks=2, microbatches=4).simulate(profile=PROFILE)
        assert (makespan, peak) == (predicted.makespan, max(predicted.peak_bytes))


def test_a_schedule_without_this_size_has_a_reason():
    comparison = pw.compare(["dualpipev", "1f1b"], ranks=4, microbatches=3)
    assert comparison.frame["makespan"][0] is None and "microbatches" in comparison.frame["error"][0]
    assert comparison.frame["error"][1] is None and len(comparison) == 2
    assert comparison.frame["error"][0] in repr(comparison)
    assert f'colspan="5" class="reason">{comparison.frame["error"][0]}' in comparison._repr_html_()


def test_a_comparison_is_a_table_and_a_page(tmp_path):
    comparison = pw.compare(NAMES, ranks=4, microbatches=8)
    assert [line.split()[0] for line in repr(comparison).splitlines()] == ["schedule", *NAMES, "time:"]
    assert comparison._repr_html_().count("<tr>") == 5
    comparison.view(tmp_path / "page.html")
    assert (tmp_path / "page.html").read_text() == comparison.html()
    assert comparison.html().count("<svg") == 4


@pytest.mark.parametrize(
    ("problem", "arguments"),
    {
        "schedules is a text": ("1f1b", {"ranks": 2, "microbatches": 2}),
        "schedules is not a list": (5, {}),
        "names, `Schedule` objects and `Program` objects": ([5], {}),
        "1f1b has no size; add ranks and microbatches": (["1f1b"], {"ranks": 2}),
        "costs and profile are given": (["1f1b"], {"ranks": 2, "microbatches": 2, "costs": "F=1", "profile": PROFILE}),
        "nearest name is `1f1b`|did you mean": (["1f2b"], {"ranks": 2, "microbatches": 2}),
    }.items(),
)
def test_bad_arguments_are_refused(problem, arguments):
    schedules, options = arguments
    with pytest.raises((TypeError, ValueError, pw.ScheduleError), match=problem):
        pw.compare(schedules, **options)
