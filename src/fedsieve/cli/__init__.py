"""The command line. Every command is a thin door to a function that a notebook could call as well."""

# In the order in which `fedsieve --help` shows their commands:
from fedsieve.cli import run_commands, site_commands, campaign_commands, mask_commands, word_commands  # noqa: F401, I001
from fedsieve.cli.root import app, main

__all__ = ["app", "main"]
