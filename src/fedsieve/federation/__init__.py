"""Clients, executors, aggregation, server optimizers and the round loop: one server, many clients, one machine."""
