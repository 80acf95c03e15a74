"""What a run writes: metrics, traces, times and its closing summary. Imports `plan`."""
