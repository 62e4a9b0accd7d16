"""Which weights may train: scores, exact selection, calibration, bit-packed masks and how they overlap."""
