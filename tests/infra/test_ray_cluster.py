"""Test that Ray's own checks accept infra/ray-cluster.yaml, the file for `ray up`."""

import copy
from typing import Any

import yaml
from ray.autoscaler._private.util import prepare_config, validate_config

from tests.infra.manifests import INFRA

CONFIG: dict[str, Any] = yaml.safe_load((INFRA / "ray-cluster.yaml").read_text())


def test_ray_accepts_it_with_its_defaults() -> None:
    validate_config(prepare_config(copy.deepcopy(CONFIG)))
