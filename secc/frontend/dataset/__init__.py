"""What samples look like: the survey of the dataset, symbols of inputs, padding.

Imports `secc.errors` and the runtime's data path.
"""
