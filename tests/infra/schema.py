"""Check a YAML manifest with one of the JSON schemas in the folder `schemas` beside this file."""

from pathlib import Path
from typing import Any

import yaml
from jsonschema import Draft202012Validator  # type: ignore[import-untyped]


def mistakes(manifest: object, schema: str) -> list[str]:
    """Return the paths in a manifest that violate the schema, such as `spec.workerGroupSpecs.0`; empty if it is valid.

    schema: the name of the schema's file. KubeRay's schema allows several kinds of manifests. Only the rules for the
    manifest's own kind are checked; otherwise the result would name the whole manifest instead of the wrong key.
    """
    definition: dict[str, Any] = yaml.safe_load(Path(__file__).with_name("schemas").joinpath(schema).read_text())
    if isinstance(manifest, dict) and "kind" in manifest:
        of_kind = {"RayCluster": "cluster", "RayJob": "job", "PersistentVolumeClaim": "claim"}
        definition = {"$ref": f"#/$defs/{of_kind.get(str(manifest['kind']), 'object')}", "$defs": definition["$defs"]}
    Draft202012Validator.check_schema(definition)
    return [".".join(map(str, error.absolute_path)) for error in Draft202012Validator(definition).iter_errors(manifest)]
