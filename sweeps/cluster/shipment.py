"""Pack the sources of the running fewbits into a small zip, so that a Ray job runs the same version.

A Ray job unpacks the zip as its working directory, which comes first on Python's path in the driver and every worker.
Therefore the shipped sources run on the cluster, whatever version is installed there. Packages that are symbolic links
in a checkout are ordinary folders in the zip. Names are sorted and times are constant, so equal sources give equal
bytes, and Ray uploads them once (it names a zip by its hash). Only the package and the user's config files are shipped.
"""

import os
import zipfile
from collections.abc import Sequence
from io import BytesIO
from pathlib import Path

LARGEST = 100 * 2**20  # the largest size of the sources in bytes, since Ray keeps packages in the head's memory
CONF = Path("conf")  # the folder in the job's working directory where fewbits looks for the user's configs
_HERE = Path(__file__).parent
_EPOCH = (1980, 1, 1, 0, 0, 0)  # the earliest time a zip can hold


def pack(package: Path | None = None, beside: Sequence[Path] = ()) -> bytes:
    """Return a zip that contains the folder `package` under its own name; None: the folder of fewbits itself.

    beside: config files and config folders of the user. A config file is packed with the YAML files of the folder
    `scale/` beside it, which sweep files include. The YAML files of a config folder are packed into `conf/`; of files
    with the same name, the first is packed, as on Hydra's search path.
    """
    folder = _HERE.parents[1] if package is None else package
    files = _files(folder)
    if (total := sum(file.stat().st_size for file in files)) > LARGEST:
        largest = max(files, key=lambda file: file.stat().st_size)
        raise ValueError(
            f"{folder} has {total / 2**20:.0f} MiB, but at most {LARGEST / 2**20:.0f} MiB can be shipped to a cluster: "
            f"remove large files; the largest is {largest}"
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
    """Return the user's files to pack (see `pack`), by their names in the zip."""
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
    """Return all files below a folder, also through symbolic links, without hidden ones and `__pycache__` folders."""
    files = []
    for parent, folders, names in os.walk(folder, followlinks=True):
        folders[:] = [name for name in folders if name != "__pycache__" and not name.startswith(".")]
        files += [Path(parent, name) for name in names if not name.startswith(".")]
    return sorted(files)
