"""Slabs: memory that weights land in, as tensors see it. Knows nothing of what lies in it."""

from __future__ import annotations

import torch

from headrace.copying.pages import Pages


class Slab(Pages):
    """Pages with a tensor over them."""

    def __init__(self, nbytes: int, *, huge_pages: bool = True) -> None:
        super().__init__(nbytes, huge_pages=huge_pages)
        self.bytes = tensor_over(self)
        """1-d uint8 over the whole slab; it keeps the memory alive."""


def tensor_over(pages: Pages) -> torch.Tensor:
    """1-d uint8 over all of `pages`; it keeps the memory alive."""
    return torch.frombuffer(pages.view(), dtype=torch.uint8)
