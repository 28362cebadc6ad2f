"""Compute the penalty of learned bit widths inside sharded models.

Outside a block's forward pass a rank holds only a part of a layer's widths. A hook computes the layer's term in the
forward pass, from all widths. So the term's gradient is reduced together with the loss's, as in an unsharded model.
"""

from __future__ import annotations

from torch import Tensor, nn
from torch._C import _current_graph_task_id
from torch.autograd.graph import saved_tensors_hooks

from fewbits.models.learned_widths import sampled_layers
from fewbits.models.quantize import Quantization
from fewbits.models.quantized_linear import QuantizedLinear


class Penalties:
    """The terms of one forward pass, collected layer by layer; none if the recipe has no penalty."""

    def __init__(self, quantization: Quantization) -> None:
        self._quantization = quantization
        self._terms: list[Tensor] = []
        if quantization.recipe.sampler.penalty:
            for layer in sampled_layers(quantization):
                layer.register_forward_hook(self._add)

    def take(self) -> Tensor | None:
        """Return the penalty of the last forward pass, or None if the recipe has none."""
        terms, self._terms = self._terms, []
        return self._quantization.weighted(terms)

    def _add(self, layer: nn.Module, *_: object) -> None:
        assert isinstance(layer, QuantizedLinear)
        if not layer.training or _current_graph_task_id() != -1:
            return  # evaluation, or a block that is computed again in the backward pass
        # Tensors are saved as such: a block that recomputes would otherwise be asked for them before it is gathered.
        with saved_tensors_hooks(lambda saved: saved, lambda saved: saved):
            term = self._quantization.penalty_term(layer)
        assert term is not None
        self._terms.append(term)
