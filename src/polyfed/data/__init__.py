"""Data: where samples come from, how they are assigned to clients, and what is done to a batch."""
