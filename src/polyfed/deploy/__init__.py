"""The same methods among real machines: clients are nodes of their own, the server a process that asks them.

`flower` is the only file that knows Flower. `server` and `node` are the two halves, `letters` what they write each
other, `shelf` what a node keeps between two letters.
"""
