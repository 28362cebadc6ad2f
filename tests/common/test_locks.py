"""Test locks between processes, the warning on file systems without locks, kinds of file systems, and store paths."""

import errno
import fcntl
import os
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest

from fewbits.common import file_systems, locks
from fewbits.common.locks import locked
from fewbits.common.store_folder import store_folder

TRY = """
import sys
from fewbits.common.locks import locked
with open(sys.argv[1], "a") as file, locked(file, "nothing", wait=False):
    pass
"""


def taken(path: Path) -> bool:
    """Return True if another process cannot get the lock of this file."""
    done = subprocess.run([sys.executable, "-c", TRY, str(path)], capture_output=True, text=True)
    assert done.returncode == 0 or "BlockingIOError" in done.stderr
    return done.returncode != 0


def test_a_lock_keeps_another_process_out_until_the_block_ends(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with path.open("a") as file:
        with locked(file, "nothing"):
            assert taken(path)
        assert not taken(path)  # free again, although this process still has the file open


def without_locks(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    def refuse(file: Any, operation: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", refuse)
    monkeypatch.setattr(locks, "_warned", set())


@pytest.mark.parametrize("number", [errno.ENOTSUP, errno.ENOLCK, errno.ENOSYS, errno.EINVAL])
def test_a_file_system_without_locks_is_announced_once(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_locks(monkeypatch, number)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            with (tmp_path / "lock").open("a") as file, locked(file, "leases protect trials", wait=False):
                pass
    (message,) = (str(one.message) for one in caught)
    assert "\n" not in message
    assert str(tmp_path) in message
    assert "leases protect trials" in message


def test_other_errors_of_a_lock_are_not_hidden(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    without_locks(monkeypatch, errno.EIO)
    with (tmp_path / "lock").open("a") as file, pytest.raises(OSError, match="Input/output"), locked(file, "nothing"):
        pass


MOUNTS = """\
22 1 254:0 / / rw,relatime shared:1 - ext4 /dev/vda rw
30 22 0:40 / /home rw,relatime shared:2 - nfs4 server:/home rw,vers=4.2
31 30 0:41 / /home/local\\040disk rw - ext4 /dev/vdb rw
32 22 0:42 / /scratch rw shared:3 master:4 - lustre ost@tcp:/scratch rw
33 22 0:43 / /bucket rw - fuse.s3fs s3fs rw
34 22 0:44 / /twice rw - ext4 /dev/vdc rw
35 22 0:45 / /twice rw - cifs //server/share rw
a line that is none
"""


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/home/user/runs", "nfs4"),
        ("/home", "nfs4"),
        ("/homes", None),
        ("/home/local disk/runs", None),
        ("/scratch/a/b", "lustre"),
        ("/bucket", "fuse.s3fs"),
        ("/twice/runs", "cifs"),
        ("/opt", None),
    ],
)
def test_network_file_systems_are_known_by_the_mount_that_a_path_is_on(
    path: str, kind: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mounts = tmp_path / "mountinfo"
    mounts.write_text(MOUNTS)
    monkeypatch.setattr(file_systems, "MOUNTS", mounts)
    assert file_systems.network_kind_of(Path(path)) == kind
    assert file_systems.kind_of(Path(path)) == (kind or "ext4")


def test_a_system_without_mountinfo_has_no_known_kind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_systems, "MOUNTS", tmp_path / "none")
    assert file_systems.kind_of(tmp_path) is None
    assert file_systems.network_kind_of(tmp_path) is None


@pytest.mark.parametrize("text", ["s3://bucket/runs", "gs://b", "S3A://b", "https://host/runs", "file:///mnt/runs"])
def test_a_url_is_no_store(text: str) -> None:
    with pytest.raises(ValueError, match="a store is a folder") as error:
        store_folder(text)
    assert text in str(error.value)
    assert ("write /mnt/runs" in str(error.value)) == text.startswith("file:")


@pytest.mark.parametrize("text", ["runs", "/mnt/runs", "./a:b", "~/runs", "a//b", "C:"])
def test_a_path_is_a_store(text: str) -> None:
    assert store_folder(text) == Path(text).expanduser()
