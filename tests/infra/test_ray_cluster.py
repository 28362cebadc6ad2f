"""Test infra/ray-cluster.yaml, the file for `ray up`: Ray's own checks accept it, and nodes mount the store."""

import copy
from typing import Any

import yaml
from ray.autoscaler._private.util import prepare_config, validate_config

from tests.infra.manifests import INFRA

CONFIG: dict[str, Any] = yaml.safe_load((INFRA / "ray-cluster.yaml").read_text())


def test_ray_accepts_it_with_its_defaults() -> None:
    validate_config(prepare_config(copy.deepcopy(CONFIG)))


def test_the_store_is_mounted_on_the_node_and_in_the_container() -> None:
    assert "--volume=/mnt/fewbits:/mnt/fewbits" in CONFIG["docker"]["run_options"]
    assert any(
        "mount -t nfs4" in command and command.endswith(" /mnt/fewbits")
        for command in CONFIG["initialization_commands"]
    )


def test_all_nodes_ask_for_one_token() -> None:
    assert "--env=RAY_AUTH_MODE=token" in CONFIG["docker"]["run_options"]
    assert CONFIG["file_mounts"] == {"/home/fewbits/.ray/auth_token": "~/.ray/auth_token"}
    dockerfile = (INFRA / "Dockerfile").read_text()
    assert "\nWORKDIR /home/fewbits\n" in dockerfile
