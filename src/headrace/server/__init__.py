"""An OpenAI-compatible server: many requests share each pass over the weights.

`process` runs it, `app` has the routes, `batching` drives transformers' continuous batching. Nothing here knows where
weights live: that is the engine's.
"""
