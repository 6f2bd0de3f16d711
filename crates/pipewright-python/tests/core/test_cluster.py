"""Predictions on clusters, which need no PyTorch."""

import doctest
import json

import pytest

import pipewright_pp as pw
from pipewright_pp import cluster
from pipewright_pp.cluster import Prediction, predict, shapes

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
}
LAYOUT = {"gpus": 8, "tp": 2, "pp": 2, "mbs": 1, "gbs": 64, "seq": 4096, "precision": "bf16"}


def test_a_prediction_has_seconds_parts_memory_and_a_rate():
    prediction = predict(CONFIG, "h100", LAYOUT)
    assert isinstance(prediction, Prediction) and "s per step" in repr(prediction)
    assert sum(prediction.parts.values()) == pytest.approx(prediction.seconds)
    assert len(prediction.memory_bytes) == 2 and all(bytes_of_rank > 1 << 30 for bytes_of_rank in prediction.memory_bytes)
    parts = prediction.memory_parts
    assert list(parts[0]) == ["parameters", "gradients", "optimizer", "activations", "temporary", "buffers"]
    assert [sum(of_rank.values()) for of_rank in parts] == pytest.approx(prediction.memory_bytes, abs=6)
    assert prediction.blocks == [16, 16] and len(prediction.waits) == 2
    assert prediction.tokens_per_s_per_gpu == pytest.approx(64 * 4096 / prediction.seconds / 8)


def test_a_model_is_a_dictionary_a_text_a_file_or_a_folder(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    seconds = {predict(config, "h100", LAYOUT).seconds for config in (CONFIG, json.dumps(CONFIG), tmp_path, tmp_path / "config.json")}
    assert len(seconds) == 1


def test_a_layout_is_a_dictionary_a_text_or_a_file(tmp_path):
    toml = "".join(f"{key} = {json.dumps(value)}\n" for key, value in LAYOUT.items())
    (tmp_path / "layout.toml").write_text(toml)
    layouts = (LAYOUT, json.dumps(LAYOUT), toml, tmp_path / "layout.toml")
    assert len({predict(CONFIG, "h100", layout).seconds for layout in layouts}) == 1
    (tmp_path / "layout.toml").write_text(toml.replace("mbs = 1", "mbs = 0"))
    refused(f"{tmp_path / 'layout.toml'}:4:7: `mbs`", layout=tmp_path / "layout.toml")
    refused("layout:4:7: `mbs`", layout=toml.replace("mbs = 1", "mbs = 0"))


def test_f32_takes_longer_and_more_memory_than_bf16():
    bf16, f32 = (predict(CONFIG, "h100", {**LAYOUT, "precision": precision}) for precision in ("bf16", "f32"))
    for part in ("products", "attention", "elementwise"):
        assert 1.4 < f32.parts[part] / bf16.parts[part] < 2.1, part
    assert f32.memory_bytes[0] > bf16.memory_bytes[0]


def test_the_documentation_runs():
    found = [doctest.testmod(cluster)]
    for name in cluster.__all__:
        for test in doctest.DocTestFinder(recurse=False).find(getattr(cluster, name), name, globs={}):
            found.append(doctest.DocTestRunner().run(test))
        assert getattr(cluster, name).__doc__, name
    assert sum(result.attempted for result in found) == 8 and not any(result.failed for result in found)


def test_shapes_are_those_of_a_rank():
    work = shapes(CONFIG, LAYOUT)
    first = [tuple(int(row[key]) for key in ("rows", "columns", "inner")) for row in work["products"][:3]]
    assert first == [(4096, 3 * 2048, 4096), (4096, 4096, 3 * 2048), (4096, 3 * 2048, 4096)]
    assert [row["role"] for row in work["products"][:3]] == ["forward", "input", "weight"]
    assert work["scores"]["heads"] == 16 and work["tokens"] == 4096
    assert [row["kind"] for row in work["kernels"]] == ["norm", "residual", "rotary", "gated", "loss", "embedding"]


def test_shapes_of_latent_attention_have_its_parts():
    latent = {"kv_lora_rank": 512, "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 96}
    work = shapes({**CONFIG, **latent}, LAYOUT)
    assert work["scores"] is None
    assert work["rotary"] == {"plain_size": 128, "rotary_size": 64, "value_size": 96}
    assert work["kernels"][2] | {"forward_bytes": 0, "backward_bytes": 0} == {
        "kind": "rotary",
        "width": 16 * (2 * (128 + 64) + 96),
        "forward_bytes": 0,
        "backward_bytes": 0,
    }
    assert shapes(CONFIG, LAYOUT)["rotary"] == {"plain_size": 0, "rotary_size": 128, "value_size": 0}
    half = shapes({**CONFIG, "partial_rotary_factor": 0.5}, LAYOUT)
    assert half["rotary"]["rotary_size"] == 64


def refused(message, config=CONFIG, machine="h100", layout=LAYOUT, problems=1):
    """Checks the error of a mistake, and the number of its problems."""
    with pytest.raises(pw.ClusterError) as error:
        predict(config, machine, layout)
    assert message in str(error.value) and len(error.value.problems) == problems
    return str(error.value)


def test_mistakes_are_named(tmp_path):
    refused("needs one of the keys num_hidden_layers", config={key: value for key, value in CONFIG.items() if key != "num_hidden_layers"})
    refused("there is no machine `h1000`", machine="h1000")
    refused("unknown key `mb` in the layout; did you mean `mbs`?", layout={**LAYOUT, "mb": 1})
    refused("where bf16, f16, fp16, fp8, mxfp8, nvfp4, f32 is expected", layout={**LAYOUT, "precision": "f31"})
    assert refused("pp = 3", layout={**LAYOUT, "pp": 3}).startswith("layout: ")
    refused("layout: `schedule` is None; leave the key out", layout={**LAYOUT, "schedule": None})
    refused("layout: unknown schedule `1f2b`", layout={**LAYOUT, "schedule": "1f2b"})
    refused("layout: the value of `gpus` is nan", layout={**LAYOUT, "gpus": float("nan")})
    refused("layout: the value of `gpus` is 18446744073709551616; use a smaller number", layout={**LAYOUT, "gpus": 1 << 64})
    refused("layout: `gpus` is a", layout={**LAYOUT, "gpus": "8"})
    refused("layout:1:", layout='{"gpus": 8,')
    with pytest.raises(TypeError, match="a layout: .*set"):
        predict(CONFIG, "h100", {**LAYOUT, "gpus": {1}})
    with pytest.raises(TypeError, match="a model: .*set"):
        predict({**CONFIG, "vocab_size": {1}}, "h100", LAYOUT)
    with pytest.raises(pw.ClusterError) as error:
        shapes(CONFIG, {**LAYOUT, "pp": 3})
    assert str(error.value).startswith("layout: ") and len(error.value.problems) == 1
    file = tmp_path / "machine.toml"
    file.write_text('name = "mine"\nbf16_tflops = "fast"\nnodes = 3\n')
    with pytest.raises(pw.ClusterError) as error:
        predict(CONFIG, file, LAYOUT)
    assert f"{file}:2:15: `bf16_tflops`" in str(error.value) and len(error.value.problems) > 2
    with pytest.raises(FileNotFoundError):
        predict(CONFIG, "none.toml", LAYOUT)
    with pytest.raises(TypeError, match="a layout is a path"):
        predict(CONFIG, "h100", 3)


SIZES = {"gpus": 16, "batch": 64, "sequence": 4096}


@pytest.mark.parametrize(
    "options",
    [{}, {"layout": {"pp": 4, "vp": 2, "tp": 1}}, {"stack": "torchtitan"}, {"precision": "fp8"}, {"layout": "recompute = 'full'\nmbs = 1\n"}],
)
def test_a_plan_is_predicted_by_its_layout(options):
    plans = cluster.plan(CONFIG, "h100", **SIZES, **options)
    assert 1 <= len(plans) <= 5
    for plan in plans:
        assert plan.layout["gpus"] == 16 and plan.layout["gbs"] == 64
        assert predict(CONFIG, "h100", plan.layout).seconds == pytest.approx(plan.prediction.seconds, rel=1e-9)
        assert max(plan.prediction.memory_bytes) <= plan.memory_limit_bytes
        assert plan.prediction.seconds >= plan.lower_bound_s and 0 < plan.mfu < 1 and 0 < plan.mean_error < 1
        assert plan.prediction.seconds == pytest.approx((1 + plan.gap) * plan.lower_bound_s)
        assert plan.replicas * plan.layout["tp"] * plan.layout["pp"] * plan.layout["cp"] == 16


def test_given_parts_are_kept():
    given = {"tp": 2, "pp": 2, "mbs": 1, "schedule": "1f1b", "recompute": "selective", "data_parallel": "optimizer"}
    for plan in cluster.plan(CONFIG, "h100", **SIZES, layout=given):
        assert given.items() <= plan.layout.items()


def test_a_plan_becomes_files_of_other_systems():
    for system in ("torchtitan", "megatron", "deepspeed"):
        plan = cluster.plan(CONFIG, "h100", **SIZES, system=system, plans=1)[0]
        files = plan.emit(system)
        assert files and all(name and text for name, text in files.items())
    zero_bubble = cluster.plan(CONFIG, "h100", **SIZES, layout={"pp": 4, "schedule": "zbvzerobubble"}, plans=1)[0]
    with pytest.raises(pw.ClusterError, match="megatron cannot run the plan"):
        zero_bubble.emit("megatron")


def test_all_machines_are_listed(tmp_path):
    machines = cluster.clusters()
    names = [alias for machine in machines for alias in machine["aliases"]]
    assert {"h100", "a100", "gb300", "mi355x"} <= set(names) and len(names) == len(set(names))
    for machine in machines:
        (tmp_path / "machine.toml").write_text(machine["toml"])
        layout = {**LAYOUT, "gpus": 16}
        of_file, of_name = (predict(CONFIG, source, layout) for source in (tmp_path / "machine.toml", machine["aliases"][0]))
        assert of_file.seconds == pytest.approx(of_name.seconds)
        assert all(figure["source"] for figure in machine["figures"].values()) and machine["constants"]


def test_mistakes_in_a_request_are_named():
    def check(message, **options):
        with pytest.raises(pw.ClusterError, match=message):
            cluster.plan(CONFIG, options.pop("machine", "h100"), **{**SIZES, **options})

    check("no plan fits into", memory="1GiB")
    check("unknown key `tensor` in the layout; ", layout={"tensor": 2})
    check("tp", layout={"tp": 3})
    check("has no rate for fp8", machine="a100", precision="fp8")
    check("`batch` is 0", batch=0)
    for argument in ({"precision": "int4"}, {"stack": "jax"}, {"system": "jax"}):
        with pytest.raises(ValueError, match="; use one of "):
            cluster.plan(CONFIG, "h100", **SIZES, **argument)


SCRIPT = """#!/bin/bash
TP=8 PP=2
ARGS=(--tensor-model-parallel-size $TP --pipeline-model-parallel-size $PP --sequence-parallel --use-distributed-optimizer
      --micro-batch-size 1 --global-batch-size 64 --seq-length 4096 --bf16 RECOMPUTE)
torchrun --nproc_per_node 8 pretrain_gpt.py "${ARGS[@]}" --lr 1e-4
"""


def test_a_script_is_judged(tmp_path):
    script = tmp_path / "train.sh"
    script.write_text(SCRIPT.replace("RECOMPUTE", "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"))
    judged = cluster.check(CONFIG, "h100", script, gpus=16)
    assert judged.system == "megatron" and judged.fits and judged.missing_bytes == 0 and judged.no_best is None
    layout = judged.plan.layout
    assert {"tp": 8, "pp": 2, "gbs": 64, "seq": 4096, "recompute": "full"}.items() <= layout.items()
    assert judged.is_beaten and judged.gain == pytest.approx(judged.plan.prediction.seconds / judged.best.prediction.seconds - 1)
    assert ("--tensor-model-parallel-size", "8", str(judged.best.layout["tp"])) in judged.changes
    assert "--lr" in judged.unused and "a better plan takes" in repr(judged)


def test_a_script_that_does_not_fit_says_by_how_much(tmp_path):
    script = tmp_path / "train.sh"
    script.write_text(SCRIPT.replace("RECOMPUTE", ""))
    judged = cluster.check(CONFIG, "h100", script, gpus=16, memory="4GiB")
    assert not judged.fits and judged.missing_bytes == max(judged.plan.prediction.memory_bytes) - (4 << 30)
    assert judged.best is None and "memory" in judged.no_best and "does not fit" in repr(judged)


def test_files_that_cannot_be_judged_are_refused(tmp_path):
    script = tmp_path / "train.sh"

    def check(message, text, error=pw.ClusterError, **options):
        script.write_text(text)
        with pytest.raises(error, match=message):
            cluster.check(CONFIG, options.pop("machine", "h100"), options.pop("file", script), **{"gpus": 16, **options})

    text = SCRIPT.replace("RECOMPUTE", "")
    check("No such file", text, FileNotFoundError, file=tmp_path / "other.sh")
    check(f"{script}:?.*8 .*24|GPUs", text, gpus=24)
    check("has no rate for it", text.replace("--bf16", "--fp8-format hybrid --bf16"), machine="a100")
    check("line 4: `--global-batch-size` is `64`, and expected 8", text, batch=8)
    check("is 0; use at least 1", text, gpus=0)
    check("precision is 'int4'|use one of", text, ValueError, precision="int4")


def test_a_notebook_shows_a_plan():
    plan = cluster.plan(CONFIG, "h100", **SIZES, layout={"pp": 4})[0]
    table = plan._repr_html_()
    assert table.count("<table>") == 2 and table.count("<tr>") == 1 + 7 + 1 + 4
    assert plan.accuracy in table and "optimizer" in table
