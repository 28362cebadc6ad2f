"""`fewbits conform`: exit statuses, output, and messages for wrong input."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from safetensors import safe_open

from fewbits import cli, pytest_plugin
from fewbits.kernels.dialects import DIALECTS, evaluate

MINE = """\
from fewbits import fake_quantize
from fewbits.kernels.dialects import DIALECTS, evaluate
from dataclasses import replace

def quantize(x):
    return evaluate(x, DIALECTS["te-nvfp4"]).values

def other(x):
    dialect = DIALECTS["te-nvfp4"]
    return evaluate(x, dialect, replace(dialect.steps, ties="away")).values

def broken(x):
    raise RuntimeError("no kernel")

def narrow(x):
    return x[:, :3]

def array(x):
    return x.numpy()

def text(x):
    return "codes"

def numbers(x):
    return [1.0, 2.0]

def float_scale(x):
    return evaluate(x, DIALECTS["te-nvfp4"]).codes, None, 1.5

def sparse(x, *_):
    return x.to_sparse()

def meta(x, *_):
    return x.to("meta")

def pairs(x):
    return {"codes": x.T}

def nothing(x):
    return {"values": None}

def no_parts(x):
    return None, None, None

calls = []

def once(x):
    calls.append(x)
    if len(calls) > 1:
        raise RuntimeError("no memory")
    return quantize(x)

def raising(x, step, rank):
    raise RuntimeError("no kernel")

def not_finite(x, step, rank):
    return x * float("nan")

def random(x, step, rank):
    return fake_quantize(x, "e2m1:1x16:nvfp4:stochastic", seed=step + 1000 * rank)

def repeated(x, step, rank):
    return fake_quantize(x, "e2m1:1x16:nvfp4:stochastic", seed=step)
"""


@pytest.fixture
def mine(tmp_path: Path) -> str:
    path = tmp_path / "mine_of_the_tests.py"
    path.write_text(MINE)
    return str(path)


def test_the_status_tells_whether_results_are_equal(mine: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["conform", f"{mine}:quantize", "--dialect", "te-nvfp4"]) == 0
    assert capsys.readouterr().out.startswith("equal to te-nvfp4 on ")
    assert cli.main(["conform", f"{mine}:other", "--dialect", "te-nvfp4", "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert (report["equal"], report["steps"]) == (False, [["ties=away (here even)"]])
    assert report["first"]["quantity"] == "values"


def test_a_function_that_raises_after_its_first_call_is_not_equal(
    mine: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["conform", f"{mine}:once", "--dialect", "te-nvfp4"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("not equal to te-nvfp4: ")
    assert lines[0].endswith(" cases raised errors, 1 are equal")
    assert all(line.endswith("RuntimeError: no memory") for line in lines[1:])


def test_test_vectors_describe_themselves(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "vectors.safetensors"
    assert cli.main(["conform", "--golden", "torchao-mxfp8-rceil", "--out", str(out)]) == 0
    assert capsys.readouterr().out == f"{out}\n"
    with safe_open(out, "pt") as file:
        assert file.metadata()["step.exponent"] == "quotient"
        assert {"near ties.x", "near ties.codes", "near ties.scales", "near ties.values"} <= set(file.keys())


def test_random_streams_are_checked(mine: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["conform", f"{mine}:random", "--random"]) == 0
    assert "FAILED" not in capsys.readouterr().out
    assert cli.main(["conform", f"{mine}:repeated", "--random", "--json"]) == 1
    failed = [check["name"] for check in json.loads(capsys.readouterr().out) if not check["passed"]]
    assert failed == ["correlation, ranks"]


def test_dialects_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["conform", "--dialects", "--json"]) == 0
    assert {"te-nvfp4-row", "gguf-mxfp4"} <= {row["name"] for row in json.loads(capsys.readouterr().out)}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["MINE:quantize", "--dialect", "te-nvfp5"], "unknown dialect 'te-nvfp5'"),
        (["MINE:absent", "--dialect", "te-nvfp4"], "has no function 'absent': it has "),
        (["MINE:broken", "--dialect", "te-nvfp4"], "RuntimeError: no kernel"),
        (["MINE:narrow", "--dialect", "te-nvfp4"], "expected [16, 256]"),
        *(
            ([f"MINE:{name}", "--dialect", "te-nvfp4"], message)
            for name, message in {
                "array": "it returned ndarray",
                "text": "it returned str",
                "numbers": "'codes' is a float",
                "float_scale": "'tensor' is a float",
                "sparse": "layout torch.sparse_coo",
                "meta": "device meta",
                "pairs": "codes of type torch.float32",
                "nothing": "nothing that can be compared",
                "no_parts": "nothing that can be compared",
            }.items()
        ),
        (["MINE:raising", "--random"], "raised an error at step 0, rank 0: RuntimeError: no kernel"),
        (["MINE:not_finite", "--random"], "fewer than two different finite values"),
        (["no_such_module:f", "--dialect", "te-nvfp4"], "cannot import no_such_module"),
        (["no-such-file.py:f", "--dialect", "te-nvfp4"], "no such file"),
        (["--dialect", "te-nvfp4"], "MODULE:FUNCTION is needed"),
        (["MINE:quantize"], "give exactly one of"),
        (["--golden", "te-nvfp4"], "belong together"),
        (["--golden", "te-nvfp4", "--out", "absent/vectors.safetensors"], "no such folder"),
    ],
)
def test_wrong_input_is_one_line(words: list[str], message: str, mine: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["conform", *(word.replace("MINE", mine) for word in words)]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_the_fixture_explains_a_failure() -> None:
    check = pytest_plugin.conforms.__wrapped__()  # type: ignore[attr-defined]
    dialect = DIALECTS["te-nvfp4"]
    check(lambda x: evaluate(x, dialect).values, "te-nvfp4")
    with pytest.raises(pytest.fail.Exception, match="ties=zero"):
        check(lambda x: evaluate(x, dialect, replace(dialect.steps, ties="zero")).values, "te-nvfp4")
