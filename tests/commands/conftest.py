"""Fixtures for tests of commands: those of the tests of sweeps, since commands run trials in the test's process."""

from tests.sweeps.conftest import _torch_as_it_was, cache, forked_from_one, undisturbed  # noqa: F401
