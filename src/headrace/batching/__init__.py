"""Many requests that share each pass over one model. Knows tokens; no text, no HTTP, no files.

`batcher` runs them through transformers' continuous batching, `sampling` lets each choose its own tokens, `pacing` says
how much of a prompt may ride along, `attention` keeps sequences apart.
"""
