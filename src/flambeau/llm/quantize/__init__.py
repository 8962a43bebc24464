"""Weight-only quantization, applied to a network from outside.

`row_scaled` and `int4` have the layers in plain PyTorch, which the faster ones in `fast_layers` are tested against.
`quantizer` quantizes a network, or builds an empty one for quantized files. `settings` says which layers are quantized.
"""
