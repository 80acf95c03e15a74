"""The loop of a rank: joins the run, plans steps, executes programs, updates parameters; also the launcher
and emulation. The top of `secc.runtime`: imports every other package of it.
"""
