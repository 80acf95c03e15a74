"""Records glue that depends on data again for each micro-batch, on a rank.

Imports `recorder`, `sections`, `plan` and `errors`.
"""
