"""The same experiments over Flower: a ServerApp, and a site's own process, that carry fedsieve's envelopes."""

import os

# Flower's programs ask their vendor for updates when they start, and report how they are used. It reads the second of these
# when it is imported, so both are set before any module here imports it. Processes that are started inherit them.
QUIET = {"FLWR_DISABLE_UPDATE_CHECK": "1", "FLWR_TELEMETRY_ENABLED": "0"}
os.environ |= QUIET

WAIT = 300.0  # seconds for all sites to come,
DEADLINE = 600.0  # and for each to answer
