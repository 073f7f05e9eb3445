"""The embedded engine: tensor-parallel, continuous batching, on any torch device."""
