"""What MODEL means: `models` tells paths from names and checks what is there, `hub` fetches what has only a name."""

from headrace.sources.models import config_directory, demo_gguf, directory_here, read_config, resolve

__all__ = ["config_directory", "demo_gguf", "directory_here", "read_config", "resolve"]
