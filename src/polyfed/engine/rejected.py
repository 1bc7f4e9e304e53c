"""What is raised for an upload that counts for nothing."""

from __future__ import annotations


class Rejected(Exception):
    """An upload that counts for nothing; says why, in a line."""
