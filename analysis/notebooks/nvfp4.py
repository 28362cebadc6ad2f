# %%
from fewbits.analysis.report.study_report import read_study

# %% tags=["parameters"]
overrides = ["study=nvfp4", "scale=smoke"]

# %%
nvfp4 = read_study(overrides)
nvfp4.opening()

# %% [markdown]
# ## Verdicts

# %%
nvfp4.summary()

# %% [markdown]
# ## What was done
#
# The paper trains with 4-bit matrix products. All operands of a linear layer's three products are cast to E2M1 in
# blocks of 16 that share an E4M3 scale, under one FP32 scale for the tensor. By itself that diverges. Four additions
# make it train: the last blocks of the model stay in BF16; weights have their scales in squares of 16×16, so that
# forward and backward read the same values; gradients are rounded stochastically; and the operands of the weight
# gradient pass through a random Hadamard transform.
#
# The paper's curves are of one run each, of 1.2 B, 8 B and 12 B parameters on up to 10 T tokens. Here the same recipes
# train small models of the same families. At the small scales most arms branch from a common trunk that was trained in
# BF16, one for each seed, and anneal to a learning rate of zero, so that only the recipe differs between them. Where
# the paper is about the beginning of training, about late switches, or about how many tokens a run needs, arms are
# trained from scratch or branch from a run in NVFP4. Operands are rounded to the arm's formats and multiplied in BF16
# with FP32 sums. Hardware multiplies codes and applies scales to the sums; here values contain their scales, which
# rounds NVFP4's once more to BF16, by 0.4 % at most. Validation losses are those of the arm's own operands.
#
# ## The format
#
# Drawn and counted from the kernels that train.

# %%
nvfp4.show("Figure 1", "Table 1", "N24")

# %% [markdown]
# ## Beside FP8 and BF16
#
# The paper compares its 12B model with FP8. It does not print its curves as numbers; its text states some of them.

# %%
nvfp4.show("Figure 2", "N1")

# %% [markdown]
# Models of this size answer no questions. Instead they are evaluated on text of another kind than they were trained on.

# %%
nvfp4.show("Figure 3", "Table 2", "N2")

# %% [markdown]
# ## The recipe
#
# The losses without each of its parts, and what is done to each operand, drawn from the recipe that trains.

# %%
nvfp4.show("Figure 4", "Figure 5", "N4", "N5", "N19", "N26")

# %% [markdown]
# ## Beside MXFP4
#
# MXFP4 has blocks of 32 whose scale is a power of two, rounded so that nothing saturates, weights in squares of 32×32,
# and a Hadamard transform of size 32; everything else is as in NVFP4.

# %%
nvfp4.show("Figure 6", "N20", "N21")

# %% [markdown]
# ## Models
#
# The paper's models beside those that were trained here.

# %%
nvfp4.show("Table 3", "Table 4", "Table 5")

# %% [markdown]
# ## Late switches to BF16

# %%
nvfp4.show("Figure 7", "N22", "N23")

# %% [markdown]
# ## Part by part
#
# From here on the base is plain NVFP4 as in the paper's appendix: nearest rounding, one row of 16 values per scale, no
# transform, and the last blocks in BF16 unless that is what varies.

# %%
nvfp4.show("N3", "Figure 8", "N8")

# %% [markdown]
# ### Layers
#
# On a model of 20 blocks, as many as the paper's, so that its counts apply unchanged.

# %%
nvfp4.show("Figure 9", "N6", "N7")

# %% [markdown]
# ### Stochastic rounding

# %%
nvfp4.show("Figure 10", "N9", "N10", "N11", "N12")

# %% [markdown]
# ### The Hadamard transform
#
# Which products, on the plain base; sizes and signs, on the full recipe.

# %%
nvfp4.show("Figure 11", "N13", "N25", "Figure 12", "N14", "N15", "Figure 13", "N16")

# %% [markdown]
# ### Forward and backward that disagree
#
# Weights alone, or activations alone, in NVFP4; everything else in BF16.

# %%
nvfp4.show("Figure 14", "N17", "N18")

# %% [markdown]
# ## Findings of our own
#
# What came after the paper, what it left open, and how much noise the runs of this report have.

# %%
nvfp4.own()

# %% [markdown]
# ## Discussion

# %%
nvfp4.remarks()

# %% [markdown]
# ## What is assumed
#
# The paper does not state warm-up, the shape of the decay, clipping, the size of MXFP4's tiles of weights, and the
# signs of its transform; ours are settings in the configs of each scale and recipe. The signs are TransformerEngine's
# for the transform of size 16, and drawn once for other sizes; MXFP4's tiles are 32×32. Which blocks of a small model
# stay in BF16 is our choice: about the same share as the paper's, so FP8's three blocks in 62 become none on CPUs.
# These of the paper's own numbers are not printed:

# %%
nvfp4.not_printed()

# %% [markdown]
# ## Out of reach

# %%
nvfp4.unreached()

# %% [markdown]
# ## Provenance

# %%
nvfp4.provenance()
