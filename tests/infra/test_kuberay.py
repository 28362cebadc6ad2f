"""Test the KubeRay manifests: valid keys, Ray's version as in constraints.txt, a store that all pods share, no root."""

from typing import Any

import pytest
import yaml

from tests.infra.manifests import INFRA, agrees, mistakes

FOLDER = INFRA / "kuberay"


def load(name: str) -> dict[str, Any]:
    (document,) = yaml.safe_load_all((FOLDER / name).read_text())
    return document


CLUSTER, JOB, STORE = load("cluster.yaml"), load("job.yaml"), load("store.yaml")
GROUPS = [CLUSTER["spec"]["headGroupSpec"], *CLUSTER["spec"]["workerGroupSpecs"]]


def test_the_cluster_of_the_job_is_the_standing_one() -> None:
    assert JOB["spec"]["rayClusterSpec"] == CLUSTER["spec"]


@pytest.mark.parametrize("manifest", [CLUSTER, JOB, STORE], ids=["cluster", "job", "store"])
def test_each_manifest_fits_its_schema(manifest: dict[str, Any]) -> None:
    assert mistakes(manifest, "kuberay.yaml") == []


def test_the_version_of_ray_is_the_constrained_one() -> None:
    assert agrees(CLUSTER["spec"]["rayVersion"], "ray")


@pytest.mark.parametrize("group", GROUPS, ids=["head", "gpu"])
def test_each_pod_has_resources_the_store_and_no_root(group: dict[str, Any]) -> None:
    pod = group["template"]["spec"]
    (container,) = pod["containers"]
    assert container["image"].startswith("registry.example.com/fewbits:")
    assert container["resources"]["requests"] == container["resources"]["limits"]
    assert {"cpu", "memory"} <= set(container["resources"]["limits"])
    (mount,) = container["volumeMounts"]
    (volume,) = pod["volumes"]
    assert mount == {"name": volume["name"], "mountPath": "/mnt/fewbits"}
    assert volume["persistentVolumeClaim"]["claimName"] == STORE["metadata"]["name"]
    assert pod["securityContext"] == {"runAsNonRoot": True, "runAsUser": 1000, "runAsGroup": 1000, "fsGroup": 1000}
