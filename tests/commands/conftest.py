"""Fixtures for tests of commands: those of the tests of trials, since `train` runs trials in the test's process."""

from tests.experiments.conftest import _torch_as_it_was, cache  # noqa: F401
