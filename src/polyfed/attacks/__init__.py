"""What the uploads of a finished run give away.

A client's images reconstructed from what it sent (`attack`):

exposure        what a client sent last, and the images behind it
reconstruction  an input made, step by step, whose features are those that were sent
trials          the two together, over noise levels and priors, scored
perceptual      LPIPS, where it can be had
pictures        the figures and the table

All that an honest-but-curious server gets, method by method (`report`):

replay          a run's last rounds run again, and every message kept
holdings        what is in the messages: entries, facts stated, whole networks
classes         which classes a client has
membership      which rows it trained on: loss threshold, LiRA
gradients       images made from a change of weights
rebuilt         images made again in every way that there is
survey          all of it for one run
tables          the table and the figure

leakage         both for run folders, and the files of ``RUN/attack``
"""

from polyfed.attacks.api import attack, leakage
from polyfed.attacks.audit_report import AuditReport
from polyfed.attacks.reconstruction_runs import AttackResult

__all__ = ["AttackResult", "AuditReport", "attack", "leakage"]
