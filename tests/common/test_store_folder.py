"""Test paths of stores and the kinds of file systems that they are on."""

from pathlib import Path

import pytest

from fewbits.common import store_folder as folders
from fewbits.common.store_folder import kind_of, network_kind_of, store_folder

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
    monkeypatch.setattr(folders, "MOUNTS", mounts)
    assert network_kind_of(Path(path)) == kind
    assert kind_of(Path(path)) == (kind or "ext4")


def test_a_system_without_mountinfo_has_no_known_kind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folders, "MOUNTS", tmp_path / "none")
    assert kind_of(tmp_path) is None
    assert network_kind_of(tmp_path) is None


@pytest.mark.parametrize("text", ["s3://bucket/runs", "gs://b", "S3A://b", "https://host/runs", "file:///mnt/runs"])
def test_a_url_is_no_store(text: str) -> None:
    with pytest.raises(ValueError, match="a store is a folder") as error:
        store_folder(text)
    assert text in str(error.value)
    assert ("write /mnt/runs" in str(error.value)) == text.startswith("file:")


@pytest.mark.parametrize("text", ["runs", "/mnt/runs", "./a:b", "~/runs", "a//b", "C:"])
def test_a_path_is_a_store(text: str) -> None:
    assert store_folder(text) == Path(text).expanduser()
