"""The feed-forward block for machines without Transformer Engine."""
