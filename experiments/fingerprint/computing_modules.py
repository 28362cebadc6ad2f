"""List the modules that compute a trial's numbers, and the other modules that training imports, each with its reason.

A test compares the two lists with the imports of the training script: every imported module must be in one of them.
"""

from __future__ import annotations

# "any": on every device; "cpu" or "cuda": only where trials of that device kind train.
COMPUTING = {
    "kernels.backends.calls": "cuda",
    "kernels.backends.compiled": "any",
    "kernels.backends.compilation": "cpu",  # the compiler's flags
    "kernels.backends.constants": "any",
    "kernels.backends.cpu": "cpu",
    "kernels.backends.cuda": "cuda",
    "kernels.backends.device": "cuda",
    "kernels.backends.protocol": "any",
    "kernels.backends.tiles": "cuda",
    "kernels.backends.variants": "cuda",  # NVRTC's options too
    "kernels.counts": "any",
    "kernels.formats": "any",
    "kernels.layers.activations": "any",
    "kernels.layers.cross_entropy": "any",
    "kernels.layers.library": "any",
    "kernels.layers.norms": "any",
    "kernels.mixing": "any",
    "kernels.operators": "any",
    "kernels.ops": "any",
    "kernels.packing": "any",
    "kernels.backends.processor": "cpu",
    "kernels.products": "any",
    "kernels.quantizer": "any",
    "kernels.backends.reference": "any",
    "kernels.reference.activations": "any",
    "kernels.reference.cross_entropy": "any",
    "kernels.reference.elements": "any",
    "kernels.reference.functions": "any",
    "kernels.reference.noise": "any",
    "kernels.reference.norms": "any",
    "kernels.reference.parts": "any",
    "kernels.reference.rotation": "any",
    "kernels.reference.rounding": "any",
    "kernels.reference.scales": "any",
    "kernels.reference.sums": "any",
    "kernels.reference.weights": "any",
    "kernels.scalings": "any",
    "kernels.seeds": "any",
    "models.networks.decoder": "any",
    "models.networks.initialise": "any",
    "models.networks.layers": "any",
    "models.networks.mamba2": "any",
    "models.observer": "any",
    "models.networks.partition": "any",
    "models.quantize": "any",
    "models.quantized_linear": "any",
    "models.recipe": "any",
    "models.networks.registry": "any",
    "models.operand_pair": "any",
    "models.untraced": "any",
    "models.updates": "any",
    "experiments.optimization.adam_mini": "any",
    "experiments.data.corpus": "any",
    "experiments.data.order": "any",
    "experiments.devices": "any",
    "experiments.evaluation.loss": "any",
    "experiments.evaluation.protocols": "any",
    "experiments.optimization.optimizers": "any",
    "experiments.optimization.schedules": "any",
    "experiments.training": "any",
}

_DATA = "makes or opens tokens; the id holds the fingerprint of their content"
_EXTRA = "computes extra evaluation, which is no part of the id"
_FILES = "reads and writes files whose content other modules compute"
NOT_COMPUTING = {
    "kernels.backends.build": "compiles and caches the CPU library; compilation.py has its sources and flags",
    "kernels.backends.choice": "chooses a backend; which one it was is provenance",
    "kernels.backends.cubins": "compiles and caches CUDA kernels; variants.py has their constants and options",
    "common.locks": "locks files against other processes",
    "common.store_folder": "checks the store's path",
    "common.from_dict": "fills configuration classes; the id holds their values",
    "kernels.api": "checks arguments of operators; of a trial, only the extra evaluation calls it",
    "models.learned_widths": _EXTRA,
    "models.networks.presets": "lists models; the id holds the values of the one that trains",
    "common.atomic": _FILES,
    "common.environment": "sets environment variables for lm-eval; extra evaluation is no part of the id",
    "experiments.storage.branches": "finds a branch's parent; the id holds the parent and its step",
    "experiments.storage.checkpoints": f"{_FILES}; resumed trials are tested to give the same bits",
    "experiments.data.config": "declares settings of data; the id holds the fingerprint of the tokens",
    "experiments.data.folder": _DATA,
    "experiments.data.load": _DATA,
    "experiments.data.once": _DATA,
    "experiments.data.python_sources": _DATA,
    "experiments.data.synthetic": _DATA,
    "experiments.data.text": _DATA,
    "experiments.data.tokenizing": _DATA,
    "experiments.data.web": _DATA,
    "experiments.environment": "describes the machine; provenance",
    "experiments.evaluation.by_document": _EXTRA,
    "experiments.evaluation.cloze": _EXTRA,
    "experiments.evaluation.harness": _EXTRA,
    "experiments.evaluation.language_model": _EXTRA,
    "experiments.evaluation.tasks": _EXTRA,
    "experiments.fingerprint.computing_modules": "lists modules; the fingerprint covers what it lists",
    "experiments.fingerprint.cpp_source": "makes the fingerprint, whose value is in the id",
    "experiments.fingerprint.equal_bits": "lists fingerprints that are proven to give the same numbers",
    "experiments.fingerprint.numerics": "makes the fingerprint, whose value is in the id",
    "experiments.fingerprint.python_source": "makes the fingerprint, whose value is in the id",
    "experiments.identity": "makes the id and the provenance",
    "common.redaction": "hides credentials in messages",
    "experiments.storage.run_folder": _FILES,
    "experiments.setup": "checks settings before training; what it sets is in the resolved config",
    "common.terminal": "writes progress to the terminal",
    "experiments.trial": "declares and checks settings; the id holds their values",
}

# C++ sources that are compiled for a device kind; the headers that they include are added.
CPP_ROOTS = {
    "cpu": (
        "cpu.cpp",
        "cpu_activation.cpp",
        "cpu_bf16.cpp",
        "cpu_entropy.cpp",
        "cpu_fp16.cpp",
        "cpu_fp32.cpp",
        "cpu_gemm.cpp",
        "cpu_noise.cpp",
        "cpu_norm.cpp",
        "cpu_packed.cpp",
    ),
    "cuda": ("decode.cu", "quantize.cu", "weights.cu"),
}
DEVICES = tuple(CPP_ROOTS)

# Classes whose annotated fields are settings: their values are in the id, so their declarations are not hashed.
CONFIG_CLASSES = {
    "models.networks.decoder": ("DecoderConfig",),
    "models.observer": ("ObserverConfig",),
    "models.recipe": ("Dgrad", "Fprop", "Keep", "Recipe", "Sampler", "Switch", "Wgrad"),
    "experiments.optimization.optimizers": ("OptimizerConfig",),
    "experiments.optimization.schedules": ("ScheduleConfig",),
}
