"""Orders one global batch: forms micro-batches, assigns them to replicas and writes one program per rank;
runs on every rank and in the compiler. Imports `plan`, `host` and `errors` only.
"""
