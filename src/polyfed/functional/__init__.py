"""Pure tensor functions: PyTorch and the standard library only, each tested against an independent oracle.

averaging   weighted and layer-wise means of models
centring    common rows, scale and centre of representations to compare
kernels     linear CKA, its gradient, a low-rank factor of the mean kernel
losses      weighted cross entropy, squared distance
modes       eval mode and untracked BatchNorm statistics for a while
noise       Gaussian noise on features
precision   matrices as float16 or int8 for the way
procrustes  orthogonal Procrustes distance
privacy     how much noise the Gaussian mechanism needs
prototypes  class means, one header step on them
rbf         CKA with RBF kernels, Nystroem features
similarity  linear and RBF alignment and Procrustes behind one front
surgery     combining two gradients
"""
