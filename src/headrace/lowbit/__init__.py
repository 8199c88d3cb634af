"""Linear modules and embedding tables whose weights have 8 or 4 bits, for torch's kernels. Knows no file.

`packing` has the order of 4-bit rows, `rounding` chooses scales, `kernels` multiplies, `modules` puts them into a
model, `quantizer` tells transformers, `foreign` reads what others have quantized.
"""
