"""Sends and receives the messages of inter-section edges between ranks, on gloo and NCCL. Imports
`validation` and `plan`."""
