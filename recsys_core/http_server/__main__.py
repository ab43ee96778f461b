"""Process that answers requests: `python -m recsys_core.http_server FD FOLDER INDEX`.

FD is the listening socket that all workers share. FOLDER has config.json and release.json. INDEX is the number of the worker.
The process is killed when the command that started it ends.
"""

import gc
import logging
import os
import socket
import sys
from pathlib import Path

import torch
import uvicorn

from recsys_core.errors import NightjarError
from recsys_core.http_server.access import token_from_environment
from recsys_core.http_server.app import create_app
from recsys_core.http_server.config import ServeConfig
from recsys_core.http_server.follower import ReleaseFollower
from recsys_core.http_server.release import CONFIG_FILE_NAME, worker_path
from recsys_core.termination import die_with_parent


def main() -> None:
    """Load the version in release.json, and answer requests until SIGTERM."""
    die_with_parent()
    file_descriptor, folder, worker_index = int(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    limits = ServeConfig.model_validate_json((folder / CONFIG_FILE_NAME).read_bytes())
    torch.set_num_threads(limits.threads)
    follower = ReleaseFollower(folder, state_path=worker_path(folder, worker_index), pid=os.getpid())
    try:
        follower.start()
    except NightjarError as error:
        sys.exit(str(error))
    gc.freeze()  # the model and the libraries live until the end, so the collector need not visit them
    app = create_app(follower, limits=limits, token=token_from_environment())
    server_config = uvicorn.Config(
        app,
        loop="uvloop",
        http="httptools",
        log_level="warning",
        access_log=False,
        server_header=False,
        timeout_keep_alive=75,  # longer than common clients and proxies keep an idle connection
        timeout_graceful_shutdown=max(1, round(limits.shutdown_timeout_s)),
        lifespan="on",
    )
    uvicorn.Server(server_config).run(sockets=[socket.socket(fileno=file_descriptor)])
    follower.stop()


if __name__ == "__main__":
    main()
