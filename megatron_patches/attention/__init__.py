"""Attention for machines without Transformer Engine: packed sequences and GQA on torch."""
