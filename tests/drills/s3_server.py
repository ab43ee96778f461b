"""A temporary S3 server on loopback with the bucket of infra/compose.yaml.

The server is moto's: `python3 -m venv moto && moto/bin/pip install "moto[server,s3]"`, then add `moto/bin` to PATH.
"""

import shutil
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import boto3

from tests.drills.production_servers import SERVICES, service_environment
from tests.drills.restartable_server import clean_environment, free_port

PROGRAM = "moto_server"
BUCKET = "mlflow"
START_TIMEOUT_S = 60.0


def is_installed() -> bool:
    return shutil.which(PROGRAM) is not None


@dataclass(frozen=True)
class S3Server:
    """A running S3 server with one bucket."""

    address: str

    def object_keys(self) -> list[str]:
        """Return the keys of all objects of the bucket."""
        settings = service_environment("s3-bucket")
        client: Any = boto3.client(
            "s3",
            endpoint_url=self.address,
            region_name=settings["AWS_DEFAULT_REGION"],
            aws_access_key_id=settings["AWS_ACCESS_KEY_ID"],
            aws_secret_access_key=settings["AWS_SECRET_ACCESS_KEY"],
        )
        pages = client.get_paginator("list_objects_v2").paginate(Bucket=BUCKET)
        return [entry["Key"] for page in pages for entry in page.get("Contents", [])]


@contextmanager
def s3_server(folder: Path) -> Iterator[S3Server]:
    """Start a server and create the bucket with the command of compose.yaml. The server keeps objects in memory."""
    port = free_port()
    server = S3Server(f"http://127.0.0.1:{port}")
    with (folder / "s3.log").open("wb") as log:
        process = subprocess.Popen([PROGRAM, "-H", "127.0.0.1", "-p", str(port)], stdout=log, stderr=log, cwd=folder)
    try:
        deadline = time.monotonic() + START_TIMEOUT_S
        while True:
            try:
                urllib.request.urlopen(server.address, timeout=5).close()
                break
            except OSError:
                assert process.poll() is None and time.monotonic() < deadline, (folder / "s3.log").read_text()
                time.sleep(0.3)
        _, *arguments = SERVICES["s3-bucket"]["command"]
        environment = clean_environment() | service_environment("s3-bucket") | {"AWS_ENDPOINT_URL": server.address}
        subprocess.run([sys.executable, *arguments], env=environment, check=True, capture_output=True)
        yield server
    finally:
        process.terminate()
        process.wait(timeout=30)
