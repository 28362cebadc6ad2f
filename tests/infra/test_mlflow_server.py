"""Test the files that run an MLflow server, with Docker Compose or on Kubernetes: schemas and MLflow's options."""

import re
from typing import Any

import pytest
import yaml

from tests.infra.manifests import INFRA, agrees, mistakes

FOLDER = INFRA / "mlflow"
TEXT = (FOLDER / "compose.yaml").read_text()
COMPOSE: dict[str, Any] = yaml.safe_load(TEXT)
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]


def test_the_file_fits_its_schema() -> None:
    assert mistakes(COMPOSE, "compose.yaml") == []


def test_the_server_is_the_constrained_mlflow() -> None:
    build = SERVICES["server"]["build"]["dockerfile_inline"]
    (version,) = re.findall(r"^FROM ghcr\.io/mlflow/mlflow:v(\S+)$", build, re.MULTILINE)
    assert agrees(version, "mlflow")
    assert SERVICES["server"]["image"] == SERVICES["bucket"]["image"] == f"fewbits-mlflow:{version}"
    (packages,) = re.findall(r"^RUN pip install --no-cache-dir (.*)$", build, re.MULTILINE)
    assert {package.partition("==")[0] for package in packages.split()} == {"psycopg2-binary", "boto3"}
    assert all(package.partition("==")[2] for package in packages.split())
    assert build.rstrip().splitlines()[-1] == "USER mlflow"


@pytest.fixture(scope="module")
def server() -> Any:
    from mlflow.cli import server  # imported here, since the import takes seconds and few tests need it

    return server


def test_mlflow_parses_the_command(server: Any) -> None:
    words = SERVICES["server"]["command"]
    assert words[:2] == ["mlflow", "server"]
    assert {"--serve-artifacts", "--allowed-hosts"} <= {word.partition("=")[0] for word in words}
    filled = [re.sub(r"\$\{\w+(?::-([^}]*)|:\?)\}", r"\1", word) for word in words]
    options = server.make_context("server", filled[2:]).params  # which refuses options that MLflow does not have
    assert (options["host"], options["port"], options["workers"], options["serve_artifacts"]) == (
        "0.0.0.0",
        5000,
        "4",
        True,
    )
    assert options["backend_store_uri"].startswith("postgresql+psycopg2://mlflow:")
    assert options["artifacts_destination"] == "s3://mlflow"


# The same server on Kubernetes

MANIFESTS: list[dict[str, Any]] = list(yaml.safe_load_all((FOLDER / "kubernetes.yaml").read_text()))
BY_KIND = {kind: [each for each in MANIFESTS if each["kind"] == kind] for kind in ("Deployment", "Service")}
PODS = {each["metadata"]["name"]: each["spec"]["template"] for each in BY_KIND["Deployment"]}


@pytest.mark.parametrize("manifest", MANIFESTS, ids=lambda each: f"{each['kind']} {each['metadata']['name']}")
def test_each_manifest_fits_the_schema_of_kubernetes(manifest: dict[str, Any]) -> None:
    kubernetes_validate = pytest.importorskip("kubernetes_validate")
    kubernetes_validate.validate(manifest, "1.35", strict=True)
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(manifest | {"spce": {}}, "1.35", strict=True)


def test_services_select_the_pods_and_their_ports_and_claims_exist() -> None:
    for service in BY_KIND["Service"]:
        (pod,) = [each for each in PODS.values() if each["metadata"]["labels"] == service["spec"]["selector"]]
        ports = {port["name"]: port["containerPort"] for port in pod["spec"]["containers"][0]["ports"]}
        assert {port["name"]: port["port"] for port in service["spec"]["ports"]} == ports
    claimed = {
        volume["persistentVolumeClaim"]["claimName"] for pod in PODS.values() for volume in pod["spec"]["volumes"]
    }
    assert claimed == {each["metadata"]["name"] for each in MANIFESTS if each["kind"] == "PersistentVolumeClaim"}


def test_on_kubernetes_too_each_option_is_one_of_mlflows_and_the_password_is_a_secret(server: Any) -> None:
    (container,) = PODS["fewbits-mlflow"]["spec"]["containers"]
    assert container["command"] == SERVICES["server"]["command"][:2]
    server.make_context("server", [re.sub(r"\$\(\w+\)", "x", word) for word in container["args"]])
    secrets = [
        entry for pod in PODS.values() for entry in pod["spec"]["containers"][0]["env"] if "PASSWORD" in entry["name"]
    ]
    assert len(secrets) == 2
    assert all(entry["valueFrom"]["secretKeyRef"] == {"name": "fewbits-mlflow", "key": "password"} for entry in secrets)
    (uri,) = [word for word in container["args"] if word.startswith("--backend-store-uri=")]
    assert uri.endswith(":$(PASSWORD)@fewbits-mlflow-postgres:5432/mlflow")
    assert "fewbits-mlflow-postgres" in {each["metadata"]["name"] for each in BY_KIND["Service"]}
