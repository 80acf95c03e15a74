"""Passes over the `sec` IR, one file each. A pass is a frozen dataclass whose fields are its options; `secc.pipeline` knows their names."""
