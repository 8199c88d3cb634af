"""How the files of a package are handed to processes."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from headrace.reference import reading


@given(st.integers(0, 3000), st.integers(1, 64))
def test_tasks_are_all_files_in_order_and_get_smaller(count: int, workers: int) -> None:
    files = [f"{number}.py" for number in range(count)]
    tasks = list(reading._tasks(files, workers))
    assert [file for task in tasks for file in task] == files
    sizes = [len(task) for task in tasks]
    assert sizes == sorted(sizes, reverse=True)
    assert all(size <= 128 for size in sizes)
