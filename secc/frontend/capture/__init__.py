"""Recordings of forward, compared into one generic graph per case, and imported into the IR.

Imports `frontend.dataset`, `secc.ir` and the recorder.
"""
