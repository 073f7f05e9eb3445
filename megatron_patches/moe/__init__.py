"""Mixture-of-experts layers for machines without CUDA or without Transformer Engine."""
