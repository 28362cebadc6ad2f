"""Test the files that run an MLflow server, with Docker Compose or on Kubernetes: images, options, secrets, volumes."""

import re
import subprocess
from typing import Any

import pytest
import yaml

from tests.infra.manifests import INFRA, ROOT, agrees, mistakes

FOLDER = INFRA / "mlflow"
TEXT = (FOLDER / "compose.yaml").read_text()
COMPOSE: dict[str, Any] = yaml.safe_load(TEXT)
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
EXAMPLE = dict(
    line.partition("=")[::2] for line in (FOLDER / ".env.example").read_text().splitlines() if line and line[0] != "#"
)


def variables(text: str) -> dict[str, str]:
    """Return variable → text after its name, for each variable `${NAME…}` that Docker Compose replaces in the text.

    The text after the name is `:?` for a required variable, or `:-` and the default value.
    """
    return dict(re.findall(r"\$\{(\w+)([^}]*)\}", text))


def test_the_file_fits_its_schema() -> None:
    assert mistakes(COMPOSE, "compose.yaml") == []


def test_the_example_names_every_variable_and_no_other() -> None:
    assert set(variables(TEXT)) == set(EXAMPLE)


def test_secrets_have_no_default_anywhere_and_the_rest_has_the_examples() -> None:
    for name, rest in variables(TEXT).items():
        if rest == ":?":
            continue
        assert rest == f":-{EXAMPLE[name]}"
    assert not EXAMPLE["POSTGRES_PASSWORD"]
    assert not EXAMPLE["S3_SECRET_KEY"]
    assert not re.search(r"\$(?!\{)", TEXT), "Docker Compose also replaces variables without braces"


def test_git_ignores_the_secrets() -> None:
    ignored = subprocess.run(["git", "check-ignore", "--no-index", "infra/mlflow/.env"], cwd=ROOT, check=False)
    assert ignored.returncode == 0


@pytest.mark.parametrize("name", [name for name, service in SERVICES.items() if "build" not in service])
def test_images_are_pinned(name: str) -> None:
    assert re.fullmatch(r"[\w./-]+:\d+\.\d+(\.\d+)?", SERVICES[name]["image"])


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


def test_the_parts_agree_on_names_ports_and_keys() -> None:
    server, store, postgres = SERVICES["server"], SERVICES["artifacts"], SERVICES["postgres"]
    (uri,) = (word for word in server["command"] if word.startswith("--backend-store-uri="))
    assert uri.endswith("@postgres:5432/mlflow")
    assert (postgres["environment"]["POSTGRES_USER"], postgres["environment"]["POSTGRES_DB"]) == ("mlflow", "mlflow")
    assert "-s3.port=8333" in store["command"]
    assert server["environment"]["MLFLOW_S3_ENDPOINT_URL"] == "http://artifacts:8333"
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        assert server["environment"][name] == store["environment"][name] == SERVICES["bucket"]["environment"][name]
    (script,) = (word for word in SERVICES["bucket"]["command"] if "create_bucket" in word)
    compile(script, "bucket", "exec")
    assert 'create_bucket(Bucket="mlflow")' in script


def test_what_is_waited_for_can_be_told_to_be_ready() -> None:
    """Check that a service for which another one waits has a health check, or runs once and is not restarted."""
    for service in SERVICES.values():
        for name, wanted in service.get("depends_on", {}).items():
            assert name in SERVICES
            if wanted["condition"] == "service_healthy":
                assert SERVICES[name]["healthcheck"]["test"][0] == "CMD"
            else:
                assert wanted["condition"] == "service_completed_successfully"
                assert "restart" not in SERVICES[name]
    assert SERVICES["server"]["healthcheck"]["test"][:3] == ["CMD", "python", "-c"]
    compile(SERVICES["server"]["healthcheck"]["test"][3], "health", "exec")


def test_data_is_in_named_volumes_and_only_the_server_is_reached_and_from_here_alone() -> None:
    mounted = {mount.partition(":")[0] for service in SERVICES.values() for mount in service.get("volumes", [])}
    assert mounted == set(COMPOSE["volumes"])
    assert [name for name, service in SERVICES.items() if "ports" in service] == ["server"]
    assert SERVICES["server"]["ports"] == ["${MLFLOW_LISTEN:-127.0.0.1}:5000:5000"]


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


def test_the_pods_run_the_images_of_the_compose_file_without_root_and_with_limits() -> None:
    images = [container["image"] for pod in PODS.values() for container in pod["spec"]["containers"]]
    assert images == [SERVICES["postgres"]["image"], f"registry.example.com/{SERVICES['server']['image']}"]
    for pod in PODS.values():
        assert pod["spec"]["securityContext"]["runAsNonRoot"] is True
        (container,) = pod["spec"]["containers"]
        assert {"cpu", "memory"} == set(container["resources"]["limits"])
        assert {"readinessProbe", "livenessProbe"} <= set(container)


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
