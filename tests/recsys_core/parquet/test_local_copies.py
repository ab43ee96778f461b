"""Decoding of a remote file while the caller works on its first batch."""

import threading
from collections.abc import Iterator

import pyarrow as pa

from recsys_core.parquet.local_copies import decode_ahead


def test_the_caller_decodes_the_first_batch_and_a_thread_the_later_batches() -> None:
    decoding_threads: list[threading.Thread] = []

    def batches() -> Iterator[pa.RecordBatch]:
        for number in range(3):
            decoding_threads.append(threading.current_thread())
            yield pa.record_batch({"number": [number]})

    assert [batch["number"].to_pylist() for batch in decode_ahead(batches())] == [[0], [1], [2]]
    assert [thread is threading.main_thread() for thread in decoding_threads] == [True, False, False]
