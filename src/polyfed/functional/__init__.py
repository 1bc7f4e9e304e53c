"""Pure tensor functions: PyTorch and the standard library only, each tested against an independent oracle.

averaging   weighted, layer-wise and normalized means of models
blocks      where a tensor stands in a network of repeated blocks
centering    common rows, scale and center of representations to compare
clipping    gradients of bounded length
cross_layer updates of one layer steered by those of another
drift       how far a model has gone since it was received, and that way as it is released
fisher      the diagonal Fisher information, from single samples
image_quality PSNR, SSIM and total variation of images
keyed       normal numbers that only the holder of a key can draw
kernels     linear CKA, its gradient, a low-rank factor of the mean kernel
losses      weighted cross entropy, distances, divergence and contrast of outputs
low_rank    tensors as their largest singular triples
masks       which entries of tensors are shared: growth, what is sent, means
membership  which rows were trained on: shadow models, ROC curves, intervals
mixing      models mixed by what they gain
modes       eval mode and untracked BatchNorm statistics for a while
noise       Gaussian noise on features
precision   matrices as float16 or int8 for the way
procrustes  orthogonal Procrustes distance
privacy     how much noise the Gaussian mechanism needs
prototypes  class means, one header step on them
rbf         CKA with RBF kernels, Nystroem features
robust      medians, trimmed means and Krum, which a few hostile ones do not lead astray
similarity  linear and RBF alignment and Procrustes behind one front
steps       how far an optimizer's steps go for their gradient
submodels   slices by width: windows, cutting, entry-wise averages
surgery     combining two gradients
"""
