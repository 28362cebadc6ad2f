"""Check manifests of infra/ with the JSON schemas in the folder `schemas`, and versions with constraints.txt."""

import re
from pathlib import Path
from typing import Any

import yaml
from jsonschema import Draft202012Validator  # type: ignore[import-untyped]

ROOT = Path(__file__).parents[2]
INFRA = ROOT / "infra"


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


def constrained(package: str) -> str:
    """Return the version that constraints.txt requires of a package, such as `2.60` for `ray==2.60.*`."""
    found = re.search(rf"^{re.escape(package)}==(.+?)(?:\.\*)?$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert found, f"constraints.txt does not name {package}"
    return found[1]


def agrees(version: str, package: str) -> bool:
    return version == constrained(package) or version.startswith(f"{constrained(package)}.")
