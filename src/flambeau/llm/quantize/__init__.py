"""Weight-only quantization, applied to a network from the outside.

`int8`, `int4` and `fp8` hold the layers in plain PyTorch: the twins that every faster one is compared with.
`cpu_layers` and `cuda_layers` hold the faster ones, `packing` puts them in place where the machine has them.
`applying` quantizes a network or builds an empty one for quantized files, and `saving` writes such files.
"""
