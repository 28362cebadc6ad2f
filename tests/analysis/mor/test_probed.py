"""Test that claims about tensors compare probes of the trunk if the plan has them, and otherwise the trained arms."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from fewbits.analysis.engine.claims.hooks import load_hooks
from fewbits.analysis.engine.claims.judging import find
from fewbits.analysis.engine.claims.probed import at_probes
from fewbits.analysis.engine.claims.schema import Claim, comparisons, load_claims
from fewbits.analysis.engine.results.frames import Results
from fewbits.sweeps.planning.plan import Plan
from tests.analysis.mor.test_verdicts import TRUE
from tests.analysis.mor.worlds import results

load_hooks("mor")
CLAIMS = load_claims("mor")
PROBED = [claim for claim in CLAIMS.claims if any(part.probed for part in claim.parts)]


@pytest.mark.parametrize("claim", PROBED, ids=lambda claim: claim.id)
def test_the_trials_behind_a_claim_about_tensors_are_probes(cpu: Plan, claim: Claim) -> None:
    for finding in find("mor", claim, results(cpu, TRUE)):
        assert finding.trials, finding.name
        assert all(cpu.trials[trial].trial.is_probe for trial in finding.trials), finding.name


def test_without_probes_the_trained_arms_are_compared(plans: Callable[..., Plan]) -> None:
    trained = plans("scale=cpu", "sweep=partitions", "seeds=[0,1]")
    claim = CLAIMS.claim("M9")
    assert at_probes(claim, Results(trained)) == claim


def test_probes_of_an_imported_model_move_nothing(cpu: Plan) -> None:
    """Check that claims about tensors do not compare probes of an imported model, whose architecture is another one.

    A plan that contains only probes, and no trunk, simulates an imported model.
    """
    probes = {key: one for key, one in cpu.trials.items() if one.trial.is_probe}
    members = tuple(member for member in cpu.members if member.id in probes)
    claim = CLAIMS.claim("M9")
    assert at_probes(claim, Results(replace(cpu, trials=probes, members=members))) == claim
    assert at_probes(claim, Results(cpu)) != claim


def test_a_probed_arm_keeps_its_label(cpu: Plan) -> None:
    names = [one.name for one in comparisons(at_probes(CLAIMS.claim("M9"), Results(cpu)))]
    assert names[0] == "probe-tensor above probe-block, fallback share"
