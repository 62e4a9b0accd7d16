"""Benchmarks: each prints one table of ratios measured side by side in one run, and can write it as JSON."""
