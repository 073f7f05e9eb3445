"""Scoring of responses."""
