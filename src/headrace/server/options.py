"""What the server was asked for, with the names of vLLM's flags. Loads neither torch nor fastapi."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from headrace.config import parse_size
from headrace.settings import require

MODEL_LEN = 2048
"""Tokens of a request, unless the flag or the model says otherwise: a cache for a model's full length rarely fits."""

BATCHED_TOKENS = 1024
"""Tokens of one pass: a prompt of the usual length is prefilled in one."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServeOptions:
    """Settings of `headrace serve`, checked by `check`."""

    model: str
    host: str = "127.0.0.1"
    port: int = 8000
    api_key: str | None = None
    served_model_name: str | None = None
    memory: str | None = None
    max_model_len: int | None = None
    """None is MODEL_LEN, or what the model allows if that is less."""
    max_num_seqs: int = 16
    max_num_batched_tokens: int = BATCHED_TOKENS
    block_size: int = 16
    num_gpu_blocks_override: int | None = None
    """Blocks of the KV cache. None is room for `max_num_seqs` requests of `max_model_len` tokens; with less, requests
    wait for each other."""
    kv_offload_gb: float = 0.0
    max_waiting: int = 256
    max_request_size: str = "1MiB"
    drain_timeout: float = 30.0
    enable_log_requests: bool = False
    fast: bool = False
    trust_remote_code: bool = False

    @property
    def name(self) -> str:
        """What the model is called by requests."""
        return self.served_model_name or Path(self.model).name or self.model

    @property
    def max_request_bytes(self) -> int:
        return parse_size(self.max_request_size, "--max-request-size")

    def check(self) -> None:
        """Everything that can be known to be wrong before anything is loaded. Raises: ConfigError."""
        if self.memory is not None:
            parse_size(self.memory)
        require(self.max_request_bytes > 0, "--max-request-size", self.max_request_size, "above 0", "1MiB")
        require(0 <= self.port < 2**16, "--port", self.port, "0 to 65535", "8000")
        _at_least("--max-num-seqs", self.max_num_seqs, 1, "16")
        _at_least("--max-model-len", self.max_model_len, 2, str(MODEL_LEN))
        _at_least("--max-num-batched-tokens", self.max_num_batched_tokens, self.max_num_seqs, str(BATCHED_TOKENS))
        _at_least("--block-size", self.block_size, 4, "16")
        _at_least("--num-gpu-blocks-override", self.num_gpu_blocks_override, 2, "1024")
        _at_least("--max-waiting", self.max_waiting, 0, "256")
        _at_least("--drain-timeout", self.drain_timeout, 0, "30")
        require(self.api_key is None or self.api_key.strip() != "", "--api-key", "empty", "some text", "a long secret")
        # transformers can swap the cache of waiting requests to host memory that is pinned for an accelerator.
        require(
            self.kv_offload_gb == 0,
            "--kv-offload-gb",
            self.kv_offload_gb,
            "0 where the CPU computes: its KV cache lies in host memory already, and what does not fit is computed "
            "again. Give the memory to the cache itself, with --max-num-seqs and --max-model-len",
            "0",
        )


def _at_least(setting: str, value: float | None, least: int, suggestion: str) -> None:
    require(value is None or value >= least, setting, value, f"at least {least}", suggestion)
