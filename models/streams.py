"""Return the current CUDA stream, and refuse to run while a CUDA graph captures it."""

import torch


def current_stream(device: torch.device) -> int:
    """Return the current stream of a device as a number; 0 for a device without streams.

    The number is part of cache keys: a tensor that one stream computes may not be finished when another stream reads
    it, so each stream must use only the cached tensors that it has computed itself.
    """
    if device.type != "cuda":
        return 0
    stream: int = torch._C._cuda_getCurrentRawStream(-1 if device.index is None else device.index)
    return stream


def refuse_capture(device: torch.device) -> None:
    """Raise RuntimeError while a CUDA graph captures the current stream.

    Every replay of the graph would use the seeds, and thus the noise, and the quantized weights of the captured step.
    """
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "a quantized layer cannot be captured in a CUDA graph: every replay would round with the same random bits "
            "and use the weights of the captured step; run the layer without a graph"
        )
