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
from fewbits.analysis.reading import read

# %% tags=["parameters"]
words = ["study=nvfp4", "scale=smoke"]

# %%
nvfp4 = read(words)
nvfp4.title()

# %%
nvfp4.flags()

# %% [markdown]
# ## Verdicts

# %%
nvfp4.rules()

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
# The paper's curves are of one run each, of 1.2 G, 8 G and 12 G parameters on up to 10 T tokens. Here the same recipes
# train small models of the same families. At the small scales most arms branch from a common parent that was trained
# in BF16, one for each seed, and anneal to a learning rate of zero: what differs between them is the recipe alone.
# Where the paper speaks of the beginning of training, of late switches, or of how many tokens a run needs, arms are
# trained from nothing, or have been in NVFP4 for a while. Operands are rounded to the arm's formats and multiplied in
# BF16 with FP32 sums. Hardware multiplies codes and applies scales to the sums; here values have their scales in them,
# which rounds NVFP4's once more to BF16, by 0.4 % at most. Validation losses are those of the arm's own operands.
#
# ## The format
#
# Drawn and counted from the kernels that train.

# %%
nvfp4.figure("Figure 1")

# %%
nvfp4.table("Table 1")

# %%
nvfp4.claims("N24")

# %% [markdown]
# ## Beside FP8 and BF16
#
# The paper's 12B model has FP8 as its reference. Its curves are not printed as numbers; what the text says of them is.

# %%
nvfp4.figure("Figure 2")

# %%
nvfp4.claims("N1")

# %% [markdown]
# Models of this size answer no questions. What they can do instead is to continue a text of another kind than they
# were trained on.

# %%
nvfp4.figure("Figure 3")

# %%
nvfp4.table("Table 2")

# %%
nvfp4.claims("N2")

# %% [markdown]
# ## The recipe
#
# What the losses are without each of its parts; and what each operand goes through, drawn from the recipe that trains.

# %%
nvfp4.figure("Figure 4")

# %%
nvfp4.figure("Figure 5")

# %%
nvfp4.claims("N4", "N5", "N19", "N26")

# %% [markdown]
# ## Beside MXFP4
#
# Blocks of 32 with a power of two as their scale, rounded so that nothing saturates; weights in squares of 32×32, a
# Hadamard transform of size 32; everything else as in NVFP4.

# %%
nvfp4.figure("Figure 6")

# %%
nvfp4.claims("N20", "N21")

# %% [markdown]
# ## Models
#
# The paper's, beside those that trained here.

# %%
nvfp4.table("Table 3")

# %%
nvfp4.table("Table 4")

# %%
nvfp4.table("Table 5")

# %% [markdown]
# ## Late switches to BF16

# %%
nvfp4.figure("Figure 7")

# %%
nvfp4.claims("N22", "N23")

# %% [markdown]
# ## Part by part
#
# From here on the base is plain NVFP4 as in the paper's appendix: nearest rounding, one row of 16 to a scale, nothing
# transformed; with the last blocks in BF16 unless that is what varies.

# %%
nvfp4.claims("N3")

# %%
nvfp4.figure("Figure 8")

# %%
nvfp4.claims("N8")

# %% [markdown]
# ### Layers
#
# On a model of 20 blocks, as many as the paper's, so that its counts hold as they stand.

# %%
nvfp4.figure("Figure 9")

# %%
nvfp4.claims("N6", "N7")

# %% [markdown]
# ### Stochastic rounding

# %%
nvfp4.figure("Figure 10")

# %%
nvfp4.claims("N9", "N10", "N11", "N12")

# %% [markdown]
# ### The Hadamard transform
#
# Which products, on the plain base; sizes and signs, on the full recipe.

# %%
nvfp4.figure("Figure 11")

# %%
nvfp4.claims("N13", "N25")

# %%
nvfp4.figure("Figure 12")

# %%
nvfp4.claims("N14", "N15")

# %%
nvfp4.figure("Figure 13")

# %%
nvfp4.claims("N16")

# %% [markdown]
# ### Forward and backward that disagree
#
# Weights alone, or activations alone, in NVFP4; everything else in BF16.

# %%
nvfp4.figure("Figure 14")

# %%
nvfp4.claims("N17", "N18")

# %% [markdown]
# ## Findings of our own
#
# What came after the paper, what it left open, and what shows how far the runs of this report can be trusted.

# %%
nvfp4.own()

# %% [markdown]
# ## Discussion
#
# Found in the verdicts by rule, so that nothing is picked: contradicted claims, effects that are not those spoken of,
# effects beyond the margin where none was said to be, what was found alone and not kept among all claims tested,
# controls that failed, and comparisons with too few seeds. Margins stay as they were fixed.

# %%
nvfp4.surprises()

# %% [markdown]
# ## What is assumed
#
# The paper leaves out warm-up, the shape of the decay, clipping, how large MXFP4's tiles of weights are, and which
# signs its transform has; ours are settings with defaults, in the configs of each scale and recipe. The signs are
# TransformerEngine's for the transform of size 16, and drawn once for other sizes; MXFP4's tiles are 32×32. How the
# blocks kept in BF16 divide a small model is ours: about as large a part of it as the paper's, so that of FP8's three
# in 62 none is left on processors. Of the paper's own numbers these are not printed:

# %%
nvfp4.inferred()

# %% [markdown]
# ## Out of reach

# %%
nvfp4.unreached()

# %% [markdown]
# ## Provenance

# %%
nvfp4.provenance()

# %% [markdown]
# ### Trials

# %%
nvfp4.trial_table()
