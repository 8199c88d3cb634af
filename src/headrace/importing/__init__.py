"""Other formats become safetensors. Knows nothing of what runs the result.

`cache` keeps what was imported, `header` reads a GGUF file's own description, `convert` is what it means to
transformers, `writer` writes the checkpoint.
"""

from headrace.importing.cache import cache_directory, import_gguf

__all__ = ["cache_directory", "import_gguf"]
