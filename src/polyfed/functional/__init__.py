"""Pure tensor functions: PyTorch and the standard library only, each tested against an independent oracle.

averaging           weighted, layer-wise and normalized means of models
block_names         where a tensor stands in a network of repeated blocks
centering           common rows, scale and center of representations to compare
channel_slices      slices by width: windows, cutting, entry-wise averages
class_prototypes    class means, one header step on them
class_structure     how class means lie to one another: distances, Gram matrices, CKA
class_targets       one row per class from many: merging, filling in, losses, the nearest row
clipping            gradients and rows of bounded length
consensus           what several networks say together: mean scores, weights by confidence
cross_layer         updates of one layer steered by those of another
device_copies       many tensors to or from a GPU in few copies
drift               how far a model has gone since it was received, and that way as it is released
effective_steps     how far an optimizer's steps go for their gradient
entanglement        one mixture of a client's class means, a header step on mixtures
feature_pooling     features of one common shape, by linear maps and back
fisher              the diagonal Fisher information, from single samples
fx_graph            recorded steps of a forward, run on a module
guiding_vectors     learning towards guiding vectors, and how these should move
image_quality       PSNR, SSIM and total variation of images
kernel_factor       a low-rank factor of the mean of linear kernels
kernel_similarity   linear and RBF alignment and Procrustes behind one front
kernels             linear CKA and its gradient
lora                low-rank adapters: products, means of unequal ranks, stacks, decompositions
losses              weighted cross entropy, squared error, distances, divergence and contrast of outputs
low_rank            tensors as their largest singular triples
magnitudes          sub-models of the entries largest in magnitude: thresholds, a gradient that knows them
masks               which entries of tensors are shared: growth, what is sent, means
membership_scores   which rows were trained on: shadow models, ROC curves, intervals
metrics             accuracy, balanced accuracy, F1, AUC; RMSE, R2
mixing              models mixed by what they gain
modes               eval mode and untracked BatchNorm statistics for a while
noise               Gaussian noise on features
patch_mixing        images mixed with others of their batch, patch by patch
procrustes          orthogonal Procrustes distance
prototype_network   a small network whose outputs are the classes' prototypes
quantization        matrices as float16 or int8 for the way
rbf_kernel          CKA with RBF kernels, Nystroem features
robust              medians, trimmed means and Krum, which a few hostile vectors do not lead astray
secure_noise        normal numbers that only the holder of a key can draw
semantic_anchors    vectors drawn apart for the classes, and learning towards them with a margin
sparsification      tensors by their largest entries, numbers of 16 or 8 bits
sphere_spreading    directions pushed apart on the unit sphere
surgery             combining two gradients
tied_tensors        tensors and layers with several names: calls with others in their places
vmapped             layers and a loss that vmap computes in few kernels
"""
