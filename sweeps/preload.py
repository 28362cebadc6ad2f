"""Imported by the process that local workers are forked from: what each of them would load or compute anew."""

import torch._inductor.config  # noqa: F401  # that torch.use_deterministic_algorithms imports

import fewbits.sweeps.worker  # noqa: F401
from fewbits.experiments.sources import sources

sources()
