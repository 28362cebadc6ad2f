# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %%
import shlex

from fewbits import read

# %% tags=["parameters"]
study: str = "gaussws"  # the study, or a sweep file of your own whose `study` is gaussws
scale: str = "smoke"  # smoke, cpu, pretrained, cpu-full, gpu or paper; "" for the scale of a sweep file
runs: str = ""  # the store; "": the nearest folder `runs`, here or above
overrides: str = ""  # further overrides, as one types them after `fewbits sweep`

# %%
gaussws = read(study, *shlex.split(overrides), scale=scale, runs=runs).report
gaussws.opening()

# %% [markdown]
# ## Verdicts

# %%
gaussws.summary()

# %% [markdown]
# ## Method and runs
#
# The paper trains with noise on weights instead of quantizing them. Each 32×32 square of a weight has a bit width b.
# The noise R · 2^(1−b) · max|w| is added to each element, and the sum is cast to BF16; R has nearly the distribution of
# rounded normal numbers. The width is learned with the weights, and weight decay pulls it to a target. DiffQ is the
# same method with uniform noise.
#
# The paper trains 124 M to 1 B parameters on up to 295 B tokens, from scratch, and so do our runs at the paper's own
# scale. At the other scales, models of the same two families branch from a common trunk that was trained in BF16, one
# for each seed and optimizer, and the learning rate decays to zero, so that only the noise differs between arms.
# Validation is without noise. At scale `pretrained`, nothing is trained: noise is added to the weights of SmolLM2, a
# published model with the same kinds of layers as Llama 2.

# %%
gaussws.show("Figure 1", "G7", "G8", "G9")

# %% [markdown]
# ## Noise, casts and formats
#
# The paper's proofs, checked by enumerating cases with the kernels that are used in training.

# %%
gaussws.show("G1", "G6", "Figure 2", "G2", "G4", "Table C.1", "G3", "G19", "Figure D.1", "G5")

# %% [markdown]
# ## Sampled parts, and optimizers

# %%
gaussws.show("Figure 3", "G10", "G11", "G12")

# %% [markdown]
# ## Llama 2

# %%
gaussws.show("Figure 4", "G13", "G20", "Figure F.1", "G14")

# %% [markdown]
# ## Bit widths

# %%
gaussws.show("Figure 5", "G15")

# %% [markdown]
# ## Costs
#
# Times were measured on the present device in turns; each turn times all arms, one after the other. The paper's times
# are from an A100.

# %%
gaussws.show("Table 1", "G16", "G17", "Figure 6", "G18", "Table B.1")

# %% [markdown]
# ## How models were trained

# %%
gaussws.show("Table E.1")

# %% [markdown]
# ## Findings of our own
#
# The paper's instability appears after tens of billions of tokens. We induce an instability instead: from a trained
# checkpoint, training continues at a constant, higher learning rate. This protocol is our own (the file of its sweep
# gives the reasons), and it does not test training as long as the paper's.

# %%
gaussws.own()

# %% [markdown]
# ## Discussion

# %%
gaussws.remarks()

# %% [markdown]
# ## Assumptions
#
# The paper does not state the learning rate and weight decay of bit widths, Adam-mini's settings, the learning rate of
# GPT-2 under Adam-mini, and whether validation is with noise. Our validation is without noise. If arms branch from a
# trunk, the learning rate and decay of widths do not depend on the weights' learning rate. At the scales cpu, cpu-full
# and gpu they are chosen so that decay alone changes widths in a branch as much as in the paper's GPT-2 run at the low
# learning rate. The following numbers of the paper are missing from its text as we have it:

# %%
gaussws.not_printed()

# %% [markdown]
# ## Out of reach

# %%
gaussws.unreached()

# %% [markdown]
# ## Provenance

# %%
gaussws.provenance()
