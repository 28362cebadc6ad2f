# %%
from fewbits import read

# %% tags=["parameters"]
results: str = "results.parquet"  # the file beside this notebook; or a study such as primer, whose store is then read
scale: str = ""  # of a study: smoke, cpu, …
runs: str = ""  # the store of a study; "": the nearest folder `runs`, here or above

# %%
primer = read(results, scale=scale, runs=runs).report
primer.top()

# %% [markdown]
# ## 1. Number formats
#
# A format ExMy has one sign bit, x bits of exponent and y bits of mantissa. From a power of two to the next (a binade),
# neighbouring values have the same distance, the step; each binade further from zero has twice the step. Below the
# smallest normal number the leading 1 is dropped, and the subnormals continue to zero with the same step.

# %%
primer.show("Figure 1", "Formats", "A1", "A2", "A11", "A13", "A14", "A24", "C1")

# %% [markdown]
# ## 2. Rounding
#
# A cast takes the nearest value, and the one with an even mantissa if two are equally near. Small numbers become zero;
# beyond the largest value, a cast saturates or gives infinity or NaN.

# %%
primer.show("Figure 2", "Table 1", "Table 2", "Table 3", "B1", "C13", "A4")

# %% [markdown]
# ## 3. Scales
#
# A scale moves numbers into the format's range; it is computed from the largest magnitude of a tensor or of a block.
# INT8 has one step for all numbers that share a scale, so one outlier erases the others; E4M3's steps are relative.

# %%
primer.show("Figure 3", "B5", "C17", "C23", "C12", "C27", "C16", "B8", "A19")

# %% [markdown]
# ## 4. MX and NVFP4
#
# In MX, 32 elements share a power of two; in NVFP4, 16 elements share an E4M3 scale, and the tensor has one scale in
# FP32. MX rounds the scale down, so the largest elements may saturate.

# %%
primer.show("Figure 4", "A17", "A16", "A20", "B7", "A21", "B6")

# %% [markdown]
# ## 5. The Hadamard transform
#
# It spreads an outlier over 16 values. That helps if one scale has to fit all numbers and outliers are moderate; a
# block of 16 stores a single outlier well without it. Random signs prevent that equal numbers become an outlier.

# %%
primer.show("Figure 5", "A9", "A22", "F2")

# %% [markdown]
# ## 6. Stochastic rounding
#
# A number is rounded up with a probability in proportion to its distance from the lower neighbour, so the mean of many
# roundings is the number itself. One rounding errs more than rounding to nearest.

# %%
primer.show("Figure 6", "A8")

# %% [markdown]
# ## 7. Dot products and accumulators
#
# A product of matrices adds thousands of numbers. Tensor cores align products with the largest of them and drop the
# bits below its last bit. The errors below are those of the sums alone.

# %%
primer.show("Figure 7", "B4", "C8", "C14", "C21")

# %% [markdown]
# ## 8. Mixed precision and master weights
#
# Products have low precision; FP32 master weights keep updates that are smaller than a step of the weight's format.

# %%
primer.show("Figure 8", "Policies", "C2", "C26", "C9", "B2", "F1", "C19", "C24", "C28")

# %% [markdown]
# ## 9. Loss scaling
#
# Gradients are scaled with the loss, into FP16's range, and divided by the scale before the update.

# %%
primer.show("Figure 9", "C5", "C4", "B3", "C10", "C11")

# %% [markdown]
# ## 10. Recipes of today
#
# DeepSeek-V3 casts the operands of linear layers to E4M3 in small blocks. The study `nvfp4` tests which layers and
# passes need more precision in four bits, `mor` a choice of the format for each tensor.

# %%
primer.show("Figure 10", "A23", "B9", "C25")

# %% [markdown]
# ## Appendix: statistics and provenance

# %%
primer.appendix()
