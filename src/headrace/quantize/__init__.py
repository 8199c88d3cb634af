"""`headrace quantize`: a checkpoint with fewer bits for each weight, written layer by layer, and what that costs.

`choice` says which matrices get how many bits, `originals` reads what there is (`gguf`: another form of it),
`calibration` sees what goes into the matrices, `write` writes them, `repack` brings a checkpoint of ours into another
processor's order, `damage` measures what was lost. The texts for both are in `data`.
"""
