"""Data: where samples come from, how they are dealt to clients, and what is done to a batch."""
