"""The module of a stage: layers that run one after the other. Imports PyTorch."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.checkpoint import checkpoint


class Chain(torch.nn.ModuleList):
    """Layers in order. Each gets the output of the one before it; a tuple becomes several arguments.

    With `recompute`, a training forward keeps its inputs only, and its backward runs it again. Parameters are named by layer,
    counted from 0. `first` is the position of the first layer in the model.
    """

    def __init__(self, layers: list[torch.nn.Module], *, recompute: bool = False, first: int = 0):
        super().__init__(layers)
        self.recompute = recompute
        self.of_model = range(first, first + len(layers))

    def forward(self, *values: Any) -> Any:
        """Returns the output of the last layer."""
        if self.recompute and torch.is_grad_enabled():
            return checkpoint(self._run, *values, use_reentrant=False)
        return self._run(*values)

    def _run(self, *values: Any) -> Any:
        output: Any = values
        for layer in self:
            output = layer(*values)
            values = output if isinstance(output, tuple) else (output,)
        return output
