"""Processes and the garbage collector of this machine. Imports only `errors`."""
