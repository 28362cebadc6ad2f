"""Test that Adam-mini equals AdamW if every element is its own part, and otherwise a plain loop over parts."""

import pytest
import torch
from torch import Tensor, nn

from fewbits.experiments.optimization.adam_mini import AdamMini
from fewbits.models.networks.partition import Partition
from tests.messages import naming

LR, BETAS, EPS, DECAY = 3e-3, (0.9, 0.95), 1e-8, 0.1
ROWS, COLS = 24, 10


def gradients(shape: tuple[int, ...], steps: int = 6) -> list[Tensor]:
    """Return gradients whose rows have very different magnitudes, so that parts have different second moments."""
    generator = torch.Generator().manual_seed(5)
    rows = torch.logspace(-3, 1, shape[0] if shape else 1).reshape(shape[:1] + (1,) * (len(shape) - 1))
    return [torch.randn(shape, generator=generator) * rows for _ in range(steps)]


def start(shape: tuple[int, ...]) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1))


def adam_mini(param: nn.Parameter, partition: Partition) -> AdamMini:
    return AdamMini([param], {param: partition}, lr=LR, betas=BETAS, eps=EPS, weight_decay=DECAY)


def train(optimizer: torch.optim.Optimizer, param: nn.Parameter, grads: list[Tensor]) -> Tensor:
    for grad in grads:
        param.grad = grad.clone()
        optimizer.step()
    return param.detach()


@pytest.mark.parametrize("shape", [(ROWS, COLS), (7,), (), (4, 1, 3)])
def test_where_every_element_is_a_part_it_is_adamw_to_the_bit(shape: tuple[int, ...]) -> None:
    ours, theirs = nn.Parameter(start(shape)), nn.Parameter(start(shape))
    adamw = torch.optim.AdamW([theirs], foreach=False, fused=False, lr=LR, betas=BETAS, eps=EPS, weight_decay=DECAY)
    got = train(adam_mini(ours, "element"), ours, gradients(shape))
    assert torch.equal(got, train(adamw, theirs, gradients(shape)))


@pytest.mark.parametrize("partition", [(3, 4), (), (8, 0), (9, -1), "head"])
def test_a_partition_that_does_not_cover_the_rows_is_refused(partition: Partition) -> None:
    param = nn.Parameter(torch.zeros(8, 2))
    with pytest.raises(ValueError, match=naming("8 rows", "element, tensor")):
        AdamMini([param], {param: partition})
