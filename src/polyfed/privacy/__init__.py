"""What the uploads of a finished run give away: a client's images reconstructed from them.

exposure        what a client sent last, and the images behind it
reconstruction  an input made, step by step, whose features are those that were sent
trials          the two together, over noise levels and priors, scored
perceptual      LPIPS, where it can be had
pictures        the figures and the table
leakage         all of it for a run folder, and the files of ``RUN/attack``
"""

from polyfed.privacy.leakage import attack
from polyfed.privacy.trials import Attack

__all__ = ["Attack", "attack"]
