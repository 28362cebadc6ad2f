"""Check a manifest with one of the schemas beside this file."""

from pathlib import Path
from typing import Any

import yaml
from jsonschema import Draft202012Validator  # type: ignore[import-untyped]


def mistakes(manifest: object, schema: str) -> list[str]:
    """Return the places of a manifest that its schema refuses, such as `spec.workerGroupSpecs.0`."""
    definition: dict[str, Any] = yaml.safe_load(Path(__file__).with_name("schemas").joinpath(schema).read_text())
    if isinstance(manifest, dict) and "kind" in manifest:  # name the mistake, not that none of the kinds fits
        of_kind = {"RayCluster": "cluster", "RayJob": "job", "PersistentVolumeClaim": "claim"}
        definition = {"$ref": f"#/$defs/{of_kind.get(str(manifest['kind']), 'object')}", "$defs": definition["$defs"]}
    Draft202012Validator.check_schema(definition)
    return [".".join(map(str, error.absolute_path)) for error in Draft202012Validator(definition).iter_errors(manifest)]
