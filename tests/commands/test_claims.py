"""Test `fewbits claims` on a store without results."""

from pathlib import Path

import pytest

from fewbits import cli


def test_without_results_claims_are_not_run_and_the_command_that_runs_them_is_named(
    cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    study = ["study=primer", "scale=smoke", f"runtime.cache={cache}"]
    assert cli.main(["claims", *study, "--runs", str(tmp_path)]) == 0
    *rows, last = capsys.readouterr().out.splitlines()
    assert last.endswith(f"fewbits sweep {' '.join(study)} --runs {tmp_path}")
    assert sum(" not run " in row for row in rows) > 1
    assert not any("cannot tell" in row for row in rows)
