"""Wrong input is an exception with fields, and never a panic."""

import pathlib
import pickle
import subprocess
import sys

import pytest

import pipewright_pp as pw

SOUND = "0F0,0SEND_F0,0RECV_B0,0B0\n1RECV_F0,1F0,1B0,1SEND_B0\n"
PROFILE = pathlib.Path(__file__).parent / "golden" / "profile.toml"


def check(error, call, message, **fields):
    """Checks that `call` raises `error` with a part of its message and with fields."""
    with pytest.raises(error) as raised:
        call()
    assert message in str(raised.value)
    assert {name: getattr(raised.value, name) for name in fields} == fields
    return raised.value


def schedule(name="1f1b", **size):
    return lambda: pw.schedule(name, **{"ranks": 4, "microbatches": 8, **size})


def read(text, **sizes):
    return lambda: pw.read_csv(text, **sizes)


def test_names_and_sizes_of_schedules():
    check(pw.ScheduleError, schedule("zbvzerobuble"), "did you mean `zbvzerobubble`?", suggestion="zbvzerobubble")
    check(pw.ScheduleError, schedule("nothing like it"), "unknown schedule", suggestion=None)
    check(ValueError, schedule(microbatches=0), "at least one microbatch")
    check(pw.ScheduleError, schedule(slices=2), "has no setting `slices`")
    check(pw.ScheduleError, schedule(ranks=1000, microbatches=4_000_000), "too many")


@pytest.mark.parametrize("value", [-1, 1 << 32, 1 << 200, -(1 << 200)])
def test_numbers_out_of_range(value):
    check(ValueError, schedule(ranks=value), "ranks is")
    check(ValueError, schedule(microbatches=value), "microbatches is")
    check(ValueError, schedule("zb-greedy", memory_limit=[value]), "memory_limit is")
    check(ValueError, lambda: pw.plan(PROFILE, ranks=value), "ranks is")
    check(ValueError, read(SOUND, stage_to_rank=[0, value]), "stage_to_rank is")


@pytest.mark.parametrize("value", [2.0, True, "4", None, [4], object()])
def test_no_numbers(value):
    check(TypeError, schedule(ranks=value), "not a whole number")


def test_texts_that_are_no_schedules():
    check(pw.ParseError, read("0F0\n1F0, 1SENT_F0\n"), "did you mean `SEND_F`?", path=None, line=2, column=7)
    check(pw.ParseError, read('"0F0\n'), "quote", line=1, column=1)
    check(pw.ParseError, read("\n"), "no action in any row", line=None)
    check(pw.ParseError, read("0F0\n3F0\n"), "stage 1 is missing")
    check(pw.ParseError, read("0F4294967295\n"), "too large")
    check(pw.ParseError, read("0F0,0B0\n", stage_to_rank=[0, 1]), "1 row for 2 ranks")
    check(pw.ScheduleError, read(SOUND, slices=2), "do not make microbatches of 2")


def test_files(tmp_path):
    missing = check(FileNotFoundError, read(tmp_path / "none.csv"), "none.csv")
    assert missing.filename == str(tmp_path / "none.csv")
    check(OSError, read(tmp_path), "irectory")
    (tmp_path / "binary.csv").write_bytes(b"\xff\xfe\x00")
    check(OSError, read(tmp_path / "binary.csv"), "UTF-8")
    wrong = tmp_path / "wrong.csv"
    wrong.write_text("0F0,0Q0\n")
    check(pw.ParseError, read(wrong), "wrong.csv:1:6", path=str(wrong), line=1, column=6)
    check(TypeError, read(3), "not int")
    check(OSError, lambda: pw.read_csv(SOUND).simulate().view(tmp_path), "name a file")


def test_rows():
    check(pw.ParseError, lambda: pw.Program([["0F0"], ["1F0", "1SENT_F0"]]), "SEND_F", rank=1, position=1)
    check(TypeError, lambda: pw.Program("0F0"), "read a text with")
    check(TypeError, lambda: pw.Program(["0F0"]), "a row is a text")
    check(TypeError, lambda: pw.Program([[0]]), "rank 0, position 0")
    check(TypeError, lambda: pw.Program(3), "list of lists")
    check(pw.ParseError, lambda: pw.Program([]), "one row per rank")


def test_passes():
    made = pw.schedule("1f1b", ranks=2, microbatches=2)
    check(pw.LowerError, lambda: made.lower(["sendrecv"]), "the passes are merge-bw")
    check(pw.LowerError, lambda: made.lower("send-recv,send-early"), "name send-early first")
    check(pw.LowerError, lambda: made.lower(["wait-send"]), "name send-recv before it")
    check(pw.LowerError, lambda: made.lower(["unshard=0"]), "is not a setting")
    check(pw.LowerError, lambda: pw.read_csv(SOUND).lower(["send-recv"]), "already communicates")
    check(ValueError, lambda: made.lower(level="half"), "unknown level")
    check(ValueError, lambda: made.lower(["send-recv"], level="comms"), "leave one out")
    check(ValueError, lambda: pw.read_csv(SOUND).lower(level="comms"), "have messages already")
    check(TypeError, lambda: made.lower(3), "passes")
    stuck = pw.read_csv("0F0,1F0,0B0\n2F0,2B0,1B0\n", stage_to_rank=[0, 0, 1])
    check(ValueError, lambda: stuck.lower(["send-recv"]), "no rank can continue")


def test_every_violation_is_a_field():
    error = check(pw.ValidationError, lambda: pw.read_csv("0B0,0F0\n1B0,1F0\n").validate(), "2 violations", omitted=0)
    expected = [(rank, 0, f"{rank}B0 needs {rank}F0, which comes only at position 1; move one of them") for rank in (0, 1)]
    assert error.violations == expected
    assert str(error.violations[0]).startswith("rank 0, position 0: 0B0 needs")
    assert error.violations[1].rank == 1
    again = pickle.loads(pickle.dumps(error))
    assert (str(again), again.violations) == (str(error), error.violations)
    check(pw.ValidationError, lambda: pw.read_csv("0B0,0F0\n").simulate(), "0B0 needs 0F0")
    check(pw.ValidationError, lambda: pw.read_csv(SOUND).validate(level="full"), "not gathered")


def test_verdicts_on_transports():
    both_send_first = (
        "0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0B0,0RECV_B1,0B1\n"
        "1RECV_F0,1F0,1B0,1SEND_B0,1RECV_F1,1F1,1B1,1SEND_B1\n"
    )
    program = pw.read_csv(both_send_first)
    assert program.validate(transport="edge") == {"edge": "sound"}
    assert program.validate(transport="pair", eager="1MiB") == {"pair": "sound"}
    error = check(pw.ValidationError, lambda: program.validate(transport="pair"), "may hang", verdicts={"pair": "may hang"})
    assert (0, 3) in [(rank, position) for rank, position, _ in error.violations]
    everywhere = check(pw.ValidationError, lambda: program.validate(transport="all"), "pair: may hang")
    assert everywhere.verdicts["buffered"] == "sound"
    crossed = (
        "0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0B0,0RECV_B1,0B1\n"
        "1RECV_F1,1RECV_F0,1F0,1B0,1SEND_B0,1F1,1B1,1SEND_B1\n"
    )
    error = check(pw.ValidationError, lambda: pw.read_csv(crossed).validate(transport="edge"), "crossed")
    assert error.violations[0] == (1, 0, "1RECV_F1 gets the tensor of 0SEND_F0 from rank 0")
    check(ValueError, lambda: program.validate(transport="nccl"), "use buffered, edge, pair, rank or all")
    check(ValueError, lambda: program.validate(eager=3), "transport")
    check(ValueError, lambda: program.validate(transport="edge", message_bytes=[3]), "eager")
    check(ValueError, lambda: program.validate(transport="edge", eager="3 gigs"), "16GiB")
    check(ValueError, lambda: pw.read_csv("0F0,0B0\n").validate(transport="edge"), "no messages")
    check(pw.ValidationError, lambda: program.simulate(transport="pair"), "may hang", verdicts={"pair": "may hang"})
    check(ValueError, lambda: program.simulate(transport="all"), "one transport")
    check(ValueError, lambda: program.simulate(transport="pair", logical=True), "transport is for costs")
    check(ValueError, lambda: program.simulate(grouped=True), "transport")


def test_costs():
    for wrong in ({"forward": -1}, {"hop": float("nan")}, {"backward": float("inf")}, {"attention": 2.0}):
        check(pw.CostsError, lambda: pw.Costs(**wrong), "the cost")
    check(pw.CostsError, lambda: pw.Costs(forward=[1, 2], backward=[1, 2, 3]), "stages")
    check(pw.CostsError, lambda: pw.Costs.parse("F=1,G=2"), "`G=2` is not a cost")
    check(pw.CostsError, lambda: pw.read_csv(SOUND).simulate("F=1:2:3"), "2 stages")
    check(TypeError, lambda: pw.Costs(forward="1"), "forward is neither a number nor a list")
    check(TypeError, lambda: pw.read_csv(SOUND).simulate(3), "costs")
    check(pw.CostsError, lambda: pw.read_csv(SOUND).simulate(recompute="7"), "stage 7")
    check(ValueError, lambda: pw.read_csv(SOUND).simulate(recompute="some"), "not a choice")
    check(ValueError, lambda: pw.read_csv(SOUND).simulate("F=1", logical=True), "ticks have no costs")


def test_profiles(tmp_path):
    check(pw.ProfileError, lambda: pw.Profile("{}"), "missing field")
    check(pw.ProfileError, lambda: pw.Profile("[link]\nlatency = 3\n"), "latency")
    check(pw.ProfileError, lambda: pw.Profile("[link\n"), "unclosed table")
    check(FileNotFoundError, lambda: pw.Profile(tmp_path / "p.toml"), "p.toml")
    check(TypeError, lambda: pw.Profile(3), "a profile is a path")
    wrong = pw.Profile(PROFILE).to_dict()
    wrong["layers"][0]["forward_s"] = -1
    wrong["link"]["bytes_per_s"] = 0
    error = check(pw.ProfileError, lambda: pw.Profile(wrong), "forward_s")
    assert len(error.problems) == 2


def test_plans():
    check(pw.PlanError, lambda: pw.plan(PROFILE, ranks=0), "use at least one of both")
    small = check(pw.PlanError, lambda: pw.plan(PROFILE, ranks=2, memory="1MiB"), "no plan fits", memory=1 << 20)
    assert small.needed > small.memory
    assert small.rank in (0, 1)
    made = pw.schedule("1f1b", ranks=2, microbatches=2).lower()
    check(pw.PlanError, lambda: made.simulate(profile=PROFILE, boundaries=[3, 5]), "boundaries")
    many = pw.schedule("1f1b", ranks=99, microbatches=2).lower()
    check(pw.PlanError, lambda: many.simulate(profile=PROFILE), "layers cannot fill 99 stages; use at most")
    check(pw.PlanError, lambda: pw.plan(PROFILE, ranks=4, data_parallel=3), "do not divide")
    check(ValueError, lambda: pw.plan(PROFILE, ranks=4, memory="many"), "16GiB")
    check(ValueError, lambda: pw.plan(PROFILE, ranks=4, time_limit=-1), "time_limit")
    check(ValueError, lambda: pw.plan(PROFILE, ranks=4, time_limit=float("nan")), "time_limit")
    check(pw.PlanError, lambda: pw.plan(PROFILE, ranks=(1 << 32) - 1, data_parallel=1), "there is no plan for")


def test_a_schedule_that_does_not_fit_into_the_memory():
    # In a process with little address space: the size is refused before anything is allocated.
    script = (
        "import resource, pipewright_pp as pw\n"
        "resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))\n"
        "try:\n"
        "    pw.schedule('gpipe', ranks=2000, microbatches=20000)\n"
        "except pw.OutOfMemoryError as error:\n"
        "    assert isinstance(error, MemoryError) and error.needed > error.free, error\n"
        "    print(error)\n"
    )
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert "use fewer microbatches" in ran.stdout, ran.stderr
