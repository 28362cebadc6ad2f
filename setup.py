"""Build wheels with compiled CPU kernels, so that their users need no compiler; pyproject.toml has all else.

On x86-64 Linux with a compiler, the kernels are compiled for each of compilation.LEVELS (some minutes; the cache of
`kernels/backends/build.py` keeps the libraries), and the wheel's tag names the oldest glibc with which they work. It
names no version of Python, since the libraries do not use Python. Elsewhere, in editable installs, and with
FEWBITS_PREBUILT=0, the wheel has only the sources, which are compiled at first use.
"""

import os
import platform
import re
import shutil
import sys
from functools import cache
from pathlib import Path

from setuptools import setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

sys.path.insert(0, str(Path(__file__).resolve().parent / "src"))
from fewbits.kernels.backends import build, compilation

OLDEST = 17  # the C library of the oldest tag manylinux_2_X that pip and package indexes know


@cache
def libraries() -> list[Path]:
    machine = (sys.platform, platform.machine()) == ("linux", "x86_64")
    wanted = machine and build.compiler() and os.environ.get("FEWBITS_PREBUILT") != "0"
    return [build.build_level(level) for level in compilation.LEVELS] if wanted else []


class BuildPackage(build_py):
    """Copy the packages and, unless they are installed as links to the checkout, the libraries."""

    def run(self) -> None:
        super().run()
        for library in () if self.editable_mode else libraries():
            folder = Path(self.build_lib, "fewbits", "kernels", build.PREBUILT.name)
            folder.mkdir(exist_ok=True)
            shutil.copy(library, folder)


class BuildWheel(bdist_wheel):
    """Write a wheel for this platform if it contains libraries."""

    def get_tag(self) -> tuple[str, str, str]:
        editable = self.distribution.get_command_obj("editable_wheel", create=False)  # before it sets `editable_mode`
        if editable is None and libraries():
            versions = [int(minor) for one in libraries() for minor in re.findall(rb"GLIBC_2\.(\d+)", one.read_bytes())]
            return "py3", "none", f"manylinux_2_{max(OLDEST, *versions)}_{platform.machine()}"
        return super().get_tag()


setup(cmdclass={"build_py": BuildPackage, "bdist_wheel": BuildWheel})
