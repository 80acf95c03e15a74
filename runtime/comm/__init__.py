"""Point-to-point messages of edges between ranks, on gloo and NCCL. Imports `validation` and `plan`."""
