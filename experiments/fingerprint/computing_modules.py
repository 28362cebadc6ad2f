"""List the modules that compute a trial's numbers, and the other modules that training imports.

The numerics fingerprint, which is part of a trial's id, covers only the modules of COMPUTING. NOT_COMPUTING lists the
other modules that training imports, each with the reason why the fingerprint need not cover it: it does not affect a
trial's numbers, or the id contains its effect in another way. A test checks that every module which the training script
imports is in one of the two lists.
"""

from __future__ import annotations

# Module: the kind of device ("cpu" or "cuda") on which it computes numbers of trials; "any": on every kind.
COMPUTING = {
    "kernels.backends.gpu.calls": "cuda",
    "kernels.backends.compiled": "any",
    "kernels.backends.compilation": "cpu",  # has the C++ compiler's flags
    "kernels.backends.constants": "any",
    "kernels.backends.cpu": "cpu",
    "kernels.backends.gpu.cuda": "cuda",
    "kernels.backends.gpu.device": "cuda",
    "kernels.backends.protocol": "any",
    "kernels.backends.gpu.plans": "cuda",
    "kernels.backends.gpu.tiles": "cuda",
    "kernels.backends.gpu.variants": "cuda",  # also has the options of the CUDA compiler
    "kernels.formats": "any",
    "kernels.fp8_products": "any",
    "kernels.layers.activations": "any",
    "kernels.layers.attention": "any",
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
    "kernels.reference.layers": "any",
    "kernels.reference.attention": "any",
    "kernels.reference.elements": "any",
    "kernels.reference.functions": "any",
    "kernels.reference.noise": "any",
    "kernels.reference.rotation": "any",
    "kernels.reference.rounding": "any",
    "kernels.reference.scales": "any",
    "kernels.reference.weights": "any",
    "kernels.scalings": "any",
    "kernels.seeds": "any",
    "models.execution": "any",
    "models.networks.decoder": "any",
    "models.networks.initialise": "any",
    "models.networks.layers": "any",
    "models.networks.mamba2": "any",
    "models.observer": "any",
    "models.networks.sharded": "any",
    "models.networks.partition": "any",
    "models.quantize": "any",
    "models.quantized_linear": "any",
    "models.recipe": "any",
    "models.networks.registry": "any",
    "models.operand_pair": "any",
    "models.runtime": "any",
    "models.updates": "any",
    "experiments.optimization.adam_mini": "any",
    "experiments.data.corpus": "any",
    "experiments.data.order": "any",
    "experiments.devices": "any",
    "experiments.distributed.clipping": "any",
    "experiments.distributed.penalties": "any",
    "experiments.distributed.sharding": "any",
    "experiments.evaluation.loss": "any",
    "experiments.evaluation.protocols": "any",
    "experiments.optimization.optimizers": "any",
    "experiments.optimization.precision": "any",
    "experiments.optimization.schedules": "any",
    "experiments.optimization.update_records": "any",
    "experiments.training": "any",
}

# Modules that compute numbers of probe trials, in addition to those of COMPUTING.
PROBING = (
    "experiments.probes.batches",
    "experiments.probes.bench",
    "experiments.probes.gradient_errors",
    "experiments.probes.probe_trial",
    "experiments.probes.summary",
    "experiments.probes.update_effect",
    "experiments.probes.variants",
)

_DATA = "makes or opens tokens; the id contains the fingerprint of their content"
_EXTRA = "computes additional evaluations, which do not change the id"
_FILES = "reads and writes files whose content other modules compute"
NOT_COMPUTING = {
    "kernels.backends.build": "compiles and caches the CPU library; compilation.py has its sources and flags",
    "kernels.backends.choice": "chooses a backend, which the provenance records; all backends give the same bits",
    "kernels.backends.gpu.cubins": "compiles and caches CUDA kernels; variants.py has their constants and options",
    "common.locks": "locks files against other processes",
    "common.store_folder": "checks the store's path",
    "common.from_dict": "fills configuration classes; the id contains their values",
    "kernels.api": "checks arguments of operators; in a trial, only additional evaluations call it",
    "models.learned_widths": _EXTRA,
    "models.importing.sources": "finds files of published models",
    "models.networks.presets": "lists models; the id contains the configuration of the trial's model",
    "common.atomic": _FILES,
    "common.process": "sets environment variables for lm-eval; additional evaluations do not change the id",
    "experiments.storage.branches": "finds a branch's parent; the id contains the parent's id and the step",
    "experiments.distributed.saving": f"{_FILES}; resumed trials are tested to give the same bits",
    "experiments.storage.checkpoints": f"{_FILES}; resumed trials are tested to give the same bits",
    "experiments.data.config": "declares settings of data; the id contains the fingerprint of the tokens",
    "experiments.data.folder": _DATA,
    "experiments.data.gguf_tokenizer": _DATA,
    "experiments.data.load": _DATA,
    "experiments.data.once": _DATA,
    "experiments.data.one_file": _DATA,
    "experiments.data.python_sources": _DATA,
    "experiments.data.synthetic": _DATA,
    "experiments.data.text": _DATA,
    "experiments.data.tokenizing": _DATA,
    "experiments.data.preparation.web": _DATA,
    "experiments.environment": "describes the machine, for the provenance",
    "experiments.machine_kinds": "tells which machine computed a run; an unlike run starts again",
    "experiments.evaluation.by_document": _EXTRA,
    "experiments.evaluation.harness": _EXTRA,
    "experiments.evaluation.language_model": _EXTRA,
    "experiments.evaluation.tasks": _EXTRA,
    "experiments.fingerprint.computing_modules": "lists modules; the fingerprint covers the modules that it lists",
    "experiments.fingerprint.cpp_source": "makes the fingerprint, whose value is in the id",
    "experiments.fingerprint.equal_bits": "lists fingerprints that are proven to give the same numbers",
    "experiments.fingerprint.numerics": "makes the fingerprint, whose value is in the id",
    "experiments.fingerprint.python_source": "makes the fingerprint, whose value is in the id",
    "experiments.identity": "makes the id and the provenance",
    "common.redaction": "hides credentials in messages",
    "experiments.probes.config": "declares settings of probes; the id contains their values",
    "experiments.storage.run_folder": _FILES,
    "experiments.setup": "checks settings before training; settings that it changes are in the resolved config",
    "common.terminal": "writes progress to the terminal",
    "experiments.trial": "declares and checks settings; the id contains their values",
}

# For each kind of device, the C++ and CUDA sources in kernels/csrc; the fingerprint also covers the headers that they
# include.
CPP_ROOTS = {
    "cpu": (
        "cpu.cpp",
        "cpu_activation.cpp",
        "cpu_attention.cpp",
        "cpu_bf16.cpp",
        "cpu_entropy.cpp",
        "cpu_fp16.cpp",
        "cpu_fp32.cpp",
        "cpu_gemm.cpp",
        "cpu_noise.cpp",
        "cpu_norm.cpp",
        "cpu_packed.cpp",
    ),
    "cuda": ("decide.cu", "decode.cu", "quantize.cu", "weights.cu"),
}
DEVICES = tuple(CPP_ROOTS)

# Module: its classes whose annotated fields are settings. A trial's id contains the values of these fields, so the
# fingerprint omits their declarations.
CONFIG_CLASSES = {
    "models.networks.decoder": ("DecoderConfig",),
    "models.observer": ("ObserverConfig",),
    "models.recipe": ("Dgrad", "Fprop", "Keep", "Recipe", "Sampler", "Switch", "Wgrad"),
    "experiments.optimization.optimizers": ("OptimizerConfig",),
    "experiments.optimization.precision": ("Precision",),
    "experiments.optimization.schedules": ("ScheduleConfig",),
}
