"""Choosing settings on validation."""
