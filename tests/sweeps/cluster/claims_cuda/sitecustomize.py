"""Make processes with this folder on PYTHONPATH accept trials for CUDA, and compute them on the CPU.

Python imports this module when it starts. It replaces only the two functions that would access a GPU: `check_device`
and `choose` in fewbits/experiments/devices.py. The trial, its id and its run folder stay those of a trial for CUDA.
"""

import importlib.util
import sys
from dataclasses import replace
from importlib.machinery import ModuleSpec
from types import ModuleType

NAME = "fewbits.experiments.devices"


class _Finder:
    """An import hook that replaces the two functions of the module NAME when it is imported."""

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
