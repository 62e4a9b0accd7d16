"""Messages: values and masks as bytes, checked on arrival, and the ledger that counts them."""
