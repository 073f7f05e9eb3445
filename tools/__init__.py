"""Command lines over the package."""
