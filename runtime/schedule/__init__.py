"""Orders one global batch: forms micro-batches, assigns them to replicas and writes one program per rank.
Runs on every rank and in the compiler. Imports `plan`, `host` and `errors` only.
"""
