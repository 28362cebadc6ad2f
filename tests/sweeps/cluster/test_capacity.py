"""Test the check that a cluster can hold a trial, with a real autoscaler, which starts nodes on this machine."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fewbits.sweeps.cluster.capacity import bundles_that_fit
from tests.ray_head import client_environment, ray_head

ROOT = Path(__file__).parents[3]
ASK = """
import json, os, sys, ray
from fewbits.sweeps.cluster.capacity import Demand, ask_autoscaler, nodes, require_capacity
from fewbits.sweeps.planning.sweep import Resources
ray.init(sys.argv[1], log_to_driver=False, logging_level="ERROR")
before, refused = len(nodes()), {}
for name, seconds, resources in json.loads(sys.argv[2]):
    os.environ["FEWBITS_JOIN_SECONDS"] = str(seconds)
    try:
        require_capacity([Demand(name, Resources(**resources))], lambda line: None)
    except ValueError as error:
        refused[name] = str(error)
print(json.dumps([before, ask_autoscaler().exists, refused]))
"""


@pytest.mark.parametrize(
    ("bundle", "count"),
    [({"CPU": 1}, 4), ({"CPU": 1, "GPU": 0.5}, 2), ({"GPU": 2}, 0), ({"memory": 1}, 0), ({"CPU": 0.1}, 40)],
)
def test_a_node_holds_as_many_bundles_as_its_scarcest_resource_allows(bundle: dict[str, float], count: int) -> None:
    assert bundles_that_fit({"CPU": 4, "GPU": 1}, bundle) == count


def test_an_autoscaler_that_has_no_node_yet_is_believed_about_what_it_can_start() -> None:
    asked: list[tuple[str, int, dict[str, Any]]] = [
        ("fits", 120, {"cpus": 1, "gpus": 1}),
        ("too large", 8, {"cpus": 1, "gpus": 4}),
    ]
    with ray_head(grows_by={"small": {"CPU": 1, "GPU": 1}}) as head:
        environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
        environment |= {**client_environment(head), "RAY_AUTH_MODE": "token", "PYTHONPATH": str(ROOT / "src")}
        command = [sys.executable, "-c", ASK, head.gcs, json.dumps(asked)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    nodes, grows, refused = json.loads(done.stdout.splitlines()[-1])
    assert (nodes, grows, list(refused)) == (1, True, ["too large"])
    assert "no node type that fits" in refused["too large"]
