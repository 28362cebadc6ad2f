"""Count how often the observer would make the host wait for a GPU; the count works on a machine without one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fewbits.models.observer import Observer, ObserverConfig
from fewbits.models.quantized_linear import QuantizedLinear


class Copies(TorchDispatchMode):
    """A dispatch mode that counts the operations for which the host would wait for a device."""

    WAIT = frozenset(("_local_scalar_dense", "bincount", "nonzero", "masked_select", "unique", "equal"))

    def __init__(self) -> None:
        super().__init__()
        self.count = 0
        self._copy = Tensor.cpu

    def __enter__(self) -> Copies:
        # `Tensor.cpu` is replaced, because on a CPU tensor it does nothing that a dispatch mode could count.
        def counted(tensor: Tensor) -> Tensor:
            self.count += 1
            return self._copy(tensor)

        Tensor.cpu = counted  # type: ignore[method-assign, assignment]
        super().__enter__()
        return self

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)
        Tensor.cpu = self._copy  # type: ignore[method-assign]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func.overloadpacket.__name__ in self.WAIT
        return func(*args, **(kwargs or {}))


class CountedObserver(Observer):
    """An observer that counts, in `copies`, the operations in its own methods for which the host would wait.

    Operations outside these methods are not counted, because layers with mixtures copy, too, but only on a CPU.
    """

    def __init__(self, config: ObserverConfig) -> None:
        super().__init__(config)
        self.copies = Copies()

    def record(self, *arguments: Any, **others: Any) -> None:
        with self.copies:
            super().record(*arguments, **others)

    def record_weight_gradient(self, *arguments: Any) -> None:
        with self.copies:
            super().record_weight_gradient(*arguments)

    def rows(self, step: int, layers: Sequence[QuantizedLinear], *, weights: bool = True) -> list[dict[str, Any]]:
        with self.copies:
            return super().rows(step, layers, weights=weights)
