"""Saving, loading, converting and exporting models."""
