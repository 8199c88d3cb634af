"""Many clients that cancel, send nonsense and come all at once: none is lost, none is mixed up, all is given back."""

from __future__ import annotations

from pathlib import Path

import pytest
import tiny_models
import torch
from live_server import serving
from soak import expected_answers, soak


@pytest.mark.slow
def test_nothing_is_lost_and_all_is_given_back(tmp_path: Path) -> None:
    directory = tiny_models.write(tmp_path / "tiny", "llama", torch.float32)
    with serving(directory, share=0.5, max_num_seqs=8, max_waiting=64) as live:
        known = expected_answers(live, ["a", "the theme", "b" * 40, "the " * 20], [3, 10])
        outcome = soak(live, requests=150, clients=16, known=known)
        assert outcome.wrong == []
        assert outcome.answered + outcome.cancelled + outcome.refused == 150
        assert outcome.answered > 60
        assert outcome.cancelled > 30
        assert outcome.refused > 5
        statistics = live.service.batcher.statistics()
        assert (statistics.running, statistics.waiting, statistics.kv_blocks_used) == (0, 0, 0)
        assert statistics.failed_passes == 0
        with live.client() as client:
            assert client.get("/health").status_code == client.get("/ready").status_code == 200
