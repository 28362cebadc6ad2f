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
study: str = "mor"  # the study, or a sweep file of your own whose `study` is mor
scale: str = "smoke"  # smoke, cpu, sizes, pretrained, cpu-full, questions, gpu, paper; "" for the scale of a sweep file
runs: str = ""  # the store; "": the nearest folder `runs`, here or above
overrides: str = ""  # further overrides, as one types them after `fewbits sweep`

# %%
mor = read(study, *shlex.split(overrides), scale=scale, runs=runs).report
mor.opening()

# %% [markdown]
# ## Verdicts

# %%
mor.summary()

# %% [markdown]
# ## Method and runs
#
# MoR computes matrix products in 8 bits where these are accurate enough. Before each product of a linear layer, its
# operand tensors are cast to E4M3 and back. If a tensor's mean relative error is below a threshold, the product uses
# the cast values; otherwise the tensor stays in BF16. The decision is made for every tensor in every mini-batch or, in
# the variants of the paper's last part, for every block of a tensor.
#
# The paper trains a model of 8 B parameters on 1 T tokens, once for each arm. Here its recipes train small models of
# the same family (squared ReLU, partial rotary embeddings, untied embeddings) on text that every machine has. Arms
# branch from a common trunk that was trained in BF16, one for each seed, and the learning rate decays to zero. So only
# the recipe differs between arms, and rounding cannot decide when a model leaves a plateau of the loss. At scale
# `sizes`, models of three sizes train in BF16, and recipes are measured at their final weights. At scale `pretrained`,
# nothing is trained: recipes are measured at the weights of a published model, which has another architecture (SwiGLU).
# The verdicts state what such runs show about the paper, and which claims they cannot test.
#
# ## The method
#
# Each block has a scale with which no element saturates. All blocks of a tensor share the mantissa of the tensor's
# scale, and each block has its own exponent (GAM). The figures of this section show results of the kernels that are
# used in training.

# %%
mor.show("Figure 1", "Figure 2", "Figure 3", "Figure 4", "M1", "M2", "M21")

# %% [markdown]
# ## Set-up
#
# Configuration 2 has better data and a larger batch than configuration 1. Our configurations differ in the same way, as
# far as that is possible without a network: other sources of text, and batches with 1.5 times as many sequences.

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
# Models of this size cannot answer questions. Instead of MMLU, figures show their loss on text of another kind than the
# training text, together with the paper's last scores.

# %%
mor.show("Figure 7", "M3", "M4", "M5")

# %% [markdown]
# ## Block size, threshold and scaling
#
# Each arm changes one setting of the 128×128 arm.

# %%
mor.show("Table 3", "Figure 8", "Figure 9", "M6", "M7", "M8", "M23")

# %% [markdown]
# ## Tensors that fall back to BF16
#
# A row of a heat map is a tensor, and a column is a range of its relative error; the last range has no upper limit. The
# shade is the share of mini-batches whose error is in the range, and the line is the threshold.

# %%
mor.show("Figure 10", "M9", "M10", "M24", "M22", "Figure 11", "Figure 12", "M11", "Figure 13", "M27", "Figure 14")

# %%
mor.show(
    "Figure 15", "M12", "Figure 16", "M25", "M13", "M14", "Figure 17", "M26", "Figure 18", "Figure 19", "M15", "M16"
)

# %% [markdown]
# ## One decision for each block
#
# Two-way: a block is cast to E4M3 if its error is less than it would be in E5M2; otherwise it stays in BF16. Three-way:
# if E4M3's error is not the lesser one, the block is cast to E5M2, provided that its magnitudes are in a range no wider
# than that of E5M2's normal numbers; otherwise it stays in BF16.

# %%
mor.show("Table 4", "Figure 20", "Figure 21", "M17", "M18")

# %% [markdown]
# ## The paper's conclusions
#
# Two claims: that a bounded relative error is sufficient, and how the bound was chosen.

# %%
mor.show("M19", "M20", "M28")

# %% [markdown]
# ## Findings of our own
#
# Results on settings that the paper does not test, and the noise of the runs of this report.

# %%
mor.own()

# %% [markdown]
# ## Discussion

# %%
mor.remarks()

# %% [markdown]
# ## Assumptions
#
# The paper does not state learning rates, warm-up, optimizer and length of sequences; our settings are in the configs
# of each scale. We infer that a tensor's error is the sum of its elements' relative errors divided by the number of
# elements that are not zero, and that E8M0 scales are rounded so that nothing saturates. We chose the bins of the heat
# maps: half a percent wide, up to ten percent. The following numbers of the paper are missing from its text as we have
# it:

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
