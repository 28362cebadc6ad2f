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
study: str = "nvfp4"  # the study, or a sweep file of your own whose `study` is nvfp4
scale: str = "smoke"  # smoke, cpu, pretrained, cpu-full, gpu or paper; "" for the scale of a sweep file
runs: str = ""  # the store; "": the nearest folder `runs`, here or above
overrides: str = ""  # further overrides, as one types them after `fewbits sweep`

# %%
nvfp4 = read(study, *shlex.split(overrides), scale=scale, runs=runs).report
nvfp4.opening()

# %% [markdown]
# ## Verdicts

# %%
nvfp4.summary()

# %% [markdown]
# ## Method and runs
#
# The paper trains with 4-bit matrix products. All operands of a linear layer's three products are cast to E2M1 in
# blocks of 16 that share an E4M3 scale, with one FP32 scale for the tensor. With these casts alone, training diverges.
# It succeeds with four additions: the last blocks of the model stay in BF16; weights have one scale for each square of
# 16×16, so that both passes use the same values; gradients are rounded stochastically; and the operands of the weight
# gradient go through a random Hadamard transform.
#
# Each of the paper's curves is one run, with 1.2 B, 8 B or 12 B parameters on up to 10 T tokens. Here the same recipes
# train small models of the same families. At the small scales most arms branch from a common trunk that was trained in
# BF16, one for each seed, and the learning rate decays to zero, so that only the recipe differs between arms. For
# claims about the beginning of training, about late switches, or about the tokens that a run needs, arms are trained
# from scratch or branch from a run in NVFP4. Operands are rounded to the arm's formats and multiplied in BF16 with FP32
# sums. Hardware multiplies codes and applies scales to the sums. Here operands are multiplied by their scales first,
# and the results are rounded to BF16, which changes NVFP4's values by at most 0.4 %. Validation losses are computed
# with the arm's own formats. At scale `pretrained`, nothing is trained: recipes are measured at the weights of a
# published model of another architecture (SwiGLU).
#
# ## The format
#
# Results of the kernels that are used in training.

# %%
nvfp4.show("Figure 1", "Table 1", "N24")

# %% [markdown]
# ## Comparison with FP8 and BF16
#
# The paper compares its 12B model with FP8. It shows curves only as plots; its text states some of their numbers.

# %%
nvfp4.show("Figure 2", "N1")

# %% [markdown]
# Models of this size cannot answer questions. Instead, they are evaluated on text of another kind than the training
# text.

# %%
nvfp4.show("Figure 3", "Table 2", "N2")

# %% [markdown]
# ## The recipe
#
# Losses without each of the recipe's additions, and how each operand is quantized in training, as the recipe defines
# it.

# %%
nvfp4.show("Figure 4", "Figure 5", "N4", "N5", "N19", "N26")

# %% [markdown]
# ## Comparison with MXFP4
#
# MXFP4 has blocks of 32 with a power of two as their scale, rounded so that nothing saturates. Its weights are in
# squares of 32×32, and its Hadamard transform has size 32; everything else is as in NVFP4.

# %%
nvfp4.show("Figure 6", "N20", "N21")

# %% [markdown]
# ## Models
#
# The paper's models, and the models that were trained here.

# %%
nvfp4.show("Table 3", "Table 4", "Table 5")

# %% [markdown]
# ## Late switches to BF16

# %%
nvfp4.show("Figure 7", "N22", "N23")

# %% [markdown]
# ## Single additions
#
# In this section, parts are added to plain NVFP4, as in the paper's appendix: rounding to nearest, a scale for 16
# values of a row, no transform, and the last blocks in BF16, except where the blocks in BF16 are what varies.

# %%
nvfp4.show("N3", "Figure 8", "N8")

# %% [markdown]
# ### Layers
#
# The model has 20 blocks, like the paper's, so that the same numbers of blocks stay in BF16.

# %%
nvfp4.show("Figure 9", "N6", "N7")

# %% [markdown]
# ### Stochastic rounding

# %%
nvfp4.show("Figure 10", "N9", "N10", "N11", "N12")

# %% [markdown]
# ### The Hadamard transform
#
# Which product is transformed varies in plain NVFP4; the size and the signs of the transform vary in the full recipe.

# %%
nvfp4.show("Figure 11", "N13", "N25", "Figure 12", "N14", "N15", "Figure 13", "N16")

# %% [markdown]
# ### Different values in the forward and the backward pass
#
# Only weights, or only activations, are in NVFP4; everything else is in BF16.

# %%
nvfp4.show("Figure 14", "N17", "N18")

# %% [markdown]
# ## Findings of our own
#
# Recipes published after the paper, results on settings that the paper does not test, and the noise of the runs.

# %%
nvfp4.own()

# %% [markdown]
# ## Discussion

# %%
nvfp4.remarks()

# %% [markdown]
# ## Assumptions
#
# The paper does not state warm-up, the shape of the decay, clipping, the size of MXFP4's squares of weights, and the
# signs of its transform; our settings are in the configs of each scale and recipe. The signs are TransformerEngine's
# for the transform of size 16, and drawn once for other sizes; MXFP4's squares are 32×32. We chose the blocks of a
# small model that stay in BF16: about the same share of blocks as in the paper. By this rule, FP8's three blocks of 62
# in the paper become no block in the models for CPUs. The following numbers of the paper are missing from its text as
# we have it:

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
