"""Define the public API of fewbits for users and notebooks: `from fewbits import NAME`.

The module that defines a name is imported when the name is first used, so that `import fewbits` is fast and does not
import torch. Code inside the packages does not use this module; it imports from the module that defines a name.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from fewbits.version import __version__ as __version__

if TYPE_CHECKING:
    from fewbits.analysis.tidy.runs import Place, Runs, read, runs
    from fewbits.experiments.config import load_recipe, load_trial
    from fewbits.experiments.evaluation.evaluate import evaluate
    from fewbits.kernels.accumulators import product
    from fewbits.kernels.api import QuantStats, fake_quantize, fake_quantize_both, mix
    from fewbits.kernels.formats import Format
    from fewbits.kernels.noise import gaussian_noise, sample_weight, uniform_noise, unpack_noise
    from fewbits.kernels.packed import Packed, decode, encode
    from fewbits.kernels.quantizer import Mixture, Quantizer
    from fewbits.kernels.seeds import derive_seed
    from fewbits.models.layer_table import layer_table
    from fewbits.models.networks.registry import build
    from fewbits.models.observer import Observer, ObserverConfig
    from fewbits.models.quantize import Quantization, quantize
    from fewbits.models.recipe import Recipe

__all__ = [
    "Format",
    "Mixture",
    "Observer",
    "ObserverConfig",
    "Packed",
    "Place",
    "QuantStats",
    "Quantization",
    "Quantizer",
    "Recipe",
    "Runs",
    "build",
    "decode",
    "derive_seed",
    "encode",
    "evaluate",
    "fake_quantize",
    "fake_quantize_both",
    "gaussian_noise",
    "layer_table",
    "load_recipe",
    "load_trial",
    "mix",
    "product",
    "quantize",
    "read",
    "runs",
    "sample_weight",
    "uniform_noise",
    "unpack_noise",
]

_DEFINED_IN = {  # public name → the module that defines it
    "Place": "fewbits.analysis.tidy.runs",
    "Runs": "fewbits.analysis.tidy.runs",
    "read": "fewbits.analysis.tidy.runs",
    "runs": "fewbits.analysis.tidy.runs",
    "Observer": "fewbits.models.observer",
    "ObserverConfig": "fewbits.models.observer",
    "Quantization": "fewbits.models.quantize",
    "Recipe": "fewbits.models.recipe",
    "build": "fewbits.models.networks.registry",
    "layer_table": "fewbits.models.layer_table",
    "evaluate": "fewbits.experiments.evaluation.evaluate",
    "load_recipe": "fewbits.experiments.config",
    "load_trial": "fewbits.experiments.config",
    "quantize": "fewbits.models.quantize",
    "Format": "fewbits.kernels.formats",
    "Mixture": "fewbits.kernels.quantizer",
    "Packed": "fewbits.kernels.packed",
    "QuantStats": "fewbits.kernels.api",
    "Quantizer": "fewbits.kernels.quantizer",
    "decode": "fewbits.kernels.packed",
    "derive_seed": "fewbits.kernels.seeds",
    "encode": "fewbits.kernels.packed",
    "fake_quantize": "fewbits.kernels.api",
    "fake_quantize_both": "fewbits.kernels.api",
    "gaussian_noise": "fewbits.kernels.noise",
    "mix": "fewbits.kernels.api",
    "product": "fewbits.kernels.accumulators",
    "sample_weight": "fewbits.kernels.noise",
    "uniform_noise": "fewbits.kernels.noise",
    "unpack_noise": "fewbits.kernels.noise",
}

if not TYPE_CHECKING:  # hidden from type checkers: with a __getattr__, they would accept names that do not exist

    def __getattr__(name: str) -> object:
        if name not in _DEFINED_IN:
            raise AttributeError(f"module 'fewbits' has no attribute {name!r}")
        value = getattr(import_module(_DEFINED_IN[name]), name)
        globals()[name] = value  # so that the next access does not call this function
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
