"""Studies: grids of experiments, with the tables and figures they must produce."""
