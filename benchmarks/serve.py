"""Benchmark of the served package: latency, throughput, start and memory with a million items.

    make bench-serve                            # writes benchmarks/serve.json and serve.md
    python -m benchmarks.serve --items 20000    # a small catalogue; prints the tables, writes nothing
    python -m benchmarks.serve --users          # replaces the part of benchmarks/serve_users.py in both files

A run trains on a generated log and on the vectors of benchmarks/index.py, and registers a version. Light users have 20 events,
and heavy users have 2,000 events. The retriever is measured in its own process with one thread. Then 8 clients on the same
machine send the same requests to `nightjar serve`, and after that to `mlflow models serve`.
"""

import argparse
import http.client
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from statistics import quantiles
from typing import Any

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks import serve_users
from benchmarks.index import DIM, random_vectors
from benchmarks.measuring import ROOT, run_in_new_process

NUM_ITEMS, NUM_LIGHT_USERS, NUM_HEAVY_USERS = 1_000_000, 4_000, 50
NUM_ITEMS_WITH_MANY_USERS = 20_000
LIGHT_EVENTS, HEAVY_EVENTS, NUM_DAYS = 20, 2_000, 20
K, NUM_CLIENTS, CLIENT_S, BATCH_ROWS = 10, 8, 10.0, 1_000
START_TIMEOUT_S = 600.0
NUM_MEMORY_PROCESSES, NUM_MEMORY_REQUESTS, _LOADED = 2, 1_000, "loaded"
FOLDER = Path(__file__).parent
NIGHTJAR = [sys.executable, "-m", "flows.cli"]
CONFIG = """
workspace: .
interactions: {paths: log.parquet, timestamp_column: timestamp, split: {kind: time, test_days: 1, validation_days: 1}}
embeddings: {paths: vectors.parquet, vector_column: embedding, id_column: item_id}
model: {embedding_dim: 64}
training: {epochs: 1, batch_size: 4096, warm_start: null, validation: null}
evaluation: {max_users: 200, baselines: [], metrics: [recall, ndcg, hit_rate]}
index: {served: {kind: ivf_flat}, recall_target: 0.95}
registry: {smoke_test_users: 100, gate: {kind: margin}, baselines: []}
"""


def write_data(folder: Path, *, num_items: int) -> None:
    """Write the vectors, the log, and the config."""
    item_vector_ID, _ = random_vectors(num_items, num_queries=1)
    vectors = pa.FixedSizeListArray.from_arrays(pa.array(item_vector_ID.reshape(-1)), DIM)
    pq.write_table(pa.table({"item_id": pa.array(range(num_items)), "embedding": vectors}), folder / "vectors.parquet")
    rng = np.random.default_rng(0)
    lengths = np.repeat([LIGHT_EVENTS, HEAVY_EVENTS], [NUM_LIGHT_USERS, NUM_HEAVY_USERS])
    user_L = np.repeat(np.arange(len(lengths)), lengths)
    time_L = rng.integers(0, NUM_DAYS * 86_400, len(user_L))
    log = {"user_id": user_L, "item_id": rng.integers(0, num_items, len(user_L)), "timestamp": time_L + 1_760_000_000}
    pq.write_table(pa.table(log), folder / "log.parquet")
    (folder / "nightly.yaml").write_text(CONFIG)


def measure_in_process(package: Path) -> dict[str, Any]:
    """Load the package and measure it with one thread. The time of the start includes the first answer."""
    start_s = time.perf_counter()
    import faiss
    import torch

    from recsys_core.serving.retriever import Retriever

    torch.set_num_threads(1)
    faiss.omp_set_num_threads(1)
    retriever = Retriever.load(package)
    light_users, heavy_users = np.arange(NUM_LIGHT_USERS), np.arange(NUM_HEAVY_USERS) + NUM_LIGHT_USERS
    retriever.recommend([0], K)
    first_answer_s = time.perf_counter() - start_s
    latencies_by_case = {
        "one user, 20 events": _latencies(lambda index: retriever.recommend([int(light_users[index % len(light_users)])], K)),
        "one user, 2,000 events": _latencies(
            lambda index: retriever.recommend([int(heavy_users[index % len(heavy_users)])], K), num_calls=1_000
        ),
    }
    item_vector_ID = retriever.item_vectors(np.arange(len(retriever.item_ids)))
    query_BD = np.ones((1, DIM), np.float32)
    latencies_by_case["numpy, all items"] = _latencies(
        lambda index: np.argpartition(-(item_vector_ID @ query_BD[0]), K)[:K], num_calls=30
    )
    batch_s = min(_seconds(lambda: retriever.recommend(light_users[:BATCH_ROWS], K)) for _ in range(5))
    return {
        "latencies": latencies_by_case,
        "users_per_s": BATCH_ROWS / batch_s,
        "start_s": first_answer_s,
        "index": retriever.package.index_kind,
        "index_parameters": retriever.package.index_parameters,
    }


def measure_memory(package: Path) -> dict[str, float]:
    """Load the package in two processes at the same time. Return the private and the shared memory of a process in MiB."""
    command = [sys.executable, "-m", "benchmarks.serve", "--hold", "--package", str(package)]
    processes = [
        subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(NUM_MEMORY_PROCESSES)
    ]
    try:
        for process in processes:
            assert process.stdout is not None
            if process.stdout.readline().strip() != _LOADED:
                raise RuntimeError("a process did not load the package")
        memory = psutil.Process(processes[0].pid).memory_full_info()
    finally:
        for process in processes:
            process.communicate()  # closes the standard input, after which the process ends
    return {"private_mib": memory.uss / 2**20, "shared_mib": (memory.rss - memory.uss) / 2**20}


def hold_package(package: Path) -> None:
    """Load the package, answer some requests, and keep the package in memory until the standard input ends."""
    from recsys_core.serving.retriever import Retriever

    retriever = Retriever.load(package)
    for user in range(NUM_MEMORY_REQUESTS):
        retriever.recommend([user], K)
    sys.stdout.write(f"{_LOADED}\n")
    sys.stdout.flush()
    sys.stdin.read()


def _seconds(call: Callable[[], object]) -> float:
    start_s = time.perf_counter()
    call()
    return time.perf_counter() - start_s


def _latencies(call: Callable[[int], object], *, num_calls: int = 2_000) -> dict[str, float]:
    """Return the latency in milliseconds at the 50th and the 99th percentile."""
    for index in range(min(50, num_calls)):
        call(index)
    return _percentiles([_seconds(lambda index=index: call(index)) for index in range(num_calls)])  # type: ignore[misc]


def _percentiles(seconds: Sequence[float]) -> dict[str, float]:
    cuts = quantiles(seconds, n=100)
    return {"p50_ms": 1_000 * cuts[49], "p99_ms": 1_000 * cuts[98]}


@contextmanager
def server(
    command: Sequence[str], *, port: int, health_path: str, environment: dict[str, str], log_path: Path
) -> Iterator[float]:
    """Start a server and yield the seconds until its first answer."""
    start_s = time.perf_counter()
    with log_path.open("wb") as log:
        process = subprocess.Popen(command, cwd=ROOT, env=os.environ | environment, stdout=log, stderr=log)
    try:
        while not _answers(port, health_path):
            if process.poll() is not None or time.perf_counter() - start_s > START_TIMEOUT_S:
                raise RuntimeError(log_path.read_text())
            time.sleep(0.05)
        yield time.perf_counter() - start_s
    finally:
        children = [] if process.poll() is not None else psutil.Process(process.pid).children(recursive=True)
        process.terminate()
        process.wait(30)
        for child in children:  # a server may leave child processes behind
            with suppress(psutil.NoSuchProcess):
                child.terminate()


def _answers(port: int, path: str) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    try:
        connection.request("GET", path)
        return connection.getresponse().status == 200
    except OSError:
        return False
    finally:
        connection.close()


def measure_http(port: int, path: str, body: Callable[[int], dict[str, Any]]) -> dict[str, float]:
    """Send requests for one user from NUM_CLIENTS threads for CLIENT_S. Return latencies and requests per second."""
    end_s = time.perf_counter() + CLIENT_S + 1.0
    begin_s = time.perf_counter() + 1.0  # the first second warms up

    def run_client(client: int) -> list[float]:
        seconds: list[float] = []
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
        rng = np.random.default_rng(client)
        while (now_s := time.perf_counter()) < end_s:
            content = json.dumps(body(int(rng.integers(NUM_LIGHT_USERS))))
            connection.request("POST", path, content, {"Content-Type": "application/json"})
            response = connection.getresponse()
            response.read()
            if response.status != 200:
                raise RuntimeError(f"{path}: status {response.status}")
            if now_s >= begin_s:
                seconds.append(time.perf_counter() - now_s)
        return seconds

    with ThreadPoolExecutor(NUM_CLIENTS) as pool:
        seconds = [second for client_seconds in pool.map(run_client, range(NUM_CLIENTS)) for second in client_seconds]
    return _percentiles(seconds) | {"requests_per_s": len(seconds) / CLIENT_S}


@contextmanager
def trained_package(*, num_items: int) -> Iterator[tuple[str, Path]]:
    """Execute a run. Yield the path of its config and the folder of its stage `package`."""
    with tempfile.TemporaryDirectory(prefix="bench-serve-") as folder_name:
        folder = Path(folder_name)
        write_data(folder, num_items=num_items)
        config_path = str(folder / "nightly.yaml")
        process = subprocess.run(
            [*NIGHTJAR, "run", config_path, "--json"], cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True
        )
        run = json.loads(process.stdout.splitlines()[-1])
        yield config_path, Path(run["run_dir"]) / "package"


def measure_users() -> dict[str, Any]:
    """Measure packages with few and with many users."""
    with trained_package(num_items=NUM_ITEMS_WITH_MANY_USERS) as (_, package):
        return serve_users.measure_users(package / "package")


def measure(*, num_items: int) -> dict[str, Any]:
    """Execute a run, and measure the registered version in one process and on both servers."""
    with trained_package(num_items=num_items) as (config_path, package):
        result = run_in_new_process("benchmarks.serve", "--package", str(package)) | {"num_items": num_items}
        result["memory"] = measure_memory(package)
        serve = [*NIGHTJAR, "serve", config_path, "--port", "8391"]
        with server(
            serve, port=8391, health_path="/readyz", environment={}, log_path=Path(config_path).parent / "serve.log"
        ) as start_s:
            answer = measure_http(8391, "/recommend", lambda user: {"rows": [{"user_id": user}], "params": {"k": K}})
            result["nightjar serve"] = answer | {"start_s": start_s}
        mlflow = [str(Path(sys.executable).parent / "mlflow"), "models", "serve", "-m", "models:/nightjar@champion"]
        mlflow += ["--env-manager", "local", "-p", "8392"]
        search_path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        environment = {"MLFLOW_TRACKING_URI": f"sqlite:///{Path(config_path).parent}/mlflow.db", "PATH": search_path}
        with server(
            mlflow, port=8392, health_path="/ping", environment=environment, log_path=Path(config_path).parent / "serve.log"
        ) as start_s:
            answer = measure_http(
                8392, "/invocations", lambda user: {"dataframe_records": [{"user_id": user}], "params": {"k": K}}
            )
            result["mlflow models serve"] = answer | {"start_s": start_s}
    return result


def to_markdown(result: dict[str, Any]) -> str:
    """Return the report."""
    parameters = ", ".join(f"{name} {value}" for name, value in result["index_parameters"].items())
    lines = [
        f"This page was written by `make bench-serve` on {result['date']} on {result['cores']} cores. The catalogue has",
        f"{result['num_items']:,} items with vectors of {DIM} numbers, in an index `{result['index']}` ({parameters}) that was",
        "tuned to a recall of .95 of the exact 100 best items. The model was trained on random events for one epoch. Each",
        f"request asks for {K} items.",
        "",
        "| in one process, one thread | p50, ms | p99, ms |",
        "|:---|---:|---:|",
    ]
    for name, row in result["latencies"].items():
        lines.append(f"| {name} | {row['p50_ms']:.2f} | {row['p99_ms']:.2f} |")
    lines += [
        "",
        f"Batches of {BATCH_ROWS:,} users: {result['users_per_s']:,.0f} users/s. The process needs {result['start_s']:.1f} s",
        "from the import to its first answer. Of two processes that have loaded the package, each has",
        f"{result['memory']['private_mib']:,.0f} MiB of memory of its own, most of them for the imported libraries, and",
        f"shares {result['memory']['shared_mib']:,.0f} MiB, most of them mapped files.",
        "",
        f"The next table has requests for one user from {NUM_CLIENTS} clients on the same machine, which also need its cores.",
        "",
        "| server | p50, ms | p99, ms | requests/s | start, s |",
        "|:---|---:|---:|---:|---:|",
    ]
    for name in ("nightjar serve", "mlflow models serve"):
        row = result[name]
        lines.append(
            f"| `{name}` | {row['p50_ms']:.1f} | {row['p99_ms']:.1f} | {row['requests_per_s']:,.0f} | {row['start_s']:.1f} |"
        )
    if "users" in result:
        lines += serve_users.to_markdown(result["users"])
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measure, and write serve.json and serve.md if the catalogue has the full size."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--items", type=int, default=NUM_ITEMS)
    parser.add_argument("--users", action="store_true")
    parser.add_argument("--hold", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--package", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.hold:
        hold_package(arguments.package)
        return
    if arguments.package is not None:
        sys.stdout.write(json.dumps(measure_in_process(arguments.package)) + "\n")
        return
    result_path = FOLDER / "serve.json"
    if arguments.users:
        result = json.loads(result_path.read_bytes()) | {"users": measure_users()}
    else:
        result = {"date": f"{datetime.now(UTC):%Y-%m-%d}", "cores": len(os.sched_getaffinity(0))}
        result |= measure(num_items=arguments.items)
        if arguments.items == NUM_ITEMS:
            result["users"] = measure_users()
    if arguments.users or arguments.items == NUM_ITEMS:
        result_path.write_text(json.dumps(result, indent=2) + "\n")
        (FOLDER / "serve.md").write_text(to_markdown(result))
    sys.stdout.write(to_markdown(result))


if __name__ == "__main__":
    main()
