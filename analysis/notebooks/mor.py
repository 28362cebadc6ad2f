# %%
from fewbits.analysis.report.study_report import read_study

# %% tags=["parameters"]
overrides = ["study=mor", "scale=smoke"]

# %%
mor = read_study(overrides)
mor.opening()

# %% [markdown]
# ## Verdicts

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
mor.show("Figure 1", "Figure 2", "Figure 3", "Figure 4", "M1", "M2", "M21")

# %% [markdown]
# ## Set-up
#
# Configuration 2 has better data and a larger batch than configuration 1. Ours differ in the same way, as far as that
# is possible without a network: other sources, and half as many sequences again.

# %%
mor.show("Table 1")

# %% [markdown]
# ## One decision for each tensor
#
# Three partitions of a tensor into blocks that share a scale: 128×128, the whole tensor, and the whole vector along the
# axis of the dot product. The threshold is 4.5 % for all three.

# %%
mor.show("Table 2", "Figure 5", "Figure 6")

# %% [markdown]
# Models of this size answer no questions. In place of MMLU they are evaluated on text of another kind than they were
# trained on; the paper's last scores stand beside.

# %%
mor.show("Figure 7", "M3", "M4", "M5")

# %% [markdown]
# ## Block size, threshold and scaling
#
# Each arm changes one thing of the 128×128 arm.

# %%
mor.show("Table 3", "Figure 8", "Figure 9", "M6", "M7", "M8", "M23")

# %% [markdown]
# ## What falls back to BF16
#
# A row of a heat map is a tensor; a column is a range of its relative error, the last one open; the shade is the share
# of the mini-batches whose error lay there; the line is the threshold.

# %%
mor.show("Figure 10", "M9", "M10", "M22", "Figure 11", "Figure 12", "M11", "Figure 13", "Figure 14")

# %%
mor.show("Figure 15", "M12", "Figure 16", "M13", "M14", "Figure 17", "Figure 18", "Figure 19", "M15", "M16")

# %% [markdown]
# ## One decision for each block
#
# Two-way: a block is E4M3 where that errs less than E5M2 would, else BF16. Three-way: where E4M3 does not, E5M2 takes
# the block if its magnitudes span no more than E5M2's normal numbers, else BF16.

# %%
mor.show("Table 4", "Figure 20", "Figure 21", "M17", "M18")

# %% [markdown]
# ## What the paper concludes
#
# A bounded relative error suffices; and how the bound was chosen.

# %%
mor.show("M19", "M20")

# %% [markdown]
# ## Findings of our own
#
# What the paper left open, and how much noise the runs of this report have.

# %%
mor.own()

# %% [markdown]
# ## Discussion

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
