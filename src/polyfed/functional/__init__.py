"""Pure tensor functions: PyTorch and the standard library only, each tested against an independent oracle."""
