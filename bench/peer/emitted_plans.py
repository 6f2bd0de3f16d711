"""Whether torchtitan, Megatron and DeepSpeed read the files that `pipewright plan --emit` writes, as they are meant.

    emitted_plans.py --pipewright PATH     emits plans of several sizes with that binary, and checks each file

For each plan it compares what the system reads with the plan in JSON: the layers of every stage, the ranks of the stages,
the order of the computations of every rank, and the batch. For plans for a cluster it compares the ranks that divide
sequences, experts and the state of replicas. It needs no GPU. `setup.sh --systems` installs the systems.

torchtitan: its options go through its own parser (tyro, `ParallelismConfig`), the table through PyTorch's runtime
    (`_load_csv`), and the modules through `_split_module`.
Megatron: the options are read here, not by its parser. The layout goes through `TransformerConfig`, and the orders of
    all ranks through the functions that its schedule uses (`get_schedule_table`, `get_pp_rank_microbatches`).
DeepSpeed: processes on Gloo make the `PipelineModule` of the plan, and `DeepSpeedConfig` reads the configuration.
"""

import argparse
import csv
import dataclasses
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path
from types import SimpleNamespace

warnings.filterwarnings("ignore")

import torch

PROFILE = """\
tokens = 64
[link]
latency_s = 5e-6
bytes_per_s = 1e10
[[layers]]
kind = "embedding"
forward_s = 2e-4
input_backward_s = 1e-4
weight_backward_s = 1e-4
output_bytes = 524288
parameter_bytes = 4194304
activation_bytes = 524288
[[layers]]
kind = "block"
count = 14
forward_s = 1e-3
input_backward_s = 1e-3
weight_backward_s = 1e-3
output_bytes = 524288
parameter_bytes = 4194304
activation_bytes = 6291456
[[layers]]
kind = "head"
forward_s = 3e-3
input_backward_s = 3e-3
weight_backward_s = 3e-3
output_bytes = 0
parameter_bytes = 8388608
activation_bytes = 12582912
"""
BLOCKS = 14
LAYERS = BLOCKS + 2
# Ranks, microbatches, memory of a rank.
SIZES = [(2, 8, None), (4, 8, None), (4, 10, None)]
# The memory with which all stages of the plan recompute. For one stage per rank, as in DeepSpeed, no plan needs that here.
TIGHT = {"torchtitan": [(4, 16, "110MiB")], "megatron": [(4, 16, "110MiB")]}


# A model with experts, and for each system the given parts of plans for a cluster.
EXPERTS = """{"model_type": "mixtral", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 32000, "num_local_experts": 8,
    "num_experts_per_tok": 2, "tie_word_embeddings": false}"""
MESHES = [
    ["--pipeline-parallel", "4"],
    ["--pipeline-parallel", "4", "--tensor-parallel", "2", "--expert-parallel", "4"],
    ["--pipeline-parallel", "2", "--recompute", "full"],
]
WITH_CONTEXT = ["--pipeline-parallel", "4", "--context-parallel", "2", "--expert-parallel", "2"]


def emit_for_cluster(binary, folder, system, mesh):
    """Emits a plan for a cluster, and returns it as JSON."""
    command = [binary, "plan", "config.json", "--cluster", "h100", "--nodes", "8", "--global-batch", "256"]
    command += ["--seq-len", "8192", *mesh, "--emit", system, "--format", "json"]
    result = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    if result.returncode != 0:
        sys.exit(f"{' '.join(command)}: {result.stderr}")
    return json.loads(result.stdout)["emit"]["plan"]


def emit(binary, folder, system, size):
    """Emits a plan, and returns it as JSON."""
    ranks, microbatches, memory = size
    command = [binary, "plan", "--profile", "p.toml", "--ranks", str(ranks), "--microbatches", str(microbatches)]
    command += ["--data-parallel", "1", "--emit", system, "--format", "json"]
    command += ["--memory", memory] if memory else []
    result = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    if result.returncode != 0:
        sys.exit(f"{' '.join(command)}: {result.stderr}")
    return json.loads(result.stdout)["emit"]["plan"]


def layers_of_stages(plan):
    """The layers of each stage of a plan."""
    ends = [0, *plan["boundaries"], LAYERS]
    return [list(range(start, end)) for start, end in zip(ends, ends[1:])]


def expect(what, found, expected):
    if found != expected:
        sys.exit(f"{what}: read {found}, and the plan has {expected}")


class TinyLlama(torch.nn.Module):
    """A model with the modules of torchtitan's language models."""

    def __init__(self):
        super().__init__()
        self.tok_embeddings = torch.nn.Embedding(4, 4)
        self.layers = torch.nn.ModuleDict({str(index): torch.nn.Linear(4, 4) for index in range(BLOCKS)})
        self.norm = torch.nn.LayerNorm(4)
        self.lm_head = torch.nn.Linear(4, 4)


def kept_layers(model):
    """The layers of the plan whose modules a part of the model has."""
    kept = [0] if model.tok_embeddings is not None else []
    kept += [1 + int(name) for name in model.layers]
    if model.lm_head is not None:
        assert model.norm is not None
        kept.append(LAYERS - 1)
    return kept


def parse_torchtitan(words):
    """Reads options with torchtitan's parser."""
    import tyro
    from torchtitan.config import ParallelismConfig, TrainingConfig
    from torchtitan.config.manager import ConfigManager, custom_registry
    from torchtitan.distributed.activation_checkpoint import ActivationCheckpointingConfig, SelectiveAC

    # The sections of a trainer's configuration that the options set. A trainer of a model needs a GPU to import.
    sections = [
        ("parallelism", ParallelismConfig, dataclasses.field(default_factory=ParallelismConfig)),
        ("training", TrainingConfig, dataclasses.field(default_factory=TrainingConfig)),
        (
            "activation_checkpoint",
            ActivationCheckpointingConfig,
            dataclasses.field(default_factory=SelectiveAC.Config),
        ),
    ]
    config = dataclasses.make_dataclass("Sections", sections, kw_only=True)
    ConfigManager()
    return tyro.cli(config, args=words, default=config(), registry=custom_registry)


def check_torchtitan(folder, plan):
    from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime
    from torchtitan.distributed.pipeline_parallel import (
        _get_pp_rank_to_stage_indices_mapping,
        _split_module,
    )

    from schedules import Stage

    config = parse_torchtitan((folder / "torchtitan" / "torchtitan.args").read_text().split())
    parallelism, ranks = config.parallelism, plan["ranks"]
    modules = parallelism.module_fqns_per_model_part
    expect("degree", parallelism.pipeline_parallel_degree, ranks)
    found = [kept_layers(_split_module(TinyLlama(), names)) for names in modules]
    expect("layers of stages", found, layers_of_stages(plan))
    table = folder / parallelism.pipeline_parallel_schedule_csv
    rows = list(csv.reader(table.open(newline="")))
    microbatches = config.training.local_batch_size // parallelism.pipeline_parallel_microbatch_size
    expect("microbatches", microbatches, plan["microbatches"])
    expect("rows", parallelism.pipeline_parallel_microbatch_size, plan["microbatch_size"])
    recomputes = type(config.activation_checkpoint).__qualname__.startswith("FullAC")
    expect("recomputation", recomputes, plan["recompute"] == "stage")
    for rank in range(ranks):
        indices = _get_pp_rank_to_stage_indices_mapping(
            rank, ranks, parallelism.pipeline_parallel_schedule, len(modules)
        )
        own = [stage for stage, owner in enumerate(plan["stage_to_rank"]) if owner == rank]
        expect(f"stages of rank {rank}", sorted(indices), own)
        stages = [Stage(index, len(modules), rank, ranks) for index in indices]
        runtime = _PipelineScheduleRuntime(stages, n_microbatches=microbatches, loss_fn=lambda *_: None)
        runtime._load_csv(str(table))
        order = [str(action) for action in runtime.pipeline_order[rank] if action is not None]
        expect(f"order of rank {rank}", order, [cell for cell in rows[rank] if cell])
    return parallelism.pipeline_parallel_schedule


def read_megatron(folder):
    """The options for Megatron with their values, by their names without dashes."""
    lines = (folder / "megatron" / "megatron.args").read_text().splitlines()
    pairs = (line.removeprefix("--").partition(" ") for line in lines)
    return {key: value for key, _, value in pairs}


def check_megatron(folder, plan):
    from megatron.core.pipeline_parallel.schedules import get_pp_rank_microbatches, get_schedule_table
    from megatron.core.transformer.enums import LayerType
    from megatron.core.transformer.transformer_config import TransformerConfig

    options = read_megatron(folder)
    ranks = int(options["pipeline-model-parallel-size"])
    expect("ranks", ranks, plan["ranks"])
    recompute = {
        key.replace("-", "_"): int(value) if value.isdigit() else value
        for key, value in options.items()
        if key.startswith("recompute-")
    }
    expect("recomputation", bool(recompute), plan["recompute"] == "stage")
    group = options.get("microbatch-group-size-per-virtual-pipeline-stage")
    config = TransformerConfig(
        num_layers=int(options["num-layers"]),
        hidden_size=8,
        num_attention_heads=2,
        pipeline_dtype=torch.float32,
        pipeline_model_parallel_size=ranks,
        pipeline_model_parallel_layout=options["pipeline-model-parallel-layout"],
        microbatch_group_size_per_vp_stage=int(group) if group else None,
        **recompute,
    )
    layout = config.pipeline_model_parallel_layout
    chunks = layout.virtual_pipeline_model_parallel_size
    found, layer = [], 0
    for stage in range(ranks * chunks):
        kinds = layout.layout[stage % ranks][stage // ranks]
        assert set(kinds) <= {LayerType.embedding, LayerType.decoder, LayerType.loss}
        found.append(list(range(layer, layer + len(kinds))))
        layer += len(kinds)
    expect("layers of stages", found, layers_of_stages(plan))
    expect("ranks of stages", plan["stage_to_rank"], [stage % ranks for stage in range(ranks * chunks)])
    microbatches = int(options["global-batch-size"]) // int(options["micro-batch-size"])
    expect("microbatches", microbatches, plan["microbatches"])
    check_megatron_order(folder, plan, config, chunks, microbatches, (get_pp_rank_microbatches, get_schedule_table))
    return f"layout {options['pipeline-model-parallel-layout']}"


def check_megatron_order(folder, plan, config, chunks, microbatches, functions):
    """Compares Megatron's orders with the orders of the plan's schedule."""
    get_pp_rank_microbatches, get_schedule_table = functions
    ranks, group = plan["ranks"], config.microbatch_group_size_per_vp_stage
    if chunks > 1:
        small = 0 < microbatches % group < ranks
        expect("groups that Megatron accepts", ranks <= group <= microbatches and not small, True)
    command = [folder / "binary", "schedule", plan["schedule"], "--ranks", ranks, "--microbatches", microbatches]
    command += ["--stages-per-rank", chunks] if chunks > 1 else []
    command += ["--group-size", group] if chunks > 1 else []
    result = subprocess.run([str(word) for word in command], capture_output=True, text=True, check=True)
    for rank, row in enumerate(csv.reader(result.stdout.splitlines())):
        communicator = SimpleNamespace(
            pp_group=SimpleNamespace(size=lambda: ranks, rank=lambda rank=rank: rank),
            virtual_pipeline_model_parallel_size=chunks if chunks > 1 else None,
        )
        _, _, warmup, remaining = get_pp_rank_microbatches(
            microbatches, chunks, group, p2p_communicator=communicator
        )
        warmup = min(warmup, microbatches * chunks)
        remaining = microbatches * chunks - warmup
        table = get_schedule_table(microbatches, chunks, group)
        forward = [f"{chunk * ranks + rank}F{microbatch}" for microbatch, chunk in table]
        backward = [f"{(chunks - 1 - chunk) * ranks + rank}B{microbatch}" for microbatch, chunk in table]
        order = forward[:warmup]
        for step in range(remaining):
            order += [forward[warmup + step], backward[step]]
        order += backward[remaining:]
        expect(f"order of rank {rank}", order, [cell for cell in row if cell])


def check_deepspeed(folder, plan):
    from deepspeed.runtime.config import DeepSpeedConfig

    path = folder / "deepspeed" / "deepspeed.json"
    config = json.loads(path.read_text())
    ranks = plan["ranks"]
    mesh = SimpleNamespace(get_data_parallel_world_size=lambda: 1)
    read = DeepSpeedConfig(str(path), mpu=mesh)
    expect("microbatches", read.gradient_accumulation_steps, plan["microbatches"])
    expect("rows", read.train_micro_batch_size_per_gpu, plan["microbatch_size"])
    expect("stages", read.pipeline["stages"], ranks)
    expect("recomputation", read.pipeline["activation_checkpoint_interval"] > 0, plan["recompute"] == "stage")
    torch.multiprocessing.spawn(make_deepspeed_stage, (str(path.parent), layers_of_stages(plan)), nprocs=ranks)
    return f"parts {config['pipeline']['parts']}"


def make_deepspeed_stage(rank, folder, expected):
    """Makes the part of a rank of the plan's `PipelineModule`, in a process of its own."""
    ranks = len(expected)
    os.environ.update(
        MASTER_ADDR="127.0.0.1", MASTER_PORT="29531", RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_RANK=str(rank)
    )
    import deepspeed
    from deepspeed.pipe import LayerSpec

    sys.stdout = open(os.devnull, "w")
    # Otherwise DeepSpeed compiles a kernel for sums on the processor, which nothing here needs.
    deepspeed.ops.__compatible_ops__.clear()
    deepspeed.init_distributed("gloo")
    spec = importlib.util.spec_from_file_location("planned_pipeline", Path(folder) / "planned_pipeline.py")
    planned = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(planned)
    layers = [LayerSpec(torch.nn.Linear, 4, 4) for _ in range(LAYERS)]
    module = planned.PlannedPipelineModule(layers=layers, num_stages=planned.PIPELINE["stages"])
    found = list(range(module._local_start, module._local_stop))
    if found != expected[rank] or len(module.forward_funcs) != len(found):
        sys.exit(f"rank {rank}: DeepSpeed has the layers {found}, and the plan {expected[rank]}")


def check_cluster_torchtitan(folder, plan):
    from torchtitan.distributed.fsdp import get_fsdp_reshard_after_forward_policy
    from torchtitan.distributed.parallel_dims import ParallelDims

    config = parse_torchtitan((folder / "torchtitan" / "torchtitan.args").read_text().split())
    parallelism = config.parallelism
    dims = ParallelDims.from_config(parallelism, 64)
    sharded = plan["sharding"] in ("gradients", "parameters")
    expect("stages", len(parallelism.module_fqns_per_model_part), len(plan["boundaries"]) + 1)
    expect("replicas", dims.dp_shard * dims.dp_replicate, plan["data_parallel"])
    expect("shards", dims.dp_shard, plan["data_parallel"] if sharded else 1)
    expect("context", dims.cp, plan["context_parallel"])
    expect("tensor", dims.tp, plan["tensor_parallel"])
    expect("experts", dims.ep, plan["expert_parallel"])
    if plan["tensor_parallel"] > 1:
        expect("sequence parallelism", parallelism.enable_sequence_parallel, plan["sequence_parallel"])
    # Plans with sharded parameters gather them once per step in a pipeline, and twice per microbatch without one.
    # PyTorch's stages turn off the reduction and the resharding of each backward, so a pipeline never has sharded gradients
    # with whole parameters.
    assert plan["sharding"] != "gradients" or (dims.pp == 1 and plan["microbatches"] == 1)
    if sharded:
        gathers_again = get_fsdp_reshard_after_forward_policy(parallelism.fsdp_reshard_after_forward, dims.pp_enabled)
        expect("parameters gathered again", gathers_again, plan["sharding"] == "parameters" and dims.pp == 1)
    kinds = {"none": "NoneType", "selective": "SelectiveAC", "full": "FullAC"}
    found = type(config.activation_checkpoint).__qualname__.split(".")[0]
    expect("recomputation", found, kinds[plan["recompute"]])


def check_cluster_megatron(folder, plan):
    from megatron.core.transformer.transformer_config import TransformerConfig

    options = read_megatron(folder)
    size = lambda key: int(options.get(key, 1))
    config = TransformerConfig(
        num_layers=int(options["num-layers"]),
        hidden_size=32,
        num_attention_heads=32,
        num_moe_experts=8,
        add_bias_linear=False,
        pipeline_dtype=torch.float32,
        tensor_model_parallel_size=size("tensor-model-parallel-size"),
        pipeline_model_parallel_size=size("pipeline-model-parallel-size"),
        pipeline_model_parallel_layout=options["pipeline-model-parallel-layout"],
        context_parallel_size=size("context-parallel-size"),
        expert_model_parallel_size=size("expert-model-parallel-size"),
        expert_tensor_parallel_size=int(options["expert-tensor-parallel-size"]),
        sequence_parallel="sequence-parallel" in options,
        recompute_granularity=options.get("recompute-granularity"),
        recompute_method=options.get("recompute-method"),
        recompute_num_layers=int(options["recompute-num-layers"]) if "recompute-num-layers" in options else None,
    )
    expect("context", config.context_parallel_size, plan["context_parallel"])
    expect("tensor", config.tensor_model_parallel_size, plan["tensor_parallel"])
    expect("experts", config.expert_model_parallel_size, plan["expert_parallel"])
    expect("ranks of an expert", config.expert_tensor_parallel_size, plan["expert_tensor_parallel"])
    expect("sequence parallelism", config.sequence_parallel, plan["sequence_parallel"])
    expect("recomputation", config.recompute_granularity or "none", plan["recompute"])
    divided = "optimizer" if "use-distributed-optimizer" in options else "none"
    expect("state of replicas", divided, plan["sharding"])
    layout = config.pipeline_model_parallel_layout
    expect("stages", len(layout.layout) * len(layout.layout[0]), len(plan["boundaries"]) + 1)


def check_cluster_deepspeed(folder, plan):
    from deepspeed.runtime.config import DeepSpeedConfig

    config = json.loads((folder / "deepspeed" / "deepspeed.json").read_text())
    rows = plan["microbatch_size"] * plan["microbatches"]
    expect("batch", config["train_batch_size"], rows * plan["data_parallel"])
    # Without processes there is one replica.
    config["train_batch_size"] = rows
    read = DeepSpeedConfig(config, mpu=SimpleNamespace(get_data_parallel_world_size=lambda: 1))
    expect("microbatches", read.gradient_accumulation_steps, plan["microbatches"])
    expect("rows", read.train_micro_batch_size_per_gpu, plan["microbatch_size"])
    expect("stages", read.pipeline["stages"], plan["ranks"])
    expect("state of replicas", read.zero_config.stage, {"none": 0, "optimizer": 1}[plan["sharding"]])
    expect("gradients", read.grad_accum_dtype, "fp32" if plan["sharding"] == "optimizer" else None)
    expect("recomputation", read.pipeline["activation_checkpoint_interval"], int(plan["recompute"] == "full"))


CLUSTER_CHECKS = {
    "torchtitan": check_cluster_torchtitan,
    "megatron": check_cluster_megatron,
    "deepspeed": check_cluster_deepspeed,
}
CHECKS = {"torchtitan": check_torchtitan, "megatron": check_megatron, "deepspeed": check_deepspeed}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pipewright", required=True, help="the binary")
    parser.add_argument("systems", nargs="*", default=list(CHECKS), help="torchtitan, megatron, deepspeed")
    arguments = parser.parse_args()
    binary = Path(arguments.pipewright).resolve()
    for system in arguments.systems:
        for size in SIZES + TIGHT.get(system, []):
            with tempfile.TemporaryDirectory() as name:
                folder = Path(name)
                (folder / "p.toml").write_text(PROFILE)
                (folder / "binary").symlink_to(binary)
                plan = emit(str(binary), folder, system, size)
                expect("recomputation of the plan", plan["recompute"], "none" if size[2] is None else "stage")
                detail = CHECKS[system](folder, plan)
                stages = len(plan["boundaries"]) + 1
                print(f"{system:10}  {size}  {plan['schedule']}, {stages} stages, recompute {plan['recompute']}: {detail}")

        for mesh in MESHES + ([] if system == "deepspeed" else [WITH_CONTEXT]):
            with tempfile.TemporaryDirectory() as name:
                folder = Path(name)
                (folder / "config.json").write_text(EXPERTS)
                plan = emit_for_cluster(str(binary), folder, system, mesh)
                CLUSTER_CHECKS[system](folder, plan)
                mesh = " ".join(mesh)
                print(f"{system:10}  {mesh}: {plan['schedule']}, recompute {plan['recompute']}, shard {plan['sharding']}")


if __name__ == "__main__":
    main()
