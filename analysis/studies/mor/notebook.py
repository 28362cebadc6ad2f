# %%
from fewbits import read

# %% tags=["parameters"]
results: str = "results.parquet"  # the file beside this notebook; or a study such as mor, whose store is then read
scale: str = ""  # of a study: smoke, cpu, …
runs: str = ""  # the store of a study; "": the nearest folder `runs`, here or above

# %%
mor = read(results, scale=scale, runs=runs).report
mor.top()

# %% [markdown]
# ## The method
#
# MoR casts each operand of a matrix product to E4M3 and back. If the tensor's mean relative error is below a threshold,
# the product uses the cast values; otherwise the tensor stays in BF16. All blocks of a tensor share the mantissa of the
# tensor's scale, and each block has its own exponent (GAM).

# %%
mor.show("Figure 1", "Figure 2", "Figure 3", "Figure 4")

# %% [markdown]
# ## Set-up

# %%
mor.show("Table 1")

# %% [markdown]
# ## One decision for each tensor
#
# Three partitions of a tensor into blocks that share a scale: 128×128, the whole tensor, and the whole vector along the
# axis of the dot product. The threshold is 4.5 % for all three.

# %%
mor.show("Table 2", "Figure 5", "Figure 6", "Figure 7")

# %% [markdown]
# ## Block size, threshold and scaling

# %%
mor.show("Table 3", "Figure 8", "Figure 9")

# %% [markdown]
# ## Tensors that fall back to BF16
#
# A row of a heat map is a tensor, and a column is a range of its relative error. The shade is the share of mini-
# batches, and the line is the threshold.

# %%
mor.show("Figure 10", "Figure 11", "Figure 12", "Figure 13", "Figure 14")

# %%
mor.show("Figure 15", "Figure 16", "Figure 17", "Figure 18", "Figure 19")

# %% [markdown]
# ## One decision for each block
#
# Two-way: a block is cast to E4M3 if its error is less than it would be in E5M2; otherwise it stays in BF16. Three-way:
# if E4M3's error is not the lesser one, the block is cast to E5M2 if its range allows it.

# %%
mor.show("Table 4", "Figure 20", "Figure 21")

# %% [markdown]
# ## Claims

# %%
mor.claims()

# %% [markdown]
# ## Further tables and figures of these runs

# %%
mor.rest()

# %% [markdown]
# ## Appendix: method, statistics and provenance
#
# The paper trains a model of 8 B parameters on 1 T tokens, once for each arm. Here its recipes train small models of
# the same family on text that every machine has. Arms branch from a common trunk that was trained in BF16, one for each
# seed, and the learning rate decays to zero, so that only the recipe differs between arms.
#
# Assumed, because the paper does not state it: learning rates, warm-up, optimizer and length of sequences (the configs
# have them); that a tensor's error is the sum of its elements' relative errors divided by the number of elements that
# are not zero; that E8M0 scales are rounded so that nothing saturates; and the bins of the heat maps, half a percent
# wide, up to ten percent.

# %%
mor.appendix()
