"""Pack the sources of the running fewbits as one small zip, with which a cluster runs the same version.

A Ray job unpacks it as its working directory, which is first on the path of the driver and of every worker. So the
shipped sources run there, whatever the nodes have installed. The packages, which are links in a checkout, are plain
folders in the zip. Names are sorted and times are left out: the same sources give the same bytes, which Ray uploads
once (it names a zip by its hash). Runs, reports, caches, the venv and git's folder are never shipped.
"""

import os
import zipfile
from collections.abc import Sequence
from io import BytesIO
from pathlib import Path

LARGEST = 100 * 2**20  # bytes; Ray keeps packages in the memory of its head
CONF = Path("conf")  # the user's config folder, where fewbits finds it in the job's working directory
_HERE = Path(__file__).parent
_EPOCH = (1980, 1, 1, 0, 0, 0)  # the earliest time a zip can hold


def pack(package: Path | None = None, beside: Sequence[Path] = ()) -> bytes:
    """Return a zip that contains the folder `package` under its own name. None: the folder of fewbits itself.

    beside: config files of the user, each with the folder `scale/` beside it, which sweep files include, and config
        folders, whose files are in `conf/` in the zip; of equal names the first counts, as on Hydra's search path.
    """
    folder = _HERE.parents[1] if package is None else package
    files = _files(folder)
    if (total := sum(file.stat().st_size for file in files)) > LARGEST:
        largest = max(files, key=lambda file: file.stat().st_size)
        raise ValueError(
            f"{folder} holds {total / 2**20:.0f} MiB; at most {LARGEST / 2**20:.0f} MiB can be shipped to a cluster: "
            f"its largest file is {largest}"
        )
    buffer = BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for file in files:
            entry = zipfile.ZipInfo(file.relative_to(folder.parent).as_posix(), date_time=_EPOCH)
            entry.compress_type = zipfile.ZIP_DEFLATED
            entry.external_attr = 0o644 << 16
            archive.writestr(entry, file.read_bytes())
        for name, part in _users_files(beside).items():
            archive.writestr(zipfile.ZipInfo(name, _EPOCH), part.read_bytes())
    return buffer.getvalue()


def _users_files(beside: Sequence[Path]) -> dict[str, Path]:
    """Return the user's files by their names in the zip."""
    parts: dict[str, Path] = {}
    for path in beside:
        if path.is_dir():
            shipped = {(CONF / file.relative_to(path)).as_posix(): file for file in sorted(path.rglob("*.yaml"))}
        else:
            files = (path, *sorted((path.parent / "scale").glob("*.yaml")))
            shipped = {file.relative_to(path.parent).as_posix(): file for file in files}
        parts = shipped | parts
    return parts


def _files(folder: Path) -> list[Path]:
    """Return the files below a folder, with links followed, without hidden files and Python's caches."""
    files = []
    for parent, folders, names in os.walk(folder, followlinks=True):
        folders[:] = [name for name in folders if name != "__pycache__" and not name.startswith(".")]
        files += [Path(parent, name) for name in names if not name.startswith(".")]
    return sorted(files)
