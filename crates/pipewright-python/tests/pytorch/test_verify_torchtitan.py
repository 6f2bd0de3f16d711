"""Tests `verify` with the model parts that torchtitan cuts from its Llama 3."""

import pytest

pytest.importorskip("torch", reason="PyTorch is not installed")
pytest.importorskip("triton", reason="triton is not installed, and torchtitan's models import it")
pytest.importorskip("torchtitan", reason="torchtitan is not installed; bench/peer/setup.sh --systems installs it")


def token_sum(output, target):
    """The sum of the tokens' losses."""
    from torch.nn.functional import cross_entropy

    return cross_entropy(output.flatten(0, 1).float(), target.flatten(), reduction="sum")


def attend(query, key, value, **_):
    """Causal attention; torchtitan's own needs a GPU or a compiler."""
    from torch.nn.functional import scaled_dot_product_attention

    parts = (part.transpose(1, 2) for part in (query, key, value))
    return scaled_dot_product_attention(*parts, is_causal=True, enable_gqa=True).transpose(1, 2)


def llama(rank):
    """Verifies two model parts of a small Llama 3 on each rank, with the loss divided by the tokens and with the plain sum."""
    import pipewright_pp.torch as pt
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.pipelining import ScheduleInterleaved1F1B
    from torchtitan.distributed.pipeline_parallel import _generate_llm_fqn_per_model_part, _pipeline_module_split
    from torchtitan.models.llama3 import llama3_configs

    config = llama3_configs["debugmodel"]("flex")
    torch.manual_seed(3)
    whole = config.build()
    whole.init_states()
    for layer in whole.layers.values() if hasattr(whole.layers, "values") else whole.layers:
        layer.attention.inner_attention.forward = attend
    names = _generate_llm_fqn_per_model_part(4, len(config.layers))
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("pp",))
    x, y = torch.randint(2048, (8, 16)), torch.randint(2048, (8, 16))
    y[:3, :9] = -100
    tokens = (y != -100).sum()
    reports = []
    for own in (lambda output, target: token_sum(output, target) / tokens, token_sum):
        stages, parts = _pipeline_module_split(whole, mesh, "Interleaved1F1B", torch.device("cpu"), names)
        schedule = ScheduleInterleaved1F1B(stages, 4, loss_fn=own, scale_grads=False)

        def step():
            schedule.step(*([x] if rank == 0 else []), **({"target": y, "losses": []} if rank == 1 else {}))

        reports.append(pt.verify(step, whole, x, y, stages=stages, loss_fn=lambda o, t: token_sum(o, t) / tokens, deadline_s=100))
    return reports


def test_model_parts_of_torchtitan(run_ranks):
    for sound, wrong in run_ranks(2, llama):
        assert sound.is_sound, str(sound)
        assert sound.values > 200
        assert wrong.first.fault.value == "a loss that is not divided"
        assert "it is not divided by the 101 tokens of the loss" in str(wrong)
