# %%
from fewbits import read

# %% tags=["parameters"]
results: str = "results.parquet"  # the file beside this notebook; or a study such as nvfp4, whose store is then read
scale: str = ""  # of a study: smoke, cpu, …
runs: str = ""  # the store of a study; "": the nearest folder `runs`, here or above

# %%
nvfp4 = read(results, scale=scale, runs=runs).report
nvfp4.top()

# %% [markdown]
# ## The format
#
# In NVFP4, 16 elements of E2M1 share an E4M3 scale, and the tensor has one scale in FP32. The recipe adds four parts:
# the last blocks of the model stay in BF16; weights have one scale for each square of 16×16; gradients are rounded
# stochastically; the operands of the weight gradient go through a random Hadamard transform.

# %%
nvfp4.show("Figure 1", "Table 1")

# %% [markdown]
# ## Comparison with FP8 and BF16

# %%
nvfp4.show("Figure 2", "Table 2", "Figure 3")

# %% [markdown]
# ## Without one part of the recipe

# %%
nvfp4.show("Figure 4", "Figure 5")

# %% [markdown]
# ## NVFP4 beside MXFP4, and late switches to BF16

# %%
nvfp4.show("Figure 6", "Figure 7")

# %% [markdown]
# ## How models were trained

# %%
nvfp4.show("Table 3", "Table 4", "Table 5")

# %% [markdown]
# ## The parts of the recipe

# %%
nvfp4.show("Figure 8", "Figure 9", "Figure 10", "Figure 11", "Figure 12", "Figure 13", "Figure 14")

# %% [markdown]
# ## Claims

# %%
nvfp4.claims()

# %% [markdown]
# ## Further tables and figures of these runs

# %%
nvfp4.rest()

# %% [markdown]
# ## Appendix: method, statistics and provenance
#
# Each of the paper's curves is one run, with 1.2 B, 8 B or 12 B parameters on up to 10 T tokens. Here the same recipes
# train small models of the same families. Most arms branch from a common trunk in BF16, one for each seed, and the
# learning rate decays to zero, so that only the recipe differs. For claims about the beginning of training, about late
# switches, or about the tokens that a run needs, arms are trained from scratch or branch from a run in NVFP4.
#
# Operands are rounded to the arm's formats and multiplied in BF16 with FP32 sums. Hardware multiplies codes and applies
# scales to the sums; here operands are multiplied by their scales first and rounded to BF16, which changes NVFP4's
# values by at most 0.4 %. Validation losses are computed with the arm's own formats.

# %%
nvfp4.appendix()
