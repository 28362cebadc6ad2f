"""Launch the kernels of csrc/layers.cu: norms, cross entropy, activations and rotary positions.

The functions have the arguments and results of the operators in kernels/layers/, which call them for tensors on a GPU.
A result has the bits of the definition in kernels/reference/. Rows may be narrower or wider than any number of threads,
but each result must have fewer than 2^31 rows and columns.
"""

import ctypes

import torch
from torch import Tensor

from fewbits.kernels.backends.gpu.tiles import EDGE, THREADS, Shape
from fewbits.kernels.backends.gpu.variants import DTYPE_NAMES, Kernel, Launcher, Variant, spec_of
from fewbits.kernels.quantizer import Quantizer

LANES = 16  # threads of a row; also the columns of a CTA that sums the gradients of weights
SHAPE = Shape(THREADS, 2 * EDGE)
SUMMING = Shape(64 * LANES, 2 * EDGE)  # for `norm_weights`: one thread for each block of rows and column
NO_SPEC = spec_of(Quantizer("fp32"), -1)


class HeadsView(ctypes.Structure):
    _fields_ = [("data", ctypes.c_void_p), *[(name, ctypes.c_int64) for name in ("batch", "token", "head")]]


class LayerCall(ctypes.Structure):
    _fields_ = [
        ("inputs", ctypes.c_void_p * 4),
        ("outputs", ctypes.c_void_p * 3),
        *[(name, ctypes.c_void_p) for name in ("weight", "bias", "means", "inverses", "scales", "targets")],
        *[(name, ctypes.c_int64) for name in ("rows", "ignored")],
        *[(name, HeadsView * 3) for name in ("sources", "results")],
        *[(name, ctypes.c_int32) for name in ("cols", "groups")],
        ("heads", ctypes.c_int32 * 3),
        *[(name, ctypes.c_int32) for name in ("tokens", "size", "rotated", "aligned")],
        *[(name, ctypes.c_float) for name in ("offset", "eps", "sign")],
    ]


class Layers:
    def __init__(self, launcher: Launcher) -> None:
        self._launcher = launcher
        self._kernels: dict[tuple[object, ...], Kernel] = {}

    # ---- norms

    def norm(
        self,
        x: Tensor,
        y: Tensor | None,
        weight: Tensor,
        bias: Tensor | None,
        offset: float,
        eps: float,
        s: Tensor | None,
        results: tuple[Tensor, Tensor, Tensor],
    ) -> None:
        """Write the norm of s = x + y, and the mean and 1/deviation of each row, into `results`, and s into `s`.

        y, s: None for a norm of x alone. An RMS norm has no elements in the tensor of means.
        """
        n, means, inverses = results
        call = _of_norm(x, weight, means, inverses, offset, (x, y), (n, s))
        call.bias, call.eps = _address(bias), eps
        if x.numel():
            self._launch("norm", x, n.dtype, -(-call.rows * LANES // THREADS), call)

    def norm_backward(
        self,
        s: Tensor,
        ds: Tensor | None,
        dn: Tensor,
        weight: Tensor,
        means: Tensor,
        inverses: Tensor,
        offset: float,
        results: tuple[Tensor, Tensor, Tensor | None],
    ) -> None:
        """Write the gradients of s, weight and bias (None: not wanted) into `results`."""
        dx, dweight, dbias = results
        if s.numel():
            call = _of_norm(s, weight, means, inverses, offset, (s, ds, dn), (dx,))
            self._launch("norm_backward", s, dn.dtype, -(-call.rows * LANES // THREADS), call)
        call = _of_norm(s, weight, means, inverses, offset, (s, None, dn), (dweight, dbias))
        if weight.numel():
            self._launch("norm_weights", s, dn.dtype, -(-weight.numel() // LANES), call, SUMMING)

    # ---- cross entropy

    def cross_entropy(self, logits: Tensor, targets: Tensor, ignored: int, results: tuple[Tensor, Tensor]) -> None:
        """Write the loss and log Σ e^logits of each row into `results`; both are NaN if the target is no column."""
        call = _of_rows(logits, (logits,), results)
        call.targets, call.ignored = targets.data_ptr(), ignored
        if logits.numel():
            self._launch("entropy", logits, logits.dtype, -(-call.rows * LANES // THREADS), call)

    def cross_entropy_backward(
        self, dx: Tensor, logits: Tensor, targets: Tensor, log_sums: Tensor, grad: Tensor, ignored: int
    ) -> None:
        """Write the gradient of the logits into dx, which may be the logits."""
        call = _of_rows(logits, (logits, log_sums), (dx,))
        call.targets, call.scales, call.ignored = targets.data_ptr(), grad.data_ptr(), ignored
        call.aligned = _aligned(logits, dx) and logits.shape[1] % EDGE == 0
        if logits.numel():
            self._launch("entropy_backward", logits, logits.dtype, call.rows, call)

    # ---- elements

    def activation(self, name: str, operands: tuple[Tensor, ...], results: tuple[Tensor, ...]) -> None:
        """Apply the kernel `name`, such as `gelu_backward`, to contiguous tensors."""
        x = operands[0]
        call = LayerCall(_addresses(operands, 4), _addresses(results, 3), rows=x.numel())
        call.aligned = _aligned(*operands, *results)
        if x.numel():
            self._launch(name, x, x.dtype, -(-x.numel() // (THREADS * EDGE)), call)

    def rotate(
        self, sources: tuple[Tensor, ...], results: tuple[Tensor, ...], turns: Tensor, inverse: bool = False
    ) -> None:
        """Write q and k, rotated, and v into `results`; both are tensors [batch, token, head, dimension].

        The last dimension must be contiguous. turns: as in layers/attention.py, contiguous and FP32.
        """
        batch, tokens, _, size = sources[0].shape
        call = LayerCall(
            sources=(HeadsView * 3)(*(HeadsView(x.data_ptr(), *x.stride()[:3]) for x in sources)),
            results=(HeadsView * 3)(*(HeadsView(x.data_ptr(), *x.stride()[:3]) for x in results)),
            heads=(ctypes.c_int32 * 3)(*(x.shape[2] for x in sources)),
            scales=turns.data_ptr(),
            sign=-1.0 if inverse else 1.0,
        )
        call.rows, call.tokens, call.size, call.rotated = batch * tokens, tokens, size, 2 * turns.shape[1]
        views = [x for x in (*sources, *results) if x.numel()]
        strides = [stride for x in views for stride in (*x.stride()[:3], size)]
        call.aligned = _aligned(*views) and all(stride % EDGE == 0 for stride in strides)
        threads = call.rows * sum(call.heads) * -(-size // EDGE)
        if threads:
            self._launch("rotate", sources[0], sources[0].dtype, -(-threads // THREADS), call)

    def _launch(
        self, name: str, x: Tensor, other: torch.dtype, blocks: int, call: LayerCall, shape: Shape = SHAPE
    ) -> None:
        key = (name, x.dtype, other, x.get_device())
        kernel = self._kernels.get(key)
        if kernel is None:
            variant = Variant("layers.cu", name, (DTYPE_NAMES[x.dtype], DTYPE_NAMES[other]), shape, (NO_SPEC,))
            kernel = self._kernels[key] = self._launcher.kernel(variant, x.device)
        arguments = ctypes.c_void_p(ctypes.addressof(call))
        kernel(blocks, 0, ctypes.addressof(arguments))


def _of_rows(x: Tensor, inputs: tuple[Tensor | None, ...], outputs: tuple[Tensor | None, ...]) -> LayerCall:
    cols = x.shape[-1]
    return LayerCall(_addresses(inputs, 4), _addresses(outputs, 3), rows=x.numel() // max(cols, 1), cols=cols, groups=1)


def _of_norm(
    s: Tensor,
    weight: Tensor,
    means: Tensor,
    inverses: Tensor,
    offset: float,
    inputs: tuple[Tensor | None, ...],
    outputs: tuple[Tensor | None, ...],
) -> LayerCall:
    call = _of_rows(s, inputs, outputs)
    call.groups = weight.numel() // max(call.cols, 1)
    call.weight, call.inverses, call.offset = weight.data_ptr(), inverses.data_ptr(), offset
    call.means = means.data_ptr() if means.numel() else None
    return call


def _addresses(tensors: tuple[Tensor | None, ...], count: int) -> ctypes.Array[ctypes.c_void_p]:
    return (ctypes.c_void_p * count)(*map(_address, tensors))


def _address(x: Tensor | None) -> int | None:
    return None if x is None else x.data_ptr()


def _aligned(*tensors: Tensor) -> bool:
    return all(x.data_ptr() % 16 == 0 for x in tensors)
