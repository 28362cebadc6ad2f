"""Name the statistics that backends count in each part of a matrix (README.md, "Statistics")."""

ERROR, NONZEROS, FLUSHED, SATURATED, CAPPED, NONFINITE, LOST = range(7)
COUNTS = 7
ERROR_ONE = 1 << 23  # a relative error of 1
