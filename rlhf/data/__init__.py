"""Ragged typed batches, prompts, microbatches."""
