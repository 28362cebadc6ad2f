"""Test that no command prints or stores the credentials in MLflow's tracking URI, even if it fails."""

from pathlib import Path

import pytest

from tests.experiments.trial_inputs import TINY, ended, started
from tests.ray_head import free_ports

SECRET = "hunter2-Zq"
ROOT = Path(__file__).parents[3]


def uri_of(kind: str, served: str, folder: Path) -> str:
    if kind == "a server":
        return f"http://alice:{SECRET}@{served}"
    if kind == "no server":
        return f"http://alice:{SECRET}@127.0.0.1:{free_ports(1)[0]}/?token={SECRET}"
    if kind == "a database":
        return f"sqlite:///{folder / 'of-user.db'}?token={SECRET}"
    return f"postgresql://alice:{SECRET}@127.0.0.1:1/db"


@pytest.mark.parametrize(
    "kind", ["a server", "no server", pytest.param("a database", marks=pytest.mark.deep), "no database"]
)
def test_no_credential_is_printed_or_stored(kind: str, shared_server: str, cache: Path, tmp_path: Path) -> None:
    """The commands train, sweep, report and ui neither print nor store a password in MLFLOW_TRACKING_URI.

    One `train` also gets the URI as an argument, since provenance.json records the arguments. With a working database,
    ui is left out, since it would run until Ctrl-C.
    """
    uri = uri_of(kind, shared_server.removeprefix("http://"), tmp_path)
    runs, printed = tmp_path / "runs", tmp_path / "printed"
    overrides = [f"{key}={value}" for key, value in (TINY | {"training.steps": 2, "runtime.cache": cache}).items()]
    (tmp_path / "one.yaml").write_text("arms: {bf16: {overrides: [recipe=bf16]}}\n")
    one = [str(tmp_path / "one.yaml"), *overrides, "--runs", str(runs)]
    commands = [
        ["train", "recipe=mor/tensor", *overrides, f"runtime.runs={runs}", "runtime.tracking=mlflow", f"+note={uri}"],
        ["train", "recipe=mor/tensor", *overrides, f"runtime.runs={runs}", "runtime.tracking=mlflow"],
        ["sweep", *one, "--backend", "local"],
        ["ui", "--sync-only", "--runs", str(runs)],
        ["report", *one, "--out", str(tmp_path / "reports")],
    ]
    if kind != "a database":
        commands.append(["ui", "--runs", str(runs), "--port", str(free_ports(1)[0])])
    environment = {
        "MLFLOW_TRACKING_URI": uri,
        "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0",
        "FEWBITS_USER": "alice",
        "PYTHONPATH": str(ROOT / "src"),
    }
    for command in commands:
        process = started(command, printed, environment=environment, leads=True, folder=tmp_path)
        try:
            ended(process, timeout=400)
        finally:
            process.kill()
    output = printed.read_text()
    assert SECRET not in output
    assert "Traceback" not in output
    works = kind in ("a server", "a database")
    assert ("MLflow was not updated" in output) != works
    assert ("trials sent to" in output) == works
    assert "***" in output
    stored = [path for path in tmp_path.rglob("*") if path.is_file() and path.suffix != ".db"]
    assert {"provenance.json", ".store.json"} <= {path.name for path in stored}
    for path in stored:
        assert SECRET.encode() not in path.read_bytes(), path
