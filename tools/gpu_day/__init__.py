"""Everything that has to be checked and measured on a machine with a GPU, as one resumable run.

`checks.py` runs the list of checks, each in a process of its own, and keeps their results in one folder;
`kernel_checks.py` has those of the fused operators, `training_checks.py` those of plans that train, and
`cost_checks.py` those that compare time and memory with plain PyTorch and with predictions. `models/` holds
the model files that they train. `python -m tools.gpu_day --dry` runs the same code on the CPU at small sizes.
"""
