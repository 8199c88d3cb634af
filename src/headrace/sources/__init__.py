"""What MODEL means: `models` tells paths from names and checks what is there, `hub` fetches what has only a name."""

from headrace.sources.models import demo_gguf, resolve

__all__ = ["demo_gguf", "resolve"]
