"""What the uploads of a finished run give away.

``polyfed audit attack`` is `reconstruction`: a client's images made again from what it sent last. ``polyfed audit
leakage`` is `audit`: all that an honest-but-curious server gets, method by method. `replay` runs a run's last rounds
again and keeps every message, `inference` guesses members and classes, `inversion` makes inputs from features or
gradients.
"""

from polyfed.attacks.api import attack, leakage
from polyfed.attacks.reconstruction import AttackResult

__all__ = ["AttackResult", "attack", "leakage"]
