"""Tests of measured machines: the file and its keys, what it predicts, and input that is refused. Times are not compared."""

import time
import tomllib

import pytest
from pipewright_pp import ClusterError
from pipewright_pp.cluster import predict, shapes
from pipewright_pp.torch import Figure, MachineFigures, MeasureError, measure_machine

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
LAYOUT = {"gpus": 2, "mbs": 1, "gbs": 2, "seq": 16, "precision": "f32", "data_parallel": "none", "compiled": False}
FEW = {"repetitions": 3, "warmup": 1}
KINDS = ["norm", "residual", "rotary", "gated", "loss", "embedding", "optimizer"]


def measured_by(rank, path, overlap):
    """The text and the figures of the machine that a rank has measured."""
    figures = measure_machine(CONFIG, LAYOUT, path, overlap=overlap, **FEW)
    return figures.to_toml(), {place: figure.value for place, figure in figures.figures.items()}


def test_ranks_measure_the_same_machine_with_its_links(run_ranks, tmp_path):
    path = tmp_path / "machine.toml"
    (text, values), other = run_ranks(2, measured_by, path, None)
    assert (text, values) == other and path.read_text() == text
    assert [file.name for file in tmp_path.iterdir()] == ["machine.toml"]
    assert all(value > 0 for place, value in values.items() if place != "measured.overlap") and 0 <= values["measured.overlap"] <= 1
    keys = tomllib.loads(text)
    assert keys["gpus_per_node"] == 2 and list(keys["sources"]) == ["network_gb_per_s"]
    links = [(link["use"], link["between"]) for link in keys["measured"]["link"]]
    assert links == [("message", "node"), ("all_reduce", "node"), ("all_to_all", "node")]
    prediction = predict(CONFIG, path, LAYOUT)
    assert prediction.parts["data"] > 0 and sum(prediction.parts.values()) == pytest.approx(prediction.seconds)


def test_a_machine_has_the_shapes_of_the_model(torch, tmp_path):
    figures = measure_machine(CONFIG, LAYOUT, tmp_path / "machine.toml", name="mine", **FEW)
    keys = tomllib.loads((tmp_path / "machine.toml").read_text())
    assert keys["name"] == "mine" and keys["f32_tflops"] > 0 and "overlap" not in keys["measured"]
    assert list(keys["sources"]) == ["node_gb_per_s", "network_gb_per_s"]
    measured = {(row["rows"], row["columns"], row["inner"]) for row in keys["measured"]["product"]}
    assert measured == {(row["rows"], row["columns"], row["inner"]) for row in shapes(CONFIG, LAYOUT)["products"]}
    # Queries, keys and values are one product, forward and for both gradients.
    assert {(16, 64, 32), (16, 32, 64), (32, 64, 16)} < measured
    assert [kernel["kind"] for kernel in keys["measured"]["kernel"]] == KINDS
    assert {key: keys["measured"]["scores"][0][key] for key in ("sequence", "heads", "key_value_heads", "head_size")} == {
        "sequence": 16,
        "heads": 4,
        "key_value_heads": 2,
        "head_size": 8,
    }
    assert figures.ranks == 1 and all(figure.value > 0 and figure.samples == 3 for figure in figures.figures.values())


def test_latent_attention_is_measured(torch, tmp_path):
    latent = {"kv_lora_rank": 16, "q_lora_rank": 24, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6}
    figures = measure_machine({**CONFIG, **latent}, LAYOUT, tmp_path / "machine.toml", **FEW)
    assert [kernel["kind"] for kernel in figures.keys["measured"]["kernel"]] == KINDS
    assert figures.keys["measured"]["scores"] == [] and "attention" not in figures.keys["constants"]
    assert predict({**CONFIG, **latent}, tmp_path / "machine.toml", LAYOUT).seconds > 0


def test_a_prediction_has_the_measured_times(tmp_path):
    """The parts of a step follow from the file by hand: each measured time counts as often as the step has it."""
    times = {"measured": {"product": [], "kernel": [{"kind": "optimizer", "forward_gb_per_s": 32e-6}]}}
    times["measured"]["product"] = [
        {**{key: int(row[key]) for key in ("rows", "columns", "inner")}, "precision": "f32", "seconds": 1.0}
        for row in {(row["rows"], row["columns"], row["inner"]): row for row in shapes(CONFIG, LAYOUT)["products"]}.values()
    ]
    sizes = {"f32_tflops": 1.0, "memory_gb": 1.0, "memory_gb_per_s": 1.0, "node_gb_per_s": 1.0, "network_gb_per_s": 1.0}
    MachineFigures({"name": "x", **sizes, "gpus_per_node": 2, **times}, ranks=1).write(tmp_path / "machine.toml")
    parts = predict(CONFIG, tmp_path / "machine.toml", LAYOUT).parts
    # Two blocks of four products, and the head; each three times.
    assert parts["products"] == pytest.approx(3 * (2 * 4 + 1))
    # The tables of the embedding and the head, and the matrices and norms of the blocks.
    parameters = 2 * 64 * 32 + 2 * (32 * 64 + 32 * 32 + 3 * 32 * 48 + 2 * 32)
    assert parts["optimizer"] == pytest.approx(parameters / 1000)


def test_a_figure_has_its_spread_in_a_comment():
    text = MachineFigures({"name": 'a "machine"', "memory_gb_per_s": Figure(2.5, 0.013, 15)}, ranks=1).to_toml()
    assert text == 'name = "a \\"machine\\""\nmemory_gb_per_s = 2.5 # 15 measurements, +-1.3%\n'


def refused(error, message, config=CONFIG, layout=LAYOUT, path=None, **options):
    """Checks the error of input that cannot be measured."""
    with pytest.raises(error, match=message):
        measure_machine(config, layout, path, **{**FEW, **options})


def test_bad_input_is_refused(torch, tmp_path):
    refused(ClusterError, "needs one of the keys hidden_size", {key: value for key, value in CONFIG.items() if key != "hidden_size"})
    refused(ClusterError, "unknown key `tensor` in the layout", layout={**LAYOUT, "tensor": 2})
    refused(ClusterError, "`mbs` is missing", layout={key: value for key, value in LAYOUT.items() if key != "mbs"})
    refused(ClusterError, "4 heads", layout={**LAYOUT, "gpus": 6, "tp": 3, "gbs": 6})
    refused(FileNotFoundError, "none.json", tmp_path / "none.json")
    for precision in ("fp8", "mxfp8", "nvfp4"):
        refused(MeasureError, f"the precision of the layout is {precision}", layout={**LAYOUT, "precision": precision})
    refused(MeasureError, r"the folder .*nowhere does not exist; make it", path=tmp_path / "nowhere" / "machine.toml")
    refused(MeasureError, "is a folder; name a file in it", path=tmp_path)
    refused(MeasureError, "repetitions is 0 and warmup 1", repetitions=0)
    refused(MeasureError, "overlap is 2; a share from 0 to 1", overlap=2)
    refused(MeasureError, "device is meta; cpu or cuda was expected", device="meta")
    if not torch.cuda.is_available():
        refused(MeasureError, "device is cuda, and PyTorch finds no CUDA device", device="cuda")
    assert list(tmp_path.iterdir()) == []


def error_of(rank, *, of_rank, **options):
    """The error of a rank, of which one has other options."""
    with pytest.raises(MeasureError) as error:
        measure_machine(CONFIG, LAYOUT, **FEW, **(options if rank == of_rank else {}))
    return str(error.value)


def errors_of(rank):
    """The errors of ranks that do not fit each other."""
    return [error_of(rank, of_rank=1, overlap=0.5), error_of(rank, of_rank=1, overlap=2), error_of(rank, of_rank=0, path="/nowhere/x")]


def test_an_error_of_a_rank_is_an_error_of_all(run_ranks):
    first, second = run_ranks(2, errors_of)
    assert first[0] == second[0] and first[0].startswith("rank 1 measures something else than rank 0")
    assert second[1].startswith("overlap is 2") and first[1] == f"rank 1: {second[1]}"
    assert first[2].startswith("the folder /nowhere does not exist") and second[2] == f"rank 0: {first[2]}"


class Broken:
    """Stands for a function of PyTorch that fails on rank 1 in its `at`-th call."""

    def __init__(self, rank, original, at):
        self.rank, self.original, self.left = rank, original, at

    def __call__(self, *arguments, **options):
        self.left -= 1
        if self.rank == 1 and self.left == 0:
            raise RuntimeError("no memory for this tensor")
        return self.original(*arguments, **options)


def failure_of(rank, place, at, path):
    """The error of a rank if a function fails on rank 1, and the seconds until it ends."""
    import importlib

    module, name = place.rsplit(".", 1)
    owner = importlib.import_module(module)
    original = getattr(owner, name)
    setattr(owner, name, Broken(rank, original, at))
    begin = time.perf_counter()
    try:
        measure_machine(CONFIG, LAYOUT, path, **FEW)
    except Exception as error:
        return f"{type(error).__name__}: {error}", time.perf_counter() - begin
    finally:
        setattr(owner, name, original)
    raise AssertionError("no error")


def failures_of(rank, path):
    """The errors of ranks if rank 1 fails before, during and after the measurements."""
    from pipewright_pp import cluster

    early = failure_of(rank, "pipewright_pp.cluster.shapes", 1, path)
    cases = [("torch.randn", 1), ("torch.randn", 4), ("torch.nn.functional.linear", 3), ("torch.optim.AdamW", 1)]
    cases += [("torch.empty_like", 1), ("socket.gethostname", 1), ("os.sysconf", 1)]
    assert cluster.shapes
    return [early, *(failure_of(rank, place, at, path) for place, at in cases)]


def test_a_rank_that_fails_ends_all(run_ranks, tmp_path):
    """No rank waits for the deadline."""
    first, second = run_ranks(2, failures_of, tmp_path / "machine.toml")
    assert [text for text, _ in second] == ["RuntimeError: no memory for this tensor"] * 8
    assert [text for text, _ in first] == ["MeasureError: rank 1: RuntimeError: no memory for this tensor"] * 8
    assert all(seconds < 60 for _, seconds in first)
    assert list(tmp_path.iterdir()) == []


def alone(rank):
    """The error of the only rank of a group."""
    return error_of(rank, of_rank=0)


def test_a_rank_alone_has_no_links(run_ranks):
    assert "the process group has one rank" in run_ranks(1, alone)[0]
