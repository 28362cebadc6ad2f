"""What a cluster needs to run today's fewbits: the package as one small zip, its sources and nothing else.

A Ray job unpacks it as its working directory, which is first on the path of the driver and of every worker, so what is
shipped is what runs there, whatever the nodes have installed. The rooms, which are links in a checkout, lie in it as
plain folders. Names are sorted and times are left out: the same sources are the same bytes, which Ray uploads once
(it names a package by its hash). Runs, reports, caches, the venv and git's folder are no part of the package, so they
are never shipped.
"""

import os
import zipfile
from collections.abc import Sequence
from io import BytesIO
from pathlib import Path

LARGEST = 100 * 2**20  # bytes; Ray keeps packages in the memory of its head
_HERE = Path(__file__).parent
_EPOCH = (1980, 1, 1, 0, 0, 0)  # the earliest time a zip can hold


def pack(package: Path | None = None, beside: Sequence[Path] = ()) -> bytes:
    """The zip of `package`, a folder (that of fewbits itself, if None), under the folder's own name.

    beside: sweep files of one's own, which lie beside it under their names, each with its folder of scales.
    """
    folder = _HERE.parents[1] if package is None else package
    files = _files(folder)
    if (total := sum(file.stat().st_size for file in files)) > LARGEST:
        largest = max(files, key=lambda file: file.stat().st_size)
        raise ValueError(
            f"{folder} holds {total / 2**20:.0f} MiB, more than the {LARGEST / 2**20:.0f} that may be shipped to a "
            f"cluster: its largest file is {largest}"
        )
    buffer = BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for file in files:
            entry = zipfile.ZipInfo(file.relative_to(folder.parent).as_posix(), date_time=_EPOCH)
            entry.compress_type = zipfile.ZIP_DEFLATED
            entry.external_attr = 0o644 << 16
            archive.writestr(entry, file.read_bytes())
        for file in beside:
            for one in (file, *sorted((file.parent / "scale").glob("*.yaml"))):
                archive.writestr(zipfile.ZipInfo(one.relative_to(file.parent).as_posix(), _EPOCH), one.read_bytes())
    return buffer.getvalue()


def _files(folder: Path) -> list[Path]:
    """The files below a folder, links followed, without what Python and editors leave there."""
    found = []
    for parent, folders, names in os.walk(folder, followlinks=True):
        folders[:] = [name for name in folders if name != "__pycache__" and not name.startswith(".")]
        found += [Path(parent, name) for name in names if not name.startswith(".")]
    return sorted(found)
