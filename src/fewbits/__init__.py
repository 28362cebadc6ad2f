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

_DEFINED_IN = {  # module → the public names that it defines
    "fewbits.analysis.tidy.runs": ("Place", "Runs", "read", "runs"),
    "fewbits.experiments.config": ("load_recipe", "load_trial"),
    "fewbits.experiments.evaluation.evaluate": ("evaluate",),
    "fewbits.kernels.accumulators": ("product",),
    "fewbits.kernels.api": ("QuantStats", "fake_quantize", "fake_quantize_both", "mix"),
    "fewbits.kernels.formats": ("Format",),
    "fewbits.kernels.noise": ("gaussian_noise", "sample_weight", "uniform_noise", "unpack_noise"),
    "fewbits.kernels.packed": ("Packed", "decode", "encode"),
    "fewbits.kernels.quantizer": ("Mixture", "Quantizer"),
    "fewbits.kernels.seeds": ("derive_seed",),
    "fewbits.models.layer_table": ("layer_table",),
    "fewbits.models.networks.registry": ("build",),
    "fewbits.models.observer": ("Observer", "ObserverConfig"),
    "fewbits.models.quantize": ("Quantization", "quantize"),
    "fewbits.models.recipe": ("Recipe",),
}
_MODULE_OF = {name: module for module, names in _DEFINED_IN.items() for name in names}

if not TYPE_CHECKING:  # hidden from type checkers: with a __getattr__, they would accept names that do not exist

    def __getattr__(name: str) -> object:
        if name not in _MODULE_OF:
            raise AttributeError(f"module 'fewbits' has no attribute {name!r}")
        value = getattr(import_module(_MODULE_OF[name]), name)
        globals()[name] = value  # so that the next access does not call this function
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
