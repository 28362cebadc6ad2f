"""Compute the penalty of learned bit widths (GaussWS eq. 12) in a sharded model.

Outside a block's forward pass, a rank has only a part of a layer's bit widths. So a hook computes the layer's term of
the penalty during the forward pass, when all widths are gathered. The gradient of this term is then reduced over ranks
together with the gradient of the loss.
"""

from __future__ import annotations

from torch import Tensor, nn
from torch._C import _current_graph_task_id
from torch.autograd.graph import saved_tensors_hooks

from fewbits.models.learned_widths import sampled_layers
from fewbits.models.quantize import Quantization
from fewbits.models.quantized_linear import QuantizedLinear


class Penalties:
    """The terms of the penalty on learned bit widths, collected layer by layer in one forward pass.

    There are none if the recipe has no penalty (`sampler.penalty` is 0).
    """

    def __init__(self, quantization: Quantization) -> None:
        self._quantization = quantization
        self._terms: list[Tensor] = []
        if quantization.recipe.sampler.penalty:
            for layer in sampled_layers(quantization):
                layer.register_forward_hook(self._add)

    def take(self) -> Tensor | None:
        """Return the penalty of the last forward pass and forget its terms; None if the recipe has no penalty."""
        terms, self._terms = self._terms, []
        return self._quantization.weighted(terms)

    def _add(self, layer: nn.Module, *_: object) -> None:
        assert isinstance(layer, QuantizedLinear)
        if not layer.training or _current_graph_task_id() != -1:
            return  # evaluation, or a block that is computed again in the backward pass
        # Save these tensors themselves for the backward pass. With training.recompute, torch would otherwise try to
        # compute them again from the block, before the block's parameters are gathered.
        with saved_tensors_hooks(lambda saved: saved, lambda saved: saved):
            term = self._quantization.penalty_term(layer)
        assert term is not None
        self._terms.append(term)
