"""Define the public API of fewbits for users and notebooks: `from fewbits import NAME`.

The module that defines a name is imported when the name is first used, so that `import fewbits` is fast and does not
import torch. Code inside the packages does not use this module; it imports from the module that defines a name.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from fewbits.common.process import extras
from fewbits.version import __version__ as __version__

if TYPE_CHECKING:
    from fewbits.analysis.tidy.runs import Runs as Runs
    from fewbits.analysis.tidy.runs import read as read
    from fewbits.analysis.tidy.runs import runs as runs
    from fewbits.experiments.config import load_recipe as load_recipe
    from fewbits.experiments.config import load_trial as load_trial
    from fewbits.experiments.config import quantize as quantize
    from fewbits.experiments.evaluation.evaluate import evaluate as evaluate
    from fewbits.kernels.accumulators import product as product
    from fewbits.kernels.api import QuantStats as QuantStats
    from fewbits.kernels.api import fake_quantize as fake_quantize
    from fewbits.kernels.api import fake_quantize_both as fake_quantize_both
    from fewbits.kernels.api import mix as mix
    from fewbits.kernels.conformance import conform as conform
    from fewbits.kernels.formats import Format as Format
    from fewbits.kernels.noise import gaussian_noise as gaussian_noise
    from fewbits.kernels.noise import sample_weight as sample_weight
    from fewbits.kernels.noise import uniform_noise as uniform_noise
    from fewbits.kernels.noise import unpack_noise as unpack_noise
    from fewbits.kernels.packed import Packed as Packed
    from fewbits.kernels.packed import decode as decode
    from fewbits.kernels.packed import encode as encode
    from fewbits.kernels.quantizer import Mixture as Mixture
    from fewbits.kernels.quantizer import Quantizer as Quantizer
    from fewbits.kernels.randomness import check_randomness as check_randomness
    from fewbits.kernels.seeds import derive_seed as derive_seed
    from fewbits.models.layer_table import layer_table as layer_table
    from fewbits.models.networks.registry import build as build
    from fewbits.models.observer import Observer as Observer
    from fewbits.models.observer import ObserverConfig as ObserverConfig
    from fewbits.models.quantize import Quantization as Quantization
    from fewbits.models.recipe import Recipe as Recipe

_DEFINED_IN = {  # module → the public names that it defines
    "fewbits.analysis.tidy.runs": ("Runs", "read", "runs"),
    "fewbits.experiments.config": ("load_recipe", "load_trial", "quantize"),
    "fewbits.experiments.evaluation.evaluate": ("evaluate",),
    "fewbits.kernels.accumulators": ("product",),
    "fewbits.kernels.api": ("QuantStats", "fake_quantize", "fake_quantize_both", "mix"),
    "fewbits.kernels.conformance": ("conform",),
    "fewbits.kernels.formats": ("Format",),
    "fewbits.kernels.noise": ("gaussian_noise", "sample_weight", "uniform_noise", "unpack_noise"),
    "fewbits.kernels.packed": ("Packed", "decode", "encode"),
    "fewbits.kernels.quantizer": ("Mixture", "Quantizer"),
    "fewbits.kernels.randomness": ("check_randomness",),
    "fewbits.kernels.seeds": ("derive_seed",),
    "fewbits.models.layer_table": ("layer_table",),
    "fewbits.models.networks.registry": ("build",),
    "fewbits.models.observer": ("Observer", "ObserverConfig"),
    "fewbits.models.quantize": ("Quantization",),
    "fewbits.models.recipe": ("Recipe",),
}
_MODULE_OF = {name: module for module, names in _DEFINED_IN.items() for name in names}
__all__ = [*_MODULE_OF]

if not TYPE_CHECKING:  # hidden from type checkers: with a __getattr__, they would accept names that do not exist

    def __getattr__(name: str) -> object:
        if name not in _MODULE_OF:
            raise AttributeError(f"module 'fewbits' has no attribute {name!r}")
        with extras("report" if _MODULE_OF[name].startswith("fewbits.analysis") else ""):
            value = getattr(import_module(_MODULE_OF[name]), name)
        globals()[name] = value  # so that the next access does not call this function
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
