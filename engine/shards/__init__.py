"""Runs the optimizer shards: state and gradients in memory or on disk, the update loop, saves during training."""
