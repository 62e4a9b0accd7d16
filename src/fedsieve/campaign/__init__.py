"""Grids of runs in one folder: studies, whose rows are data, and sweeps, which search settings on validation."""
