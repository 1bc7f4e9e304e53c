"""The same methods among real machines: clients are nodes of their own, the server a process that asks them.

`flower` is the only file that knows Flower. `server` and `node` are the two halves, `envelopes` what they write each
other, `checkpoints` what a node keeps between two envelopes.
"""
