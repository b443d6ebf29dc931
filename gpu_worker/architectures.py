"""Architectures that a version may name: code that ships with the worker, so that weights can travel without code.

A new architecture is a class and one line in the table; a version built for it never needs pickle.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping

import torch
from torch import nn

from gpu_worker.errors import ModelError


class MultiLayerPerceptron(nn.Module):
    """Linear layers with ReLU between them: FP32 [n, inputs] to FP32 [n, outputs]."""

    def __init__(self, *, inputs: int, hidden: int, layers: int, outputs: int) -> None:
        super().__init__()
        widths = [inputs, *[hidden] * layers]
        stack: list[nn.Module] = []
        for narrow, wide in itertools.pairwise(widths):
            stack += [nn.Linear(narrow, wide), nn.ReLU()]
        self.stack = nn.Sequential(*stack, nn.Linear(widths[-1], outputs))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Logits."""
        y: torch.Tensor = self.stack(x)
        return y


_ARCHITECTURES: dict[str, tuple[Callable[..., nn.Module], frozenset[str]]] = {
    "mlp": (MultiLayerPerceptron, frozenset({"inputs", "hidden", "layers", "outputs"})),
}


def build(architecture: str, args: Mapping[str, int]) -> nn.Module:
    """The module that `architecture` names, with arbitrary weights.

    Raises ModelError for a name or arguments unknown here.
    """
    if architecture not in _ARCHITECTURES:
        raise ModelError(f"architecture '{architecture}' is not known here, expected one of {sorted(_ARCHITECTURES)}")
    construct, expected = _ARCHITECTURES[architecture]
    if set(args) != expected:
        raise ModelError(f"architecture '{architecture}' takes {sorted(expected)}, found {sorted(args)}")
    for name, value in args.items():
        if not 1 <= value <= 65536:
            raise ModelError(f"architecture '{architecture}': {name} is {value}, expected 1 to 65536")
    return construct(**args)
