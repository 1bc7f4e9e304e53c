"""Pure tensor functions: PyTorch and the standard library only, each tested against an independent oracle.

averaging   weighted and layer-wise means of models
kernels     linear CKA, its gradient, a low-rank factor of the mean kernel
losses      weighted cross entropy, squared distance
modes       eval mode and untracked BatchNorm statistics for a while
noise       Gaussian noise on features
prototypes  class means, one header step on them
surgery     combining two gradients
"""
