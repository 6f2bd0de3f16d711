"""Rows, events, pictures and what the documentation shows."""

import doctest
import importlib.util
import json
import pathlib
import re
import time
import xml.etree.ElementTree as xml

import pytest

import pipewright_pp as pw

HERE = pathlib.Path(__file__).parent
PROFILE = HERE / "golden" / "profile.toml"
#: The model of the page's prediction.
MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 128256,
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
}


@pytest.fixture(name="program")
def zbv():
    return pw.schedule("zbvzerobubble", ranks=4, microbatches=8).lower()


def test_rows_keep_empty_cells():
    rows = [["0F0", None, "0B0"], ["1F0", "1B0", ""]]
    program = pw.Program(rows)
    assert program.rows == [["0F0", None, "0B0"], ["1F0", "1B0", None]]
    assert program.csv() == "0F0,,0B0\n1F0,1B0,\n"
    assert (program.ranks, program.stages, program.microbatches, program.level) == (2, 2, 1, "compute")
    assert program == pw.read_csv(program.csv())
    assert program != pw.read_csv("0F0,0B0\n")


def test_sizes_that_rows_do_not_show():
    program = pw.Program([["0F0"], ["2F0"]], stage_to_rank=[0, 0, 1], microbatches=2)
    assert (program.stages, program.microbatches, program.stage_to_rank) == (3, 2, [0, 0, 1])


def test_passes_by_name(program):
    schedule = pw.schedule("zbvzerobubble", ranks=4, microbatches=8)
    assert schedule.lower("send-early,send-recv") == schedule.lower(["send-early", "send-recv"]) == program
    assert "0UNSHARD" in schedule.lower(["unshard=2", "send-recv"]).csv()
    assert pw.read_csv(schedule.csv()).lower(["send-early", "send-recv"]) == program
    assert program.lower() == program


def test_overlaps_stay_whole_if_tokens_are_exchanged():
    costs = pw.Costs.parse("exchange=0.8,exchanges=8")
    program = pw.schedule("dualpipev", ranks=2, microbatches=8, costs=costs).lower()
    assert "OVERLAP_F_B" in program.csv()
    schedule = pw.schedule("dualpipev", ranks=2, microbatches=8)
    apart = schedule.lower()
    assert "OVERLAP_F_B" not in apart.csv()
    makespan = program.simulate(costs).makespan
    assert makespan < 0.9 * apart.simulate(costs).makespan
    # Rows without messages are lowered for the costs.
    assert pw.read_csv(schedule.csv()).simulate(costs).makespan == makespan


def test_overlap_is_a_setting_of_two_schedules():
    costs = pw.Costs.parse("exchange=0.8,exchanges=8")
    for name in ["zbvzerobubble", "interleaved1f1b"]:
        plain, paired = (
            pw.schedule(name, ranks=2, microbatches=8, overlap=overlap, costs=costs).lower() for overlap in [False, True]
        )
        assert ("OVERLAP_F_B" in plain.csv(), "OVERLAP_F_B" in paired.csv()) == (False, True)
        assert paired.simulate(costs).makespan < plain.simulate(costs).makespan


def test_names_and_settings_of_schedules():
    assert pw.schedule("ZBV", ranks=4, microbatches=8).name == "zbvzerobubble"
    sliced = pw.schedule("seq1f1b", ranks=4, microbatches=8, slices=4)
    assert (sliced.slices, sliced.microbatches) == (4, 8)
    assert sliced.lower().validate() == {}
    limited = pw.schedule("zb-greedy", ranks=4, microbatches=8, memory_limit=4)
    each = pw.schedule("zb-greedy", ranks=4, microbatches=8, memory_limit=[4, 4, 4, 4])
    assert limited == each
    assert limited.lower().simulate().peak_activations == [4, 4, 4, 4]


def test_events_are_columns(program):
    timeline = program.simulate()
    events = timeline.events
    assert list(events) == ["rank", "action", "stage", "microbatch", "slice", "start", "end"]
    assert len({len(column) for column in events.values()}) == 1
    assert max(events["end"]) - min(events["start"]) == timeline.makespan
    first = {name: column[0] for name, column in events.items()}
    assert first == {"rank": 0, "action": "0F0", "stage": 0, "microbatch": 0, "slice": 0, "start": 0.0, "end": 1.0}


def test_events_of_slices_have_their_microbatch():
    events = pw.schedule("seq1f1b", ranks=2, microbatches=3, slices=4).lower().simulate().events
    places = dict(zip(events["action"], zip(events["microbatch"], events["slice"])))
    assert (places["0F5"], places["1RECV_F11"]) == ((1, 1), (2, 3))
    assert {microbatch for microbatch, _ in places.values()} <= {0, 1, 2, None}


def test_activations_have_buffers():
    program = pw.schedule("interleaved1f1b", ranks=2, microbatches=2).lower()
    first = program.lifetimes()[0]
    assert first["live"][0] == {"stage": 0, "microbatch": 0, "first": 0, "last": len(program.rows[0]) - 3, "slot": 0}
    assert (first["slots"], len(first["live"])) == (4, 4)
    together = program.lifetimes(by="microbatch")[0]
    assert (together["slots"], set(together["live"][0])) == (2, {"microbatch", "first", "last", "slot"})
    with pytest.raises(ValueError, match='by is "rank"; use "stage" or "microbatch"'):
        program.lifetimes(by="rank")


def test_costs_have_names():
    assert pw.Costs.parse("F=1") == pw.Costs.parse("F=1.0") != pw.Costs.parse("F=2")
    assert pw.Costs(forward=1, backward=2) == pw.Costs.parse("F=1,B=2")
    assert pw.Costs(forward=[1, 1, 2], hop=0.1) == pw.Costs.parse("F=1:1:2,hop=0.1")
    assert pw.Costs() != pw.Costs(hop=1)
    assert eval(repr(pw.Costs(forward=1, hop=0.25)), {"Costs": pw.Costs}) == pw.Costs(forward=1, hop=0.25)


def test_pictures(program, tmp_path):
    schedule = pw.schedule("zbvzerobubble", ranks=4, microbatches=8)
    timeline = program.simulate()
    for picture in (schedule._repr_svg_(), program._repr_svg_(), timeline._repr_svg_(), timeline.svg(memory_lane=True)):
        assert xml.fromstring(picture).tag.endswith("svg")
    assert "4 ranks" in timeline.svg()
    json.loads(timeline.trace())
    assert "zbvzerobubble: 4 ranks, 8 stages, 8 microbatches" in timeline.html()
    timeline.view(tmp_path / "x.html")
    page = (tmp_path / "x.html").read_text()
    assert page.lower().startswith("<!doctype html>")
    assert "zbvzerobubble: 4 ranks, 8 stages, 8 microbatches" in page


def test_a_notebook_shows_neither_large_nor_unsound_programs():
    assert pw.schedule("1f1b", ranks=64, microbatches=512)._repr_svg_() is None
    assert pw.read_csv("0B0,0F0\n")._repr_svg_() is None
    large = pw.schedule("gpipe", ranks=8, microbatches=40000).lower().simulate()
    with pytest.raises(ValueError, match="too large to draw"):
        large.svg()


def test_a_notebook_does_not_simulate_large_programs():
    large = pw.schedule("gpipe", ranks=8, microbatches=40000).lower()
    start = time.perf_counter()
    assert large._repr_svg_() is None
    shown_s = time.perf_counter() - start
    large.simulate()
    assert shown_s < (time.perf_counter() - start) / 10


def test_a_notebook_shows_no_picture_instead_of_an_error_but_can_be_interrupted(monkeypatch):
    def interrupt(*_arguments, **_fields):
        raise KeyboardInterrupt

    monkeypatch.setattr(pw.errors, "ValidationError", interrupt)
    with pytest.raises(KeyboardInterrupt):
        pw.read_csv("0B0,0F0\n")._repr_svg_()


def test_profiles_in_all_forms():
    profile = pw.Profile(PROFILE)
    assert profile.layer_count == 13
    for source in (str(PROFILE), PROFILE.read_text(), profile.to_dict(), json.dumps(profile.to_dict()), profile.to_toml()):
        assert pw.Profile(source) == profile


def test_a_plan_names_the_unlike_ranks_that_it_uses():
    layer = {"kind": "block", "count": 8, "forward_s": 1, "input_backward_s": 1, "weight_backward_s": 1}
    sizes = {"output_bytes": 0, "parameter_bytes": 0, "activation_bytes": 0}
    profile = {"link": {"latency_s": 0, "bytes_per_s": 1e9}, "layers": [layer | sizes]}
    assert pw.plan(profile, ranks=2, microbatches=8).machines == []
    # A rank of a thousandth of the speed would be the slowest with a single layer.
    plan = pw.plan(profile | {"rank": [{}, {"speed": 0.001}, {"speed": 0.5}]}, ranks=3, microbatches=8)
    assert (plan.machines, plan.ranks) == ([0, 2], 2)
    assert len(plan.program().rows) == 2
    unlike = profile | {"rows": 4, "rank": [{"speed": 3}, {}]}
    replicas = pw.plan(unlike, ranks=2, microbatches=8, data_parallel=2)
    assert (replicas.machines, replicas.batch_shares) == ([0, 1], [3, 1])
    assert replicas.simulate().makespan == pytest.approx(replicas.predicted_step_s)
    with pytest.raises(pw.PlanError, match="3 sections"):
        pw.plan(profile | {"rank": [{}] * 3}, ranks=2, microbatches=8)


def test_a_plan_without_further_arguments():
    plan = pw.plan(PROFILE, ranks=2, memory="8GiB", data_parallel=1)
    assert plan.microbatches * plan.microbatch_size == 8
    assert plan.gap < 0.1
    assert plan.schedule.ranks == plan.ranks == 2
    assert len(plan.boundaries) == plan.schedule.stages - 1
    assert "boundaries" in repr(plan)


def test_the_documentation_runs(tmp_path, monkeypatch):
    page = HERE.parents[3] / "docs" / "python.md"
    if not page.exists():
        pytest.skip("the tests are not in a clone of the repository, so the book's page is not tested")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "profile.toml").write_text(PROFILE.read_text())
    (tmp_path / "schedule.csv").write_text("0F0,0B0\n")
    (tmp_path / "config.json").write_text(json.dumps(MODEL))
    (tmp_path / "train.sh").write_text(
        "torchrun pretrain_gpt.py --tensor-model-parallel-size 8 --pipeline-model-parallel-size 8 --micro-batch-size 1"
        " --global-batch-size 512 --seq-length 4096 --bf16 --use-distributed-optimizer --sequence-parallel"
        " --recompute-granularity full --recompute-method uniform --recompute-num-layers 1\n"
    )
    names = {}
    for block in re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL):
        if "import pyarrow" in block and not all(map(importlib.util.find_spec, ("pyarrow", "polars", "pandas"))):
            continue
        exec(block, names)
    assert (tmp_path / "x.html").exists() and (tmp_path / "plan.html").exists()


def test_every_name_has_documentation_whose_examples_run():
    finder, runner = doctest.DocTestFinder(recurse=False), doctest.DocTestRunner()
    examples = finder.find(pw, "pipewright_pp")
    for name in pw.__all__:
        member = getattr(pw, name)
        assert member.__doc__, name
        if isinstance(member, type) and not issubclass(member, (Exception, tuple)):
            public = [part for part in vars(member) if not part.startswith("_")]
            assert not [part for part in public if not getattr(member, part).__doc__], name
        examples += finder.find(member, name)
    assert sum(len(example.examples) for example in examples) > 10
    for example in examples:
        runner.run(example)
    assert runner.summarize().failed == 0


def test_the_order_of_messages_costs_time_on_a_transport():
    # Rank 1 receives the second activation in front of the first gradient.
    program = pw.read_csv(
        "0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0B0,0RECV_B1,0B1\n"
        "1RECV_F0,1F0,1RECV_F1,1B0,1SEND_B0,1F1,1B1,1SEND_B1\n"
    )
    makespans = {name: program.simulate("hop=5", transport=name).makespan for name in ("buffered", "edge", "pair")}
    assert makespans == {"buffered": 19, "edge": 23, "pair": 26}
    assert program.simulate("hop=5").makespan == 19
    assert program.simulate("hop=5", transport="pair", eager="1MiB").makespan < 26


@pytest.mark.parametrize("name", [entry["name"] for entry in pw.schedules()])
def test_a_schedule_is_predicted_and_proved_as_its_program(name):
    costs = "F=1,B=2,hop=0.1"
    schedule = pw.schedule(name, ranks=4, microbatches=8, costs=costs)
    assert schedule.simulate().summary == schedule.lower().simulate(costs).summary
    assert schedule.simulate("F=2").summary == schedule.lower().simulate("F=2").summary
    assert schedule.simulate(logical=True).summary == schedule.lower(level="comms").simulate(logical=True).summary
    # A profile has no times of slices.
    if schedule.slices == 1:
        assert schedule.simulate(profile=PROFILE).summary == schedule.lower().simulate(profile=PROFILE).summary
    assert schedule.validate() == {} and schedule.validate("buffered") == {"buffered": "sound"}
    with pytest.raises(ValueError, match="boundaries are for a profile"):
        schedule.simulate(boundaries=[1])


def test_each_bubble_has_a_cause():
    timeline = pw.schedule("1f1b", ranks=4, microbatches=8).simulate("F=1,B=2,hop=0.25")
    causes = timeline.causes()
    assert len({len(column) for column in causes.values()}) == 1
    rows = [dict(zip(causes, row)) for row in zip(*causes.values())]
    assert {row["cause"] for row in rows} == {"start", "order", "message"}
    # An action with a bubble in front of it waited for something, and others began when the one before ended.
    assert all((row["bubble"] > 0) == (row["cause"] == "message") for row in rows if row["cause"] != "start")
    first = next(row for row in rows if row["rank"] == 1)
    assert (first["action"], first["bubble"], first["from_rank"], first["from_action"]) == ("1F0", 1.25, 0, "0F0")
    computed = sum(row["end"] - row["start"] for row in rows if row["rank"] == 0)
    last = max(row["end"] for row in rows if row["rank"] == 0)
    assert sum(row["bubble"] for row in rows if row["rank"] == 0) == pytest.approx(last - computed)
    # The critical path has no gap: its computations and the messages between ranks fill the step.
    path = sorted((row for row in rows if row["critical"]), key=lambda row: row["start"])
    assert path[0]["start"] == 0 and path[-1]["end"] == timeline.makespan
    for before, after in zip(path, path[1:]):
        assert after["start"] - before["end"] == pytest.approx(0 if before["rank"] == after["rank"] else 0.25)


def test_a_queue_is_named_as_the_cause():
    program = pw.read_csv(
        "0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0B0,0RECV_B1,0B1\n1RECV_F0,1F0,1RECV_F1,1B0,1SEND_B0,1F1,1B1,1SEND_B1\n"
    )
    causes = program.simulate("hop=5", transport="pair").causes()
    assert any(causes["in_line"]) and not any(program.simulate("hop=5").causes()["in_line"])
