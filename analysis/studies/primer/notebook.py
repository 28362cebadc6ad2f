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
study: str = "primer"  # the study, or a sweep file of your own whose `study` is primer
scale: str = "smoke"  # smoke or cpu; "" for the scale of a sweep file
runs: str = ""  # the store; "": the nearest folder `runs`, here or above
overrides: str = ""  # further overrides, as one types them after `fewbits sweep`

# %%
primer = read(study, *shlex.split(overrides), scale=scale, runs=runs).report
primer.opening()

# %% [markdown]
# ## Verdicts

# %%
primer.summary()

# %% [markdown]
# ## A number in few bits
#
# A format ExMy has one sign bit, x bits of exponent and y bits of mantissa. In a binade, the range from a power of two
# to the next one, neighbouring values have the same distance, the step; each binade further from zero has twice the
# step. Below the smallest normal number the leading 1 is dropped, and the subnormals continue to zero with the same
# step. Each format defines what its highest codes mean.

# %%
primer.show("Table F", "Figure G", "Figure H", "A1", "A2", "A3", "C1", "A11", "A12", "A13", "A14", "C22")

# %% [markdown]
# Rounding replaces a number by the nearest value of the grid, and by the one with an even mantissa if two are equally
# near.

# %%
primer.show("Table N", "A4", "C6")

# %% [markdown]
# ## Casts
#
# A cast without a scale loses precision, turns small numbers into zero, and saturates or gives NaN beyond the range.

# %%
primer.show("Figure C", "Table 1", "Table 2", "Table 3", "B1", "C20", "C13", "Table L")

# %% [markdown]
# ## Scales
#
# A scale moves numbers into the format's range; it is computed from the largest magnitude of a tensor or of a block.

# %%
primer.show("B5", "Figure O", "C17", "C23", "C12", "C16")

# %% [markdown]
# ## Scales for blocks
#
# In MX, 32 elements share a power of two as their scale; in NVFP4, 16 elements share an E4M3 scale, and the tensor has
# one scale in FP32. The first text states MX's rule for the scale twice, and the two statements differ.

# %%
primer.show("Table W", "A15", "A16", "A5", "A17", "A18", "A7", "A20", "B7", "A21", "Figure B")

# %% [markdown]
# Which power of two is the best scale depends on the distribution.

# %%
primer.show("Table S", "Figure S", "A6", "B6")

# %% [markdown]
# A weight and an activation are summed over one axis in the forward pass and over the other in the backward pass.
# Blocks of one row follow the sum, so the two passes see different values of the same tensor.

# %%
primer.show("B8", "Figure T", "A19")

# %% [markdown]
# ## Rotation and stochastic rounding

# %%
primer.show("A8", "Figure N", "A9", "A22", "Figure R", "A10")

# %% [markdown]
# ## Sums
#
# A product of matrices adds thousands of numbers. Tensor cores align the products of elements with the largest of them,
# drop the bits below its last bit, and add the rest. The errors below are only those of the sums; our sums agree bit by
# bit with published models of the hardware.

# %%
primer.show("Table K", "Figure K", "B4", "C7", "C21", "C8", "C14", "C15")

# %% [markdown]
# ## Training
#
# Master weights keep updates that are smaller than a step of the weight's format. A scaled loss keeps small gradients
# in FP16's range.

# %%
primer.show("C2", "Policies", "Figure L", "C9", "B2", "F1", "Figure E", "C4", "C5", "B3", "C10", "C11")

# %% [markdown]
# In eight bits, a wider exponent (E5M2 instead of E4M3) takes a bit from the mantissa. With a scale for each tensor,
# most gradients are in the range of both formats.

# %%
primer.show("Eight bits", "A23", "B9", "Figure F", "C25")

# %% [markdown]
# ## Memory and speed

# %%
primer.show("C3", "C18", "Table M", "Figure M", "C19", "C24")

# %% [markdown]
# ## More of our own measurements

# %%
primer.own()

# %% [markdown]
# ## Discussion

# %%
primer.remarks()

# %% [markdown]
# ## Assumptions
#
# Our copy of the first text lacks its formulas. We inferred the mean number of bits of NVFP4 and the value that MX
# gives to numbers below its smallest normal number. The second text does not seed its examples, so we recompute exactly
# the tables whose inputs it prints, and do not compare the others.

# %%
primer.not_printed()

# %% [markdown]
# ## Out of reach

# %%
primer.unreached()

# %% [markdown]
# ## Provenance

# %%
primer.provenance()
