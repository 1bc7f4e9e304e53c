"""Pure tensor functions: PyTorch and the standard library only, each tested against an independent oracle.

averaging           weighted, layer-wise and normalized means of models; mixtures by what each is worth
centering           common rows, scale and center of representations to compare
channel_slices      slices by width: windows, cutting, entry-wise averages
class_prototypes    class means: merging, losses towards them and their structure, the nearest one, header steps
clipping            gradients, rows and updates of bounded length, with noise where they are released
compression         matrices as float16 or int8, tensors by their largest entries
consensus           what several networks say together: mean scores, weights by confidence
cross_layer         updates of one layer steered by those of another, found by the names of blocks
device_copies       many tensors to or from a GPU in few copies
feature_pooling     features of one common shape, by linear maps and back
fisher              the diagonal Fisher information, from single samples
fx_graph            recorded steps of a forward, run on a module
guiding_vectors     learning towards guiding vectors, and how these should move
image_quality       PSNR, SSIM and total variation of images
kernel_similarity   linear and RBF alignment and Procrustes behind one front
kernels             linear CKA and its gradient, a low-rank factor of a mean of linear kernels
lora                low-rank adapters: products, means of unequal ranks, stacks, decompositions
losses              weighted cross entropy, squared error, distances, divergence and contrast of outputs
low_rank            tensors as their largest singular triples
masks               which entries of tensors are shared: growth, thresholds, what is sent, means
membership_scores   which rows were trained on: shadow models, ROC curves, intervals
metrics             accuracy, balanced accuracy, F1, AUC; RMSE, MAE, R2
modes               eval mode and untracked BatchNorm statistics for a while
noise               Gaussian noise on features, and normal numbers of a key
patch_mixing        images mixed with others of their batch, patch by patch
robust              medians, trimmed means and Krum, which a few hostile vectors do not lead astray
server_prototypes   prototypes trained by a network, drawn apart, or pushed apart on the sphere
surgery             combining two gradients
tied_tensors        tensors and layers with several names: calls with others in their places
vmapped             layers and a loss that vmap computes in few kernels
"""
