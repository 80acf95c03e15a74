"""Runs blocks on the meta device and writes their FLOPs and bytes on the calls.

Imports `cost.model`, `secc.ir` and the recorder.
"""
