"""`headrace quantize`: a checkpoint with fewer bits for each weight, written layer by layer, and what that costs.

`choice` says which matrices get how many bits, `originals` reads what there is (`gguf`, `foreign`: other forms of it),
`write` writes it, `repack` brings a checkpoint of ours into another processor's order, `damage` measures what was lost,
on the text of `text`.
"""
