"""What the reference workloads share: the sample mixes, packed batches with attention per sample,
configurations, and joined models."""
