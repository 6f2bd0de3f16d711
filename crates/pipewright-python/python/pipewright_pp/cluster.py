"""Predicts training steps on clusters, from figures of machines and the shape of a model.

>>> from pipewright_pp.cluster import plan, predict
>>> config = {"architectures": ["LlamaForCausalLM"], "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 11008,
...           "num_hidden_layers": 32, "num_attention_heads": 32}
>>> layout = {"gpus": 8, "tp": 2, "mbs": 1, "gbs": 64, "seq": 4096, "precision": "bf16"}
>>> predict(config, "h100", layout).seconds < 10
True
>>> best = plan(config, "h100", gpus=8, batch=64, sequence=4096)[0]
>>> predict(config, "h100", best.layout).seconds == best.prediction.seconds
True

`check` judges a script or a file of another system, and `clusters` lists the machines that have names. `pipewright_pp.torch.measure_machine` writes the cluster file of the machine at hand.
"""

from __future__ import annotations

from pipewright_pp._native import ClusterPlan, Judgement, Prediction, clusters, predict, shapes
from pipewright_pp._native import check_cluster as check
from pipewright_pp._native import plan_cluster as plan

__all__ = ["ClusterPlan", "Judgement", "Prediction", "check", "clusters", "plan", "predict", "shapes"]
