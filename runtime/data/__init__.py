"""From dataset indices to collated micro-batches on the device.

Imports `rerecording`, `parameters`, `model`, `plan`, `host` and `errors`.
"""
