# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %%
from fewbits.analysis.report.study_report import read_study

# %% tags=["parameters"]
overrides = ["study=mor", "scale=smoke"]

# %%
mor = read_study(overrides)
mor.title()

# %%
mor.flags()

# %% [markdown]
# ## Verdicts

# %%
mor.rules()

# %%
mor.summary()

# %% [markdown]
# ## What was done
#
# MoR trains with 8-bit matrix products wherever these are accurate enough. Before each product of a linear layer, the
# tensors that enter it are cast to E4M3 and back. Where the mean relative error stays below a threshold the cast is
# kept; elsewhere the tensor stays in BF16. The decision is made anew for every tensor in every mini-batch, or, in the
# variants of the paper's last part, for every block of a tensor.
#
# The paper trains a model of 8 B parameters on 1 T tokens, once for each arm. Here its recipes train small models of
# the same family (squared ReLU, partial rotary embeddings, untied embeddings) on text that every machine has. Arms
# branch from a common trunk that was trained in BF16, one for each seed, and anneal to a learning rate of zero, so that
# only the recipe differs between them and rounding cannot decide when a model leaves a plateau. The verdicts state
# what such runs show of the paper, and which claims are out of their reach.
#
# ## The method
#
# Each block has one scale, built so that nothing saturates: all blocks of a tensor share the mantissa of the tensor's
# own scale, and each has an exponent of its own (GAM). The figures of this part are drawn from the kernels that train.

# %%
mor.figure("Figure 1")

# %%
mor.figure("Figure 2")

# %%
mor.figure("Figure 3")

# %%
mor.figure("Figure 4")

# %%
mor.claims("M1", "M2", "M21")

# %% [markdown]
# ## Set-up
#
# Configuration 2 has better data and a larger batch than configuration 1. Ours differ in the same way, as far as that
# is possible without a network: other sources, and half as many sequences again.

# %%
mor.table("Table 1")

# %% [markdown]
# ## One decision for each tensor
#
# Three partitions of a tensor into blocks that share a scale: 128×128, the whole tensor, and the whole vector along the
# axis of the dot product. The threshold is 4.5 % for all three.

# %%
mor.table("Table 2")

# %%
mor.figure("Figure 5")

# %%
mor.figure("Figure 6")

# %% [markdown]
# Models of this size answer no questions. In place of MMLU they are evaluated on text of another kind than they were
# trained on; the paper's last scores stand beside.

# %%
mor.figure("Figure 7")

# %%
mor.claims("M3", "M4", "M5")

# %% [markdown]
# ## Block size, threshold and scaling
#
# Each arm changes one thing of the 128×128 arm.

# %%
mor.table("Table 3")

# %%
mor.figure("Figure 8")

# %%
mor.figure("Figure 9")

# %%
mor.claims("M6", "M7", "M8", "M23")

# %% [markdown]
# ## What falls back to BF16
#
# A row of a heat map is a tensor; a column is a range of its relative error, the last one open; the shade is the share
# of the mini-batches whose error lay there; the line is the threshold.

# %%
mor.figure("Figure 10")

# %%
mor.claims("M9", "M10", "M22")

# %%
mor.figure("Figure 11")

# %%
mor.figure("Figure 12")

# %%
mor.claims("M11")

# %%
mor.figure("Figure 13")

# %%
mor.figure("Figure 14")

# %%
mor.figure("Figure 15")

# %%
mor.claims("M12")

# %%
mor.figure("Figure 16")

# %%
mor.claims("M13", "M14")

# %%
mor.figure("Figure 17")

# %%
mor.figure("Figure 18")

# %%
mor.figure("Figure 19")

# %%
mor.claims("M15", "M16")

# %% [markdown]
# ## One decision for each block
#
# Two-way: a block is E4M3 where that errs less than E5M2 would, else BF16. Three-way: where E4M3 does not, E5M2 takes
# the block if its magnitudes span no more than E5M2's normal numbers, else BF16.

# %%
mor.table("Table 4")

# %%
mor.figure("Figure 20")

# %%
mor.figure("Figure 21")

# %%
mor.claims("M17", "M18")

# %% [markdown]
# ## What the paper concludes
#
# A bounded relative error suffices; and how the bound was chosen.

# %%
mor.claims("M19", "M20")

# %% [markdown]
# ## Findings of our own
#
# What the paper left open, and how much noise the runs of this report have.

# %%
mor.own()

# %% [markdown]
# ## Discussion
#
# Listed by rule, so that nothing is picked: contradicted claims and those not seen at this scale, effects that are not
# the stated ones, effects beyond the margin where none was stated, controls that failed, and comparisons with too few
# seeds. Margins stay as they were fixed.

# %%
mor.remarks()

# %% [markdown]
# ## What is assumed
#
# The paper does not state learning rates, warm-up, optimizer and the length of its sequences; ours are settings in the
# configs of each scale. We infer that a tensor's error is the sum of its elements' relative errors divided by the
# number of elements that are not zero, and that E8M0 scales are rounded so that nothing saturates. Bins of the heat
# maps are ours: half a percent wide, up to ten percent. These of the paper's own numbers are not printed:

# %%
mor.not_printed()

# %% [markdown]
# ## Out of reach

# %%
mor.unreached()

# %% [markdown]
# ## Provenance

# %%
mor.provenance()

# %% [markdown]
# ### Trials

# %%
mor.trial_table()
