"""Objects are pickled and copied, also to other processes."""

import copy
import pathlib
import pickle
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import pipewright_pp as pw
import pytest

NAMES = [entry["name"] for entry in pw.schedules()]


def check(value):
    """Checks the copies of an object, and the object that comes back from `pickle`."""
    assert copy.copy(value) is value and copy.deepcopy([value])[0] is value
    restored = pickle.loads(pickle.dumps(value))
    assert restored == value and repr(restored) == repr(value)
    return restored


@pytest.mark.parametrize("name", NAMES)
def test_schedules_and_programs(name):
    schedule = pw.schedule(name, ranks=4, microbatches=8, costs="F=1,B=2.5,hop=0.1")
    restored = check(schedule)
    assert restored.csv() == schedule.csv() and restored.slices == schedule.slices
    assert restored.simulate().summary == schedule.simulate().summary
    for program in (schedule.lower(), schedule.lower(level="compute"), pw.read_csv(schedule.csv(), slices=schedule.slices)):
        assert check(program).csv() == program.csv()


def test_a_schedule_without_costs_keeps_none():
    schedule = pw.schedule("gpipe", ranks=2, microbatches=2)
    assert check(schedule).simulate().makespan == schedule.simulate("F=1,I=1,W=1").makespan


def test_costs_and_profiles():
    check(pw.Costs(forward=[1, 2.5], hop=0.1))
    check(pw.Profile(pathlib.Path(__file__).parent / "golden" / "profile.toml"))


def test_what_was_predicted_is_copied_and_not_pickled():
    timeline = pw.schedule("gpipe", ranks=2, microbatches=2).simulate()
    assert copy.deepcopy(timeline) is timeline
    with pytest.raises(TypeError, match="Timeline"):
        pickle.dumps(timeline)


def makespan_of(schedule):
    return schedule.simulate().makespan


def test_other_processes_get_schedules():
    schedules = [pw.schedule(name, ranks=2, microbatches=4) for name in ("gpipe", "1f1b")]
    with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as pool:
        assert list(pool.map(makespan_of, schedules)) == [makespan_of(schedule) for schedule in schedules]
