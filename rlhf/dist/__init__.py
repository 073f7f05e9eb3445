"""Rank grids, process groups, job life. Knows no model and no algorithm."""
