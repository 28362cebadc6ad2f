"""Test checkpoints: exact round trips, and no loss of older checkpoints if a writer is killed or a disk is full."""

import itertools
import json
import multiprocessing
import os
import resource
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from torch import Tensor, nn

from fewbits.common.atomic import write_atomically
from fewbits.experiments.storage.checkpoints import (
    STATE,
    TENSORS,
    Checkpoint,
    DamagedCheckpoint,
    flatten,
    load,
    newest,
    save,
    unflatten,
)
from fewbits.experiments.storage.run_folder import RunFolder

DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2]
DTYPES += [torch.float8_e8m0fnu, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool]
DTYPES += [torch.uint16, torch.uint32, torch.uint64]
SHAPES: list[tuple[int, ...]] = [(), (0,), (1,), (7,), (3, 0, 2), (5, 3)]


def bits(x: Tensor) -> bytes:
    return bytes(x.detach().clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8).tolist())


def equal(a: Any, b: Any) -> bool:
    """Tell whether two nested values have equal types and bits; NaN equals NaN."""
    if isinstance(a, Tensor):
        return isinstance(b, Tensor) and a.dtype == b.dtype and a.shape == b.shape and bits(a) == bits(b)
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return list(a) == list(b) and all(equal(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(equal, a, b))
    return repr(a) == repr(b)


def every_tensor() -> dict[str, Tensor]:
    """Return tensors of all dtypes and shapes with random bytes, and so with NaN payloads, subnormals and −0."""
    generator = torch.Generator().manual_seed(0)
    tensors = {}
    for dtype in DTYPES:
        for shape in SHAPES:
            count = torch.Size(shape).numel() * dtype.itemsize
            raw = torch.randint(0, 2 if dtype is torch.bool else 256, (count,), generator=generator, dtype=torch.uint8)
            tensors[f"{dtype}{shape}"] = raw.view(dtype).reshape(shape)
    return tensors


def some(step: int) -> dict[str, Tensor]:
    return {"w": torch.full((300, 100), float(step)), "step": torch.tensor(step)}


def latest(folder: Path) -> Checkpoint:
    found = newest(folder)
    assert found is not None
    return found


def steps(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@contextmanager
def largest_file(size: int) -> Iterator[None]:
    """Limit the size of files inside a `with` block, so that writes fail as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


# Round trips


def test_tensors_come_back_in_every_dtype_and_shape_bit_for_bit_also_to_readers_of_safetensors(tmp_path: Path) -> None:
    tensors = every_tensor()
    path = save(tmp_path, 3, tensors, {})
    back = latest(tmp_path).tensors()
    assert back.keys() == tensors.keys()
    assert all(equal(tensors[name], back[name]) for name in tensors)
    with safe_open(path / TENSORS, framework="pt") as file:
        assert all(equal(file.get_tensor(name), tensor) for name, tensor in tensors.items())


def test_a_tensor_need_not_be_contiguous_and_may_be_a_parameter(tmp_path: Path) -> None:
    base = torch.arange(24.0).reshape(4, 6)
    views = {
        "transposed": base.T,
        "column": base[:, 2],
        "single": base[:1, 2],
        "offset": base[2:],
        "expanded": base[:1].expand(5, 6),
        "param": nn.Parameter(base),
    }
    back = load(save(tmp_path, 0, views, {})).tensors()
    assert all(equal(view.detach().contiguous(), back[name]) for name, view in views.items())


# flatten


leaves = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5)
keys = st.sampled_from(["a", "a.b", "b", "$", ""])
nodes = leaves | st.sampled_from(sorted(every_tensor())).map(lambda name: every_tensor()[name])
trees = st.recursive(
    nodes,
    lambda node: st.lists(node, max_size=3) | st.dictionaries(keys, node, max_size=4),
    max_leaves=12,
)


@given(trees)
def test_unflatten_gives_back_exactly_what_flatten_was_given(tree: Any) -> None:
    tensors, state = flatten(tree)
    assert equal(unflatten(tensors, json.loads(json.dumps(state, allow_nan=False))), tree)


def test_a_tied_tensor_is_kept_once_and_comes_back_tied(tmp_path: Path) -> None:
    model = nn.ModuleDict({"embed": nn.Embedding(50, 8), "head": nn.Linear(8, 50, bias=False)})
    model["head"].weight = model["embed"].weight
    tensors, state = flatten({"model": model.state_dict()})
    assert list(tensors) == ["model.embed.weight"]
    found = load(save(tmp_path, 0, tensors, state))
    tree = unflatten(found.tensors(), found.state)
    assert tree["model"]["embed.weight"] is tree["model"]["head.weight"]
    model.load_state_dict(tree["model"])


# Checkpoints that are kept


def test_the_newest_two_are_kept(tmp_path: Path) -> None:
    assert newest(tmp_path) is newest(tmp_path / "missing") is None
    for step in (5, 10, 99999999, 100000000):
        path = save(tmp_path, step, some(step), {})
        assert path == tmp_path / f"step-{step:08d}"
    assert steps(tmp_path) == ["step-100000000", "step-99999999"]
    assert latest(tmp_path).step == 100000000
    save(tmp_path, 100000001, some(1), {}, keep=1)
    assert steps(tmp_path) == ["step-100000001"]


def test_a_step_saved_again_takes_the_place_of_the_first_also_of_a_damaged_one(tmp_path: Path) -> None:
    save(tmp_path, 1, some(1), {})
    for value in (2, 3, 4):
        path = save(tmp_path, 2, some(value), {})
        found = latest(tmp_path)
        assert (found.step, found.tensors()["step"].item()) == (2, value)
        assert len(steps(tmp_path)) == 2
        (path / TENSORS).write_bytes(b"damaged")


# Damage


def flip(path: Path, at: int) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


def replaced(path: Path, by: Callable[[Path], object]) -> None:
    """Remove a file or folder, and let `by` create something else in its place."""
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    by(path)


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "tensors cut short": (
        lambda c: os.truncate(c / TENSORS, 5000),
        r"tensors.safetensors has 5,000 bytes, but [\d,]+ were saved",
    ),
    "a byte of the header": (lambda c: flip(c / TENSORS, 12), "tensors.safetensors is not what was saved: its SHA-256"),
    "a byte of a tensor": (lambda c: flip(c / TENSORS, -1), "tensors.safetensors is not what was saved: its SHA-256"),
    "no tensors": (lambda c: (c / TENSORS).unlink(), "tensors.safetensors: No such file"),
    "no state": (lambda c: (c / STATE).unlink(), "state.json: No such file"),
    "state nests forever": (lambda c: (c / STATE).write_text("[" * 100000), "state.json is not what was saved"),
    "a digit of the state": (
        lambda c: (c / STATE).write_text((c / STATE).read_text().replace('"lr": 0.5', '"lr": 0.7')),
        "state.json is not what was saved: its SHA-256",
    ),
    "state is a folder": (lambda c: replaced(c / STATE, Path.mkdir), "state.json: Is a directory"),
    "not a folder": (lambda c: replaced(c, Path.touch), "Not a directory"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_newest_falls_back_to_the_one_before_with_one_warning(damage: str, tmp_path: Path) -> None:
    save(tmp_path, 1, some(1), {"lr": 0.25})
    path = save(tmp_path, 2, some(2), {"lr": 0.5})
    spoil, message = DAMAGE[damage]
    spoil(path)
    with pytest.warns(UserWarning, match=message) as caught:
        found = newest(tmp_path)
    assert len(caught) == 1
    assert "\n" not in str(caught[0].message)
    assert str(path) in str(caught[0].message)
    assert found is not None
    assert (found.step, found.state, found.tensors()["step"].item()) == (1, {"lr": 0.25}, 1)
    with pytest.raises(DamagedCheckpoint, match=message):
        load(path)


# A full disk


def test_a_full_disk_is_one_clear_error_and_costs_nothing_that_was_there(tmp_path: Path) -> None:
    for step in (1, 2):
        save(tmp_path, step, some(step), {})
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    with largest_file(100_000), pytest.raises(OSError, match="checkpoint not written") as caught:
        save(tmp_path, 3, some(3), {})
    message = str(caught.value)
    assert "\n" not in message
    assert "step-00000003" in message
    assert f"needs {sum(tensor.nbytes for tensor in some(3).values()):,} bytes, " in message
    assert message.endswith(" are free")
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before
    found = latest(tmp_path)
    assert found.step == 2
    save(tmp_path, 3, some(3), {})


# Killed writers

FORK = multiprocessing.get_context("fork")


def save_killed_at(folder: Path, step: int, n: int) -> None:
    """Save a checkpoint, but kill this process before its n-th opening, renaming or removal of a file."""
    calls = itertools.count(1)

    def count(event: str, _: object) -> None:
        if event.split(".")[0] in ("open", "os", "shutil") and next(calls) == n:
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(count)
    save(folder, step, some(step), {"step": step})


@pytest.mark.filterwarnings("error")
def test_a_writer_killed_at_any_moment_leaves_a_whole_checkpoint_at_or_after_the_last_it_saved(tmp_path: Path) -> None:
    save(tmp_path, step := 0, some(0), {"step": 0})
    for n in range(1, 1000):
        process = FORK.Process(target=save_killed_at, args=(tmp_path, step + 1, n))
        process.start()
        process.join(60)
        assert process.exitcode in (0, -signal.SIGKILL)
        found = latest(tmp_path).step
        assert found in (step, step + 1)
        for path in tmp_path.glob("step-*"):
            one = load(path)
            assert one.state == {"step": one.step}
            assert torch.equal(one.tensors()["w"], some(one.step)["w"])
        if process.exitcode == 0:
            assert found == step + 1
            assert steps(tmp_path) == [f"step-{kept:08d}" for kept in (step, step + 1)]
            assert n > 10
            return
        step = found
    raise AssertionError("the writer never finished")


# Files


def test_a_file_is_replaced_whole_or_stays_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    write_atomically(path, b"one")

    def half(file: Any) -> None:
        file.write(b"tw")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_atomically(path, half)
    with largest_file(1000), pytest.raises(OSError, match="File too large"):
        write_atomically(path, bytes(2000))
    assert [(p.name, p.read_bytes()) for p in tmp_path.iterdir()] == [("result.json", b"one")]
    write_atomically(path, lambda file: file.write(b"two"))
    assert path.read_bytes() == b"two"


def test_a_run_without_an_intact_checkpoint_names_its_folder_and_what_to_do(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run", "0" * 64)
    folder.checkpoints.mkdir(parents=True)
    with pytest.raises(ValueError, match="has no checkpoints"):
        folder.checkpoint()
    path = save(folder.checkpoints, 3, some(3), {})
    assert folder.checkpoint().step == 3
    with pytest.raises(ValueError, match="no checkpoint of step 4; available are 3"):
        folder.checkpoint(4)
    (path / TENSORS).write_bytes(b"")
    with pytest.warns(UserWarning, match="damaged checkpoint skipped"), pytest.raises(ValueError, match="are damaged"):
        folder.checkpoint()
