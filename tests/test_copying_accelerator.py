"""The accelerators that this machine has run the programs that the simulated one runs; what it has not is refused."""

from __future__ import annotations

import pytest
import torch
from device_programs import PROGRAMS, Program

from headrace import errors
from headrace.copying.accelerator import open_accelerator


def test_the_cpu_is_no_accelerator() -> None:
    assert open_accelerator(torch.device("cpu")) is None


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_a_right_program_is_right_on_cuda_or_there_is_no_cuda(program: Program) -> None:
    if torch.cuda.is_available():
        device = open_accelerator(torch.device("cuda"))
        assert device is not None
        computed, expected = program(device)
        assert computed == expected
    else:
        with pytest.raises(errors.CannotOffload, match="there is no device 'cuda'"):
            open_accelerator(torch.device("cuda"))


@pytest.mark.parametrize("name", ["meta", "xpu:77", "cuda:77"])
def test_a_device_that_is_not_there_is_refused_with_those_that_are(name: str) -> None:
    with pytest.raises(errors.CannotOffload) as caught:
        open_accelerator(torch.device(name))
    assert name in caught.value.reason
    assert "cpu" in caught.value.suggestion
