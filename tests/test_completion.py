"""Test completion in a shell: it offers what is valid, and imports nothing that a user would have to wait for."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from fewbits import cli, completion
from fewbits.commands import list as list_command
from fewbits.experiments import config_files
from fewbits.sweeps.planning.studies import STUDIES
from tests.messages import names

SLOW = "torch", "hydra", "omegaconf", "mlflow", "ray", "pandas", "numpy", "transformers"
RUN = "nemotron-nano-bf16-python-s0-1a2b3c4d"


@pytest.fixture(autouse=True)
def _files_of_a_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("mine/recipe/one.yaml", "conf/sweep/rates.yaml", "two.yaml", f"runs/{RUN}/config.yaml"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("defaults: [fp8, _self_]\nmargin: 2\n")


def completed(line: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setenv(completion.LINE, line)
    assert cli.main(["-sc", "query"]) == 0
    printed = capsys.readouterr()
    assert printed.err == ""
    return printed.out.split()


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("fewbits tr", {"train"}),
        ("fewbits comp", {"compare"}),
        ("fewbits bench ", {"kernels", "train"}),
        ("fewbits train rec", {"recipe=", "recipe."}),
        ("fewbits train recipe=mor/sub", {"recipe=mor/sub-channel"}),
        ("fewbits train recipe=./tw", {"recipe=./two.yaml"}),
        ("fewbits train --backend local seed=1 recipe=mxfp4-", {"recipe=mxfp4-ocp"}),
        ("fewbits train recipe=nvfp4-four-over-six recipe.rh", {"recipe.rht="}),  # a setting of the recipe it includes
        ("fewbits train -cd mine recipe=on", {"recipe=one"}),
        ("fewbits train recipe=./two.yaml recipe.marg", {"recipe.margin="}),
        ("fewbits train recipe.keep.la", {"recipe.keep.last="}),
        ("fewbits train optimizer.l", {"optimizer.lr="}),
        ("fewbits train runtime.tr", {"runtime.tracking="}),
        ("fewbits train branch.parent=nem", {f"branch.parent={RUN}"}),
        ("fewbits train recipe=./mine/r", {"recipe=./mine/recipe/"}),
        ("fewbits train recipe=mine/recipe/", {"recipe=mine/recipe/one.yaml"}),
        ("fewbits train --backend ", {"ray", "local"}),
        ("fewbits status --runs ", set()),  # a folder, which the shell completes
        ("fewbits status  --json nem", {RUN}),
        ("fewbits sweep study=pr", {"study=primer"}),
        ("fewbits sweep study=primer scale=", {"scale=cpu", "scale=smoke"}),
        ("fewbits sweep study=primer sweep=", {"sweep=precision"}),
        ("fewbits sweep sweep=", {"sweep=rates"}),
        ("fewbits sweep my-sw", set()),  # the shell completes names of files
        ("fewbits status nem", {RUN}),
        ("fewbits evaluate --device cpu nem", {RUN}),
        ("fewbits probe x nvfp4-u", {"nvfp4-ue5m3"}),
        ("fewbits list prec", {"precisions"}),
        ("fewbits list schedules co", {"constant", "cosine"}),
        ("fewbits ui --sy", {"--sync-only"}),
        ("fewbits nonsense ", set()),
        ("fewbits train ../=", set()),
    ],
)
def test_the_word_at_the_cursor_is_completed(
    line: str, expected: set[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert set(completed(line, capsys, monkeypatch)) == expected


@pytest.mark.parametrize("command", [command.name for command in cli.COMMANDS])
def test_every_command_completes_its_options(
    command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "--help" in completed(f"fewbits {command} --", capsys, monkeypatch)


def test_names_from_files_are_those_that_the_commands_accept(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for group in config_files.GROUPS:
        offered = completed(f"fewbits train {group}=", capsys, monkeypatch)
        assert sorted(offered) == sorted(f"{group}={name}" for name in config_files.names(group)), group
    assert set(completed("fewbits list studies ", capsys, monkeypatch)) == set(STUDIES)
    assert set(completed("fewbits list ", capsys, monkeypatch)) == set(list_command.GROUPS)


def test_no_slow_module_is_imported() -> None:
    lines = ["fewbits ", "fewbits train recipe.keep.", "fewbits train recipe=nvfp4 recipe.r", "fewbits status "]
    lines += ["fewbits sweep study=mor scale=", "fewbits list models "]
    lines += [f"fewbits {command.name} --" for command in cli.COMMANDS if command.name != "data"]
    code = "import os, sys; from fewbits import cli, completion\n"
    code += f"for os.environ[completion.LINE] in {lines}: cli.main(['-sc', 'query'])\n"
    code += "cli.main(['-sc', 'install=bash'])\n"
    code += f"sys.exit(' '.join(set(sys.modules) & set({SLOW})))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stderr == "\n"
    assert "--multirun" in done.stdout


def test_a_wrong_shell_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for words in ([], ["install=tcsh"], ["uninstall=bash"], ["install=bash", "x"]):
        assert cli.main(["-sc", *words]) == 2
        assert names(capsys.readouterr().err, "install=bash")


@pytest.mark.parametrize(
    ("line", "expected"),
    [("fewbits train seed=1 recipe=nvfp4-u", "nvfp4-ue5m3"), ("fewbits stat", "status"), ("fewbits ui --po", "--port")],
)
def test_bash_completes_with_the_script(line: str, expected: str, tmp_path: Path) -> None:
    """Bash evaluates the script and calls the completion function as it does when a user presses Tab."""
    program = tmp_path / "fewbits"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m fewbits.cli "$@"\n')
    program.chmod(0o755)
    script = f'eval "$(fewbits -sc install=bash)"; COMP_LINE="{line} later"; COMP_POINT={len(line)}; '
    script += '_fewbits; echo "${COMPREPLY[@]}"'
    path = {**os.environ, "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"}
    done = subprocess.run(["bash", "-c", script], env=path, capture_output=True, text=True, timeout=120)
    assert (done.stdout.strip(), done.stderr) == (expected, "")
