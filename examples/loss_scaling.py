"""Train in FP16 with master weights and a scaled loss: the code of primer 002, corrected so that it runs.

    python examples/loss_scaling.py

The printed code fails at four places: its FP16 model gets FP32 input, `backward` gets a number instead of a tensor, the
master weights have no gradient to copy into, and a loop variable replaces the model.
"""

import torch

SCALE = 2.0**12  # a power of two, so that scaling and unscaling are exact
STEPS, RATE = 200, 0.05


def train(scale: float, master: bool) -> tuple[float, float]:
    """Train a small FP16 network; return its final loss, and the share of zeros in the first layer's gradient."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(10, 20), torch.nn.Tanh(), torch.nn.Linear(20, 5)).half()
    x, target = 0.001 * torch.randn(64, 10).half(), 0.1 * torch.randn(64, 5)  # small inputs, small gradients
    weights = list(model.parameters())
    masters = [w.detach().clone().float() for w in weights]
    for _ in range(STEPS):
        loss = torch.nn.functional.mse_loss(model(x).float(), target)
        (loss * scale).backward()
        gradients = [w.grad for w in weights if w.grad is not None]
        zeros = 1 - float(gradients[0].count_nonzero()) / gradients[0].numel()
        with torch.no_grad():
            for w, m, g in zip(weights, masters, gradients, strict=True):
                gradient = g.float() / scale  # unscaled in FP32, where nothing underflows
                w.grad = None
                if master:
                    m -= RATE * gradient
                    w.copy_(m)  # rounds the master weight to FP16
                else:
                    w.sub_((RATE * gradient).half())  # lost if it is below half a step of w
    return loss.item(), zeros


def main() -> None:
    for scale, master in ((SCALE, True), (SCALE, False), (1.0, True)):
        kind = "FP32 master weights" if master else "FP16 weights alone "
        loss, zeros = train(scale, master)
        print(f"loss scale {scale:4g}, {kind}: loss {loss:.6f}, zero gradients {zeros:.1%}")


if __name__ == "__main__":
    main()
