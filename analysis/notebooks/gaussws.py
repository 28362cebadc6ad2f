# %%
from fewbits.analysis.report.study_report import read_study

# %% tags=["parameters"]
overrides = ["study=gaussws", "scale=smoke"]

# %%
gaussws = read_study(overrides)
gaussws.opening()

# %% [markdown]
# ## Verdicts

# %%
gaussws.summary()

# %% [markdown]
# ## What was done
#
# The paper trains with noise on weights in place of quantizing them. Each 32×32 square of a weight has a bit width b.
# R · 2^(1−b) · max|w| is added to each element, where R is nearly a rounded normal number, and the sum is cast to BF16.
# The width is learned with the weights and pulled to a target by weight decay. DiffQ is the same with uniform noise.
#
# The paper's runs have 124 M to 1 B parameters on up to 295 B tokens, from scratch, and so have ours at the paper's own
# scale. At all other scales, models of the same two families branch from a common trunk that was trained in BF16, one
# for each seed and optimizer, and anneal to a learning rate of zero, so that only the noise differs between arms.
# Validation is without noise.

# %%
gaussws.show("Figure 1", "G7", "G8", "G9")

# %% [markdown]
# ## Noise, casts and formats
#
# What the paper proves, checked case by case on the kernels that train.

# %%
gaussws.show("G1", "G6", "Figure 2", "G2", "G4", "Table C.1", "G3", "G19", "Figure D.1", "G5")

# %% [markdown]
# ## Which parts, and which optimizer

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
# ## What it costs
#
# Timed on the device at hand, arms taking turns; the paper's numbers are of an A100.

# %%
gaussws.show("Table 1", "G16", "G17", "Figure 6", "G18", "Table B.1")

# %% [markdown]
# ## How models were trained

# %%
gaussws.show("Table E.1")

# %% [markdown]
# ## Findings of our own
#
# The paper's instability appears after tens of billions of tokens. In its place an instability is induced: from a
# trained checkpoint the learning rate is raised and stays high. That is a protocol of ours, with its reasons in the
# sweep's own file, and no test of the paper's horizon.

# %%
gaussws.own()

# %% [markdown]
# ## Discussion

# %%
gaussws.remarks()

# %% [markdown]
# ## What is assumed
#
# The paper does not state the learning rate and weight decay of bit widths, Adam-mini's settings, whether validation is
# with noise, and the learning rate of GPT-2 under Adam-mini. Ours: without noise; where arms branch, widths have a rate
# and a decay of their own, whatever the rate of weights is: at the scales cpu, cpu-full and gpu, decay alone does to
# them in a branch what it does in the paper's GPT-2 run at the low rate. These of the paper's own numbers are not
# printed:

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
