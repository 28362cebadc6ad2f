"""Quantize the products of modules that hold the weights of several experts in one parameter.

Such a module (transformers' mixtures of experts, torchtitan's GroupedExperts) multiplies by a part of its parameter
without calling a layer: expert by expert (F.linear, `@`), or all experts at once (torch.bmm, grouped_mm). `install`
makes the module call an ExpertLinear for each of these products. Any other use of the parameter that computes new
values from it is an error, so that no product of a weight stays unquantized in silence.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from fewbits.models.quantized_linear import QuantizedLinear
from fewbits.models.runtime import untraced
from fewbits.models.weights import BlockLinear

LAYERS = "quantized_experts"  # the attribute with a module's ExpertLinears, by the parameter's name
_LINEAR = (nn.functional.linear,)
_MATMUL = (torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.mm, Tensor.mm, torch.bmm, Tensor.bmm)
_GROUPED = (torch._grouped_mm, nn.functional.grouped_mm)


class ExpertLinear(QuantizedLinear):
    """The product with one expert's matrix, which stays a part of the parameter of the module that holds it."""

    def _adopt(self, layer: BlockLinear) -> None:
        assert layer.expert is not None
        self.expert = layer.expert
        self.holder = [layer.module]  # in a list, so that the module does not become a submodule of its own layer
        self.bias = None  # type: ignore[assignment]

    @property
    def matrix(self) -> Tensor:
        matrix: Tensor = getattr(self.holder[0], self.expert.parameter)[self.expert.number]
        return matrix.t() if self.expert.transposed else matrix

    @property
    def gradient(self) -> Tensor | None:
        gradient: Tensor | None = getattr(self.holder[0], self.expert.parameter).grad
        return None if gradient is None else gradient[self.expert.number]


def install(module: nn.Module, layers: Sequence[ExpertLinear]) -> None:
    """Make a module with experts compute its products by the layers, in place of products with its parameters."""
    names = dict.fromkeys(layer.expert.parameter for layer in layers)
    lists = {name: nn.ModuleList(layer for layer in layers if layer.expert.parameter == name) for name in names}
    setattr(module, LAYERS, nn.ModuleDict(lists))
    if not isinstance(module, _Intercepted):
        module.__class__ = _intercepted(type(module))  # type: ignore[arg-type]


class _Intercepted:
    """A marker of the classes that `_intercepted` makes."""


@cache
def _intercepted(kind: type[nn.Module]) -> type[nn.Module]:
    """Return a subclass whose forward pass computes products with experts' weights by ExpertLinears."""

    class Intercepted(_Intercepted, kind):  # type: ignore[misc,valid-type]
        @untraced  # as the forward pass of a QuantizedLinear
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            with _Products(self):
                return super().forward(*args, **kwargs)

        def __reduce__(self) -> tuple[Any, ...]:
            return _revive, (kind,), self.__getstate__()

    Intercepted.__name__ = Intercepted.__qualname__ = f"Quantized{kind.__name__}"
    return Intercepted


def _revive(kind: type[nn.Module]) -> nn.Module:
    """Return an empty object of the subclass of `kind`, into which pickle and copy put the state."""
    cls = _intercepted(kind)  # type: ignore[arg-type]
    made: nn.Module = cls.__new__(cls)
    return made


class _Products(TorchFunctionMode):
    """Replaces products with the parameters of a module's experts by calls of its ExpertLinears."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        layers: Mapping[str, Sequence[ExpertLinear]] = getattr(module, LAYERS)
        self.kind = type(module).__name__
        held = [(getattr(module, name), each) for name, each in layers.items()]
        self.memory: dict[int, list[tuple[Tensor, Sequence[ExpertLinear]]]] = {}
        for parameter, each in held:
            self.memory.setdefault(_memory(parameter), []).append((parameter, each))

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if not any(_memory(a) in self.memory and self._holder(a) for a in _tensors([*args, *kwargs.values()])):
            return func(*args, **kwargs)
        if func in _LINEAR:
            return self._linear(*args, **kwargs)
        if func in _MATMUL:
            return self._matmul(*args, **kwargs)
        if func in _GROUPED:
            return self._grouped(*args, **kwargs)
        result = func(*args, **kwargs)
        if isinstance(result, Tensor) and result.is_floating_point() and self._holder(result) is None:
            raise self._refusal(f"computes {getattr(func, '__name__', func)} of")
        return result

    def _linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        y: Tensor = self._find(weight.t())(x)
        return y if bias is None else y + bias

    def _matmul(self, x: Tensor, weight: Tensor) -> Tensor:
        if weight.ndim == 2:
            y: Tensor = self._find(weight)(x)
            return y
        if x.ndim != 3 or self._holder(weight) is None:
            raise self._refusal("multiplies in an order that fewbits does not know")
        return torch.stack([self._find(each)(rows) for rows, each in zip(x, weight, strict=True)])

    def _grouped(self, x: Tensor, weight: Tensor, *, offs: Tensor, **_: Any) -> Tensor:
        ends = [0, *offs.tolist()]
        rows = zip(weight, pairwise(ends), strict=True)
        pieces = [self._find(each)(x[start:end]) for each, (start, end) in rows if end > start]
        rest = x.new_zeros(len(x) - ends[-1], weight.shape[-1], dtype=pieces[0].dtype if pieces else x.dtype)
        return torch.cat([*pieces, rest])

    def _find(self, matrix: Tensor) -> ExpertLinear:
        """Return the layer of an expert's matrix, given as in × out, which is a view of a parameter."""
        held = self._holder(matrix)
        if held is None:
            raise self._refusal("multiplies a copy of")
        parameter, layers = held
        number, rest = divmod(int(matrix.storage_offset() - parameter.storage_offset()), parameter.stride(0))
        stored = parameter[0].t() if not layers[0].expert.transposed else parameter[0]
        if rest or (matrix.shape, matrix.stride()) != (stored.shape, stored.stride()):
            raise self._refusal("multiplies a part of an expert's matrix, or its transpose, of")
        return layers[number]

    def _holder(self, tensor: Tensor) -> tuple[Tensor, Sequence[ExpertLinear]] | None:
        """Return the parameter in whose memory a tensor lies, and its layers; several may share one storage."""
        for parameter, layers in self.memory.get(_memory(tensor), ()):
            if 0 <= tensor.storage_offset() - parameter.storage_offset() < parameter.numel():
                return parameter, layers
        return None

    def _refusal(self, what: str) -> RuntimeError:
        return RuntimeError(
            f"{self.kind} {what} its experts' weights, which fewbits cannot quantize; for a model of transformers, "
            'choose another implementation: model.set_experts_implementation("eager")'
        )


def _tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    """Yield the tensors among the arguments of a call, also those in lists and tuples."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata
