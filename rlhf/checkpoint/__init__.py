"""Saving and exporting models."""
