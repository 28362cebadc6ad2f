"""Let worker processes that have this folder on PYTHONPATH take trials for CUDA and compute them on the CPU.

Only the two places are replaced that would touch a device: the check of the kernels and the choice of torch's device.
What a trial is, its id and its folder are the product's own.
"""

import importlib.util
import sys
from dataclasses import replace
from importlib.machinery import ModuleSpec
from types import ModuleType

NAME = "fewbits.experiments.devices"


class _Finder:
    """Replaces functions of the module as soon as it is imported."""

    @staticmethod
    def find_spec(name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        if name != NAME:
            return None
        sys.meta_path.remove(_Finder)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            original = spec.loader.exec_module

            def execute(module: ModuleType) -> None:
                original(module)
                choose = module.choose
                vars(module)["check_device"] = lambda kind: None
                vars(module)["choose"] = lambda runtime: choose(replace(runtime, device="cpu"))

            spec.loader.exec_module = execute  # type: ignore[method-assign]
        return spec


sys.meta_path.insert(0, _Finder)
