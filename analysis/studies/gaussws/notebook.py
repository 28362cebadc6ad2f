# %%
from fewbits import read

# %% tags=["parameters"]
results: str = "results.parquet"  # the file beside this notebook; or a study such as gaussws, whose store is then read
scale: str = ""  # of a study: smoke, cpu, …
runs: str = ""  # the store of a study; "": the nearest folder `runs`, here or above

# %%
gaussws = read(results, scale=scale, runs=runs).report
gaussws.top()

# %% [markdown]
# ## The method
#
# The paper trains with noise on weights instead of quantizing them. Each 32×32 square of a weight has a bit width b;
# the noise R · 2^(1−b) · max|w| is added to each element, and the sum is cast to BF16. R has nearly the distribution of
# rounded normal numbers. The width is learned, and weight decay pulls it to a target. DiffQ is the same method with
# uniform noise.

# %%
gaussws.show("Figure 1", "Figure 2")

# %% [markdown]
# ## Costs

# %%
gaussws.show("Table 1")

# %% [markdown]
# ## Sampled parts and optimizers; Llama 2

# %%
gaussws.show("Figure 3", "Figure 4")

# %% [markdown]
# ## Bit widths and generators

# %%
gaussws.show("Figure 5", "Figure 6")

# %% [markdown]
# ## The paper's appendix

# %%
gaussws.show("Table B.1", "Table C.1", "Figure D.1", "Table E.1", "Figure F.1")

# %% [markdown]
# ## Claims

# %%
gaussws.claims()

# %% [markdown]
# ## Further tables and figures of these runs

# %%
gaussws.rest()

# %% [markdown]
# ## Appendix: method, statistics and provenance
#
# The paper trains 124 M to 1 B parameters on up to 295 B tokens, from scratch, and so do our runs at the paper's own
# scale. At the other scales, models of the same two families branch from a common trunk in BF16, one for each seed and
# optimizer, and the learning rate decays to zero, so that only the noise differs. Validation is without noise.
#
# The paper's instability appears after tens of billions of tokens. We induce one instead: from a trained checkpoint,
# training continues at a constant, higher learning rate. Times were measured on the present device in turns; the
# paper's are from an A100.
#
# Assumed, because the paper does not state it: the learning rate and decay of bit widths, Adam-mini's settings, and
# that validation is without noise. Where arms branch from a trunk, the rate and decay of widths are chosen so that
# decay alone changes them as much as in the paper's GPT-2 run at the low learning rate.

# %%
gaussws.appendix()
