"""Test the submission of sweeps as Ray jobs.

The tests cover checks of the input, the environment variables that are sent, and the commands of the jobs.
"""

import re
import zipfile
from io import BytesIO
from pathlib import Path

import pytest

import fewbits.sweeps.cluster.submit as submit_module
from fewbits import cli
from fewbits.sweeps.cluster.submit import is_study, job_variables, pack, run_job, submit
from fewbits.sweeps.tracking.connection import user

ROOT = Path(__file__).parents[3]

# Wrong input: the message has one line, and nothing is sent


@pytest.mark.parametrize("address", ["auto", "ray://head:10001", "head:8265", ""])
def test_jobs_go_to_a_dashboard(address: str) -> None:
    with pytest.raises(ValueError, match="as in http://head:8265"):
        run_job(["true"], address)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["study=mor"], "no store is named"),
        (["study=mor", "runtime.runs=runs"], "the store 'runs' is relative"),
        (["study=mor", "++runtime.runs='./runs'"], r"the store './runs' is relative"),
        (["study=mor", "runtime.runs='~/runs'"], "the store '~/runs' is relative"),
        (["runtime.runs=/mnt/runs", "runtime.runs=runs"], "the store 'runs' is relative"),
    ],
)
def test_a_store_must_outlive_the_job(arguments: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message) as error:
        submit(arguments, "http://127.0.0.1:9")
    assert "runtime.runs=/mnt/fewbits/runs" in str(error.value)


@pytest.mark.parametrize(
    "uri", ["http://host:5000", "https://host", "sqlite:////mnt/mlflow.db", "file:///mnt/m", "/mnt/m", "databricks"]
)
def test_the_jobs_variables_are_ours_and_those_of_the_libraries(uri: str) -> None:
    here = {"FEWBITS_BACKEND": "cpu", "HF_HOME": "/mnt/hf", "NCCL_DEBUG": "WARN", "MLFLOW_TRACKING_URI": uri}
    here |= {"TORCH_NCCL_BLOCKING_WAIT": "1", "GLOO_SOCKET_IFNAME": "eth0"}
    other = {"HOME": "/root", "AWS_SECRET_ACCESS_KEY": "no", "HF_TOKEN": "no", "MLFLOW_TRACKING_PASSWORD": "no"}
    sent = job_variables(here | other)
    ours = {name: value for name, value in sent.items() if not name.startswith("RAY_JOB_STOP_")}
    assert ours == here | {"FEWBITS_USER": user()}
    sent = job_variables(here | other, ["HF_TOKEN"])
    assert sent["HF_TOKEN"] == "no"
    assert "MLFLOW_TRACKING_PASSWORD" not in sent


@pytest.mark.parametrize(
    ("word", "message"), [("A_SECRET=hush", "write only the name"), ("NOT_SET_HERE", "NOT_SET_HERE: "), ("A B", "A B")]
)
def test_a_variable_is_named_and_its_value_is_in_the_environment(
    word: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["sweep", "study=mor", "--env", word]) == 2
    shown = capsys.readouterr().err
    assert message in shown
    assert "hush" not in shown


# A study as a job


def test_a_study_is_reported_by_the_job_and_other_sweeps_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    commands: list[list[str]] = []

    def run_job(command: list[str], *_: object, **__: object) -> int:
        commands.append(list(command))
        return 0

    monkeypatch.setattr(submit_module, "run_job", run_job)
    where = ["--runs", "/mnt/runs", "--address", "http://head:8265"]
    assert cli.main(["sweep", "study=mor", *where, "--parallel", "3"]) == 0
    assert cli.main(["report", "study=mor", *where, "--sweep", "--out", "/mnt/pages"]) == 0
    assert cli.main(["sweep", "study=mor", *where, "--dry-run", "--gpu-memory", "141"]) == 0
    assert cli.main(["sweep", "study=mor", "sweep=tables", *where]) == 0
    assert [command[3] for command in commands] == ["report", "report", "sweep", "sweep"]
    reported = ["study=mor", 'runtime.runs="/mnt/runs"', "--sweep", "--address", "auto", "--out"]
    assert commands[0][4:] == [*reported, "/mnt/reports", "--backend", "ray", "--parallel", "3"]
    assert commands[1][4:] == [*reported, "/mnt/pages", "--backend", "ray"]
    options = commands[2]
    assert "--dry-run" in options
    assert float(options[options.index("--gpu-memory") + 1]) == 141
    assert not is_study(["my-sweep.yaml"])


# The shipped zip


def test_each_source_is_shipped_unchanged_and_nothing_that_python_or_editors_leave() -> None:
    shipped = pack()
    assert len(shipped) < 5 * 2**20
    archive = zipfile.ZipFile(BytesIO(shipped))
    package = ROOT / "src" / "fewbits"
    wanted = {f"fewbits/{file.name}": file for file in package.glob("*.py")}
    for name in ("kernels", "models", "experiments", "sweeps", "analysis"):
        sources = [*(ROOT / name).rglob("*.py"), *(ROOT / name).rglob("csrc/*"), *(ROOT / name).rglob("*.yaml")]
        wanted |= {f"fewbits/{file.relative_to(ROOT)}": file for file in sources if file.is_file()}
    assert set(wanted) <= set(archive.namelist())
    for name, file in wanted.items():
        assert archive.read(name) == file.read_bytes()
    for name in archive.namelist():
        assert name.startswith("fewbits/")
        assert not re.search(r"__pycache__|/\.|\.pyc$", name), name


def test_a_linked_package_is_shipped_as_a_folder(tmp_path: Path) -> None:
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels" / "a.py").write_text("one")
    (tmp_path / "src" / "fewbits").mkdir(parents=True)
    (tmp_path / "src" / "fewbits" / "kernels").symlink_to("../../kernels")
    archive = zipfile.ZipFile(BytesIO(pack(tmp_path / "src" / "fewbits")))
    assert archive.namelist() == ["fewbits/kernels/a.py"]


def test_a_sweep_file_of_ones_own_lies_beside_it_with_its_scales(tmp_path: Path) -> None:
    (tmp_path / "fewbits").mkdir()
    (tmp_path / "mine" / "scale").mkdir(parents=True)
    for name in ("mine/lr.yaml", "mine/scale/cpu.yaml", "mine/else.yaml"):
        (tmp_path / name).write_text(name)
    archive = zipfile.ZipFile(BytesIO(pack(tmp_path / "fewbits", [tmp_path / "mine" / "lr.yaml"])))
    content = {name: archive.read(name) for name in archive.namelist()}
    assert content == {"lr.yaml": b"mine/lr.yaml", "scale/cpu.yaml": b"mine/scale/cpu.yaml"}


def test_a_config_folder_is_shipped_with_its_hooks(tmp_path: Path) -> None:
    (tmp_path / "fewbits").mkdir()
    (tmp_path / "own" / "recipe").mkdir(parents=True)
    for name in ("recipe/mine.yaml", "hooks.py", "helper.py", "notes.txt"):
        (tmp_path / "own" / name).write_text(name)
    archive = zipfile.ZipFile(BytesIO(pack(tmp_path / "fewbits", [tmp_path / "own"])))
    assert sorted(archive.namelist()) == ["conf/helper.py", "conf/hooks.py", "conf/recipe/mine.yaml"]
