"""Tests of what surrounds the runtime: cuts, recomputed stages, and the program that is executed."""

from types import SimpleNamespace

import pipewright_pp as pw
import pytest
from pipewright_pp.torch import PlanMismatch, program_for
from pipewright_pp.torch.stages import ranges, recomputed_stages


def test_a_cut_has_the_layers_of_each_stage():
    assert ranges([1, 4], 6, 3) == [range(0, 1), range(1, 4), range(4, 6)]
    for boundaries, message in [([2], "make 2 stages"), ([2, 2], "stage 1 has no layer"), ([4, 2], "stage 1 has no layer")]:
        with pytest.raises(PlanMismatch, match=message):
            ranges(boundaries, 6, 3)


def test_a_plan_says_which_stages_are_recomputed():
    assert recomputed_stages(SimpleNamespace(recompute=[1]), 3) == [False, True, False]
    assert recomputed_stages(pw.schedule("1f1b", ranks=2, microbatches=2), 2) == [False, False]


def test_the_program_has_messages_reductions_and_waits():
    program = program_for(pw.schedule("1f1b", ranks=2, microbatches=2))
    assert program.rows[1] == (
        "1RECV_F0 1F0 1RECV_F1 1B0 1SEND_B0 1F1 1B1 1SEND_B1 1REDUCE_GRAD 1WAIT_REDUCE_GRAD 1WAIT_SEND_B0 1WAIT_SEND_B1".split()
    )
    assert program.validate(transport="edge") == {"edge": "sound"}
    assert program_for(program) == program


def test_sharded_stages_are_gathered():
    program = program_for(pw.schedule("1f1b", ranks=2, microbatches=2), unshard=True)
    assert program.level == "full" and program.rows[0][0] == "0UNSHARD"
    assert program.validate(transport="edge") == {"edge": "sound"}


def test_a_plan_is_executed_as_it_was_searched():
    layer = {"kind": "block", "count": 8, "forward_s": 1.0, "input_backward_s": 1.0, "weight_backward_s": 1.0}
    sizes = {"output_bytes": 1, "parameter_bytes": 1, "activation_bytes": 1}
    profile = pw.Profile({"link": {"latency_s": 0.0, "bytes_per_s": 1e9}, "layers": [layer | sizes]})
    plan = pw.plan(profile, ranks=2, microbatches=4, data_parallel=1, head_parts=[1])
    program = program_for(plan)
    assert program.validate(transport="edge") == {"edge": "sound"}
    predicted = program.simulate(profile=profile, boundaries=plan.boundaries).makespan
    assert predicted == pytest.approx(plan.predicted_step_s, rel=0.1)


def test_a_recomputed_stage_computes_the_same(torch):
    from pipewright_pp.torch.chain import Chain

    torch.manual_seed(1)
    layers = [torch.nn.Linear(4, 4), torch.nn.Tanh(), torch.nn.Linear(4, 4)]
    calls = []
    layers[1].register_forward_hook(lambda *_: calls.append(1))
    inputs = torch.randn(2, 4)
    found = []
    for recompute in (False, True):
        Chain(layers, recompute=recompute)(inputs).square().mean().backward()
        found.append((layers[0].weight.grad.clone(), len(calls)))
        layers[0].weight.grad = None
    torch.testing.assert_close(found[0][0], found[1][0], rtol=0, atol=0)
    assert [count for _, count in found] == [1, 3]
