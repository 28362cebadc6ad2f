"""Ask torch about CUDA streams: the current one, and whether it is captured."""

import torch


def current_stream(device: torch.device) -> int:
    """Return the current stream of a device as a number; 0 for a device without streams.

    Work on another stream may not be finished, so what one stream has computed and kept is not for another.
    """
    if device.type != "cuda":
        return 0
    stream: int = torch._C._cuda_getCurrentRawStream(-1 if device.index is None else device.index)
    return stream


def refuse_capture(device: torch.device) -> None:
    """Raise RuntimeError while a CUDA graph captures the current stream.

    A replay would repeat the captured step: its seeds, so the same noise, and its quantized weights.
    """
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "a quantized layer cannot be captured in a CUDA graph: every replay would round with the same random bits "
            "and use the weights of the captured step; run the layer without a graph"
        )
