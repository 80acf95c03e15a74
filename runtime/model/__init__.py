"""The user's model file: its functions, samples and batches, construction without weights, and the files
that initial weights come from. Imports `plan` and `errors`.
"""
