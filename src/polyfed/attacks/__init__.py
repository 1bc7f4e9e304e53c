"""What the uploads of a finished run give away to an honest-but-curious server.

``polyfed audit leakage`` is `audit`. `replay` runs a run's last rounds again and keeps every message, `inference`
guesses members and classes, `reconstruction` inverts what was sent into images.
"""

from polyfed.attacks.audit import leakage

__all__ = ["leakage"]
