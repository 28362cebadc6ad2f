"""Define the index of each statistic in the counts that backends return (README.md, "Statistics")."""

ERROR, NONZEROS, FLUSHED, SATURATED, CAPPED, NONFINITE, LOST = range(7)
COUNTS = 7  # the number of statistics
ERROR_ONE = 1 << 23  # what a relative error of 1 adds to the statistic ERROR, which is an integer
