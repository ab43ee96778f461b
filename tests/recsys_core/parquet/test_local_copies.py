import threading
from collections.abc import Iterator

import pyarrow as pa

from recsys_core.parquet.local_copies import decode_ahead


def test_the_caller_decodes_the_first_batch_and_a_thread_the_others() -> None:
    threads = []

    def batches() -> Iterator[pa.RecordBatch]:
        for number in range(3):
            threads.append(threading.current_thread())
            yield pa.record_batch({"number": [number]})

    assert [batch["number"].to_pylist() for batch in decode_ahead(batches())] == [[0], [1], [2]]
    assert [thread is threading.main_thread() for thread in threads] == [True, False, False]
