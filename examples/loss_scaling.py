"""Train in FP16 with FP32 master weights and a scaled loss: code from an introductory text, corrected so that it runs.

    python examples/loss_scaling.py

The code in the text "Understanding Mixed-Precision Training" has four errors: its FP16 model gets FP32 input,
`backward` is called on a number instead of a tensor, the master weights have no gradient into which the loop copies,
and a loop variable has the name of the model and replaces it. The settings differ, too, so that the effects are visible
in 200 steps: a scale of 2^12 (2^6 in the text), Tanh (ReLU), a learning rate of 0.05 (0.01), and small inputs.
"""

import torch

SCALE = 2.0**12  # a power of two, so that scaling and unscaling are exact
STEPS, RATE = 200, 0.05


def train(scale: float, master: bool) -> tuple[float, float]:
    """Train a small FP16 network; return its last loss, and the share of zeros in the first weight's last gradient.

    scale: the factor of the loss. master: update FP32 master weights and round them to FP16; False: update the FP16
    weights themselves.
    """
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(10, 20), torch.nn.Tanh(), torch.nn.Linear(20, 5)).half()
    x, target = 0.001 * torch.randn(64, 10).half(), 0.1 * torch.randn(64, 5)  # small inputs make small gradients
    weights = list(model.parameters())
    masters = [w.detach().clone().float() for w in weights]
    for _ in range(STEPS):
        loss = torch.nn.functional.mse_loss(model(x).float(), target)
        (loss * scale).backward()
        gradients = [w.grad for w in weights if w.grad is not None]
        zeros = 1 - float(gradients[0].count_nonzero()) / gradients[0].numel()
        with torch.no_grad():
            for w, m, g in zip(weights, masters, gradients, strict=True):
                gradient = g.float() / scale  # divided in FP32, where small values do not underflow
                w.grad = None
                if master:
                    m -= RATE * gradient
                    w.copy_(m)  # rounds the master weight to FP16
                else:
                    w.sub_((RATE * gradient).half())  # no change if the update is below half the spacing of FP16 at w
    return loss.item(), zeros


def main() -> None:
    for scale, master in ((SCALE, True), (SCALE, False), (1.0, True)):
        kind = "FP32 master weights" if master else "FP16 weights only  "
        loss, zeros = train(scale, master)
        print(f"loss scale {scale:4g}, {kind}: loss {loss:.6f}, zero gradients {zeros:.1%}")


if __name__ == "__main__":
    main()
