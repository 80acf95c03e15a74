"""The `sec` IR: a dialect of xDSL for compound training models, its size expressions and argument templates.
See docs/internals/ir.md."""
