"""Secure sums: the server learns what clients send in total, and nothing else of what each of them sends."""
