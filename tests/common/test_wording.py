"""Test that `redacted` replaces credentials in texts and leaves other texts as they are."""

import pytest

from fewbits.common.wording import redacted

SECRET = "hunter2-Zq"


@pytest.mark.parametrize(
    "text",
    [
        f"postgresql://alice:{SECRET}@host/db",
        f"postgresql+psycopg2://alice:{SECRET}@host:5432/db?sslmode=require",
        f"mysql://alice:a/{SECRET}@host/db",
        f"mysql://alice:{SECRET}@x@host/db",
        f"http://alice:{SECRET}@host:5000",
        f"https://{SECRET}@host",
        f"redis://:{SECRET}@host",
        f"http://host:5000/?token={SECRET}",
        f"http://host:5000/api?a=1&access_token={SECRET}&b=2",
        f"postgresql://host/db?user=alice&password={SECRET}",
        f"https://b.s3.example/key?X-Amz-Signature={SECRET}",
        f"connection failed: host=h password={SECRET} user=u",
        f"connection failed: password='{SECRET}'",
        f"two: http://a:{SECRET}@h, http://b:{SECRET}@i",
        f"https://alice@corp.example:{SECRET}@host/x",
        f"https://alice:p@ss/w:rd?x#{SECRET}@host/x",
        f"mssql+pyodbc:///?odbc_connect=DRIVER%3Dx%3BPWD%3D{SECRET}%3BUID%3Dy",
        f"http://host/?key={SECRET}",
        f"http://host/?token[]={SECRET}",
        f"http://host/#access_token={SECRET}",
        f'connection failed: password="{SECRET} {SECRET}"',
        f"{{'user': 'alice', 'password': '{SECRET}'}}",
    ],
)
def test_a_credential_is_replaced(text: str) -> None:
    assert SECRET not in redacted(text)
    assert "***" in redacted(text)


def test_what_tells_where_stays() -> None:
    assert redacted(f"postgresql://alice:{SECRET}@host:5432/db") == "postgresql://alice:***@host:5432/db"
    assert redacted(f"http://host/?token={SECRET}&x=1") == "http://host/?token=***&x=1"


@pytest.mark.parametrize(
    "text",
    [
        "http://127.0.0.1:5000/#/experiments/1/runs?viewStateShareKey=fewbits-cost-smoke&workflowType=machine_learning",
        "sqlite:////home/a@b/runs/mlflow.db",
        "fewbits train training.steps=20 data.tokens=5 runtime.runs=/mnt/runs",
        "http://127.0.0.1:5000/a@b",
        "git+https://host/repo@v1",
        "mail me at me@example.org: see https://example.org",
        "model=nemotron-nano; token: 5 of 9",
    ],
)
def test_other_text_stays_as_it_is(text: str) -> None:
    assert redacted(text) == text


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("MLFLOW_TRACKING_PASSWORD", SECRET),
        ("MLFLOW_TRACKING_TOKEN", SECRET),
        ("MLFLOW_TRACKING_URI", f"postgresql://alice:{SECRET}@host/db"),
        ("MLFLOW_TRACKING_URI", f"http://host?token={SECRET}"),
        ("MLFLOW_TRACKING_URI", f"https://alice@corp.example:{SECRET}@host"),
    ],
)
def test_a_secret_of_the_environment_is_replaced_wherever_it_stands(
    variable: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = f"could not authenticate with {SECRET!r}"
    assert redacted(text) == text
    monkeypatch.setenv(variable, value)
    assert redacted(text) == "could not authenticate with '***'"


def test_a_percent_encoded_secret_is_replaced_as_it_is_meant_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "postgresql://alice:p%40ss%2Fword@host/db")
    assert redacted("bad password p@ss/word") == "bad password ***"


def test_a_path_with_an_at_sign_is_no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "sqlite:////home/alice@example/runs/mlflow.db")
    assert redacted("cannot write /home/alice@example/runs") == "cannot write /home/alice@example/runs"
