"""Passes over the `sec` IR, one file each. A pass is a frozen dataclass; its fields are its options;
`secc.pass_pipeline` knows their names."""

if __name__ != "secc.passes":
    raise ImportError(
        "this folder is the package secc.passes; import it under that name, or its classes exist twice"
    )
